"""Every configuration of a kernel gives the same bits, and measuring changes none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from subulp.nn.cached_table import EmbeddingTable
from subulp.numerics import mixture
from subulp.numerics.mixture import THREE_WAY
from subulp.ops.embedding import triton as embedding_triton
from subulp.ops.head import triton as head_triton
from subulp.ops.mixture import triton_product
from subulp.ops.mixture.operand import Operand, ProductJob
from subulp.ops.step import triton as step_triton
from subulp.ops.triton import tuning

from . import embedding_jobs
from .head_jobs import job as head_job
from .support import BF16, E4M3, FP16, FP32, Setup, assert_same, environment, interpreted, train

pytestmark = interpreted


def each(kernel: str, table: tuning.Table, compute: Callable[[], Any]) -> list[Any]:
    """What is computed with each configuration of a kernel."""
    found = []
    for configuration in table:
        with tuning.fixed(kernel, configuration):
            found.append(compute())
    return found


def head_tables() -> list[tuning.Table]:
    names = "DROPOUT", "RANDOM", "ALIGNED"
    some = itertools.product([False, True], repeat=len(names))
    return [head_triton.configurations(dict(zip(names, f, strict=True))) for f in some]


TABLES = [
    step_triton.CONFIGURATIONS,
    embedding_triton.NARROW,
    embedding_triton.WIDE,
    *head_tables(),
    *(
        triton_product.configurations(n, BF16, constant=c)
        for n in (1, 64, 65)
        for c in (False, True)
    ),
]


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_small_and_without_twins(table):
    assert 1 < len(table) <= 6
    assert all(a != b for i, a in enumerate(table) for b in table[:i])
    for configuration in table:
        # With fewer rows or warps, or more, some GPUs multiply on other units.
        if "BLOCK_LABELS" in configuration or "ROWS" in configuration:
            rows = configuration.get("BLOCK_LABELS") or configuration["ROWS"]
            assert rows >= 64
            assert configuration["num_warps"] in (4, 8)


@pytest.mark.parametrize("rows", [1, 64, 65, 4096])
def test_parts_of_products_are_multiplied_in_one_way(rows):
    together = triton_product.order_of(rows, BF16)["TOGETHER"]
    for constant in (False, True):
        for configuration in triton_product.configurations(rows, BF16, constant=constant):
            assert together % configuration["ROWS"] == 0
            assert together % configuration["COLUMNS"] == 0


@pytest.mark.parametrize(
    ("setup", "sizes", "offsets"),
    [
        (Setup("adam", "stochastic", BF16), (5000, 33, 2048), (0, 3, 8)),
        (Setup("adam", "extra-bits-7-stochastic", FP16), (3000, 70), None),
        (Setup("adam", "stochastic", E4M3), (2500, 33), None),
        (Setup("sgd", "collage-plus", BF16, nesterov=True), (2500, 33), (8, 1)),
        (Setup("sgd", "fp32", FP32), (2500, 33), None),
    ],
    ids=str,
)
def test_steps(setup, sizes, offsets):
    def step():
        return train(setup, "triton", sizes, steps=2, offsets=offsets)

    kernel = {"adam": "adam_step_kernel", "sgd": "sgd_step_kernel"}[setup.op]
    first, *others = each(kernel, step_triton.CONFIGURATIONS, step)
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 136, "batch": 20, "weight_decay": 0.1},
        {"dim": 37, "products": "bf16"},
        {"dim": 72, "precise": 70, "dropout": 0.25},
    ],
    ids=str,
)
def test_heads(changes):
    """All that a step of a head changes; the rows are more than any part has."""

    def step():
        job = head_job(labels=150, **changes)
        with np.errstate(all="ignore"):
            head_triton.run(job)
        return [job.rows.view(torch.uint8), job.grad_x, job.remainder]

    job = head_job(labels=150, **changes)
    flags = head_triton.flags_of(job, job.random.offset, precise=job.precise > 0)
    table = head_triton.configurations(flags)
    first, *others = each("update_kernel of heads", table, step)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a is b is None or torch.equal(a, b)


def factor(rows: int, k: int, partition: Any, *, is_mixed: bool) -> Operand:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
    if is_mixed:
        # In the second part of 64 rows; the third has E4M3 alone, as has the first.
        x[70:80, :32] *= torch.logspace(-4, 3, 32)
    found, summary = mixture.encode(x.bfloat16(), THREE_WAY, partition)
    return Operand(found, summary)


@pytest.mark.parametrize(
    ("rows", "partition", "is_mixed"),
    [
        (144, "tensor", False),
        (144, "channel", False),
        (144, (32, 32), True),
        (48, (16, 32), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("units", [False, True], ids=["decoded", "units"])
def test_products(rows, partition, is_mixed, units):
    a = factor(rows, 64, partition, is_mixed=is_mixed)
    b = factor(160, 64, partition, is_mixed=is_mixed)
    job = ProductJob(a, b, BF16, torch.linspace(-1, 1, 160), units=units)
    assert is_mixed == (b.sole is None)
    assert job.is_aligned

    def multiply():
        with np.errstate(all="ignore"):
            return triton_product.multiply(job).view(torch.int16)

    table = triton_product.configurations(rows, job.dtype, constant=job.is_constant)
    first, *others = each("product_kernel", table, multiply)
    assert all(torch.equal(other, first) for other in others)
    if units and is_mixed:
        # Both ways to multiply are seen: all of a part are on units, or none.
        job = replace(job, units=False)
        is_decoded = multiply() == first
        apart = [part.all() for half in is_decoded.split(128) for part in half.split(128, dim=1)]
        assert {bool(part) for part in apart} == {False, True}


def test_tables():
    """Warps are not interpreted: what is seen is that any may be asked for."""

    def compute():
        tables = embedding_jobs.of([EmbeddingTable(20, 17, "int8", 0.2)], "rowwise", [0])
        with environment(SUBULP_BACKEND="triton"), np.errstate(all="ignore"):
            return embedding_jobs.train(tables, 1, 2, False, 3)

    for kernel in ("lookup_kernel", "update_kernel of tables"):
        first, *others = each(kernel, embedding_triton.NARROW, compute)
        for other in others:
            assert first.keys() == other.keys()
            assert all(torch.equal(first[name], other[name]) for name in first)

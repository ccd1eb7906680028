"""Every configuration of a kernel gives the same bits, and measuring changes none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from subulp.nn.cached_table import EmbeddingTable
from subulp.numerics import mixture
from subulp.numerics.mixture import THREE_WAY
from subulp.ops.embedding import embedding_pool, embedding_update, embedding_weight_grad
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
    *(
        embedding_triton.lookup_configurations(block, is_long=is_long, aligned=aligned)
        for block in (16, 64, 128, 256, 512, 4096)
        for is_long in (False, True)
        for aligned in (False, True)
    ),
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
def test_heads(changes, monkeypatch):
    """All that a step of a head changes; the rows are more than any part has."""
    # The interpreter multiplies by numpy, whose sums have an order of the shape on some processors.
    monkeypatch.setattr(np, "matmul", matmul)

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


def matmul(a, b, dtype):
    """The product, term by term, whatever its shape is."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1].astype(dtype) * b[k : k + 1].astype(dtype)
    return total


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


def test_updates_of_tables():
    """Warps are not interpreted: what is seen is that any may be asked for."""

    def compute():
        tables = embedding_jobs.of([EmbeddingTable(20, 17, "int8", 0.2)], "rowwise", [0])
        with environment(SUBULP_BACKEND="triton"), np.errstate(all="ignore"):
            return embedding_jobs.train(tables, 1, 2, False, 3)

    first, *others = each("update_kernel of tables", embedding_triton.NARROW, compute)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


BAGS: tuning.Table = tuple(
    {"BAGS": bags, "AHEAD": ahead, "num_warps": 1} for bags, ahead in ((1, 2), (4, 1), (16, 2))
)


def looked_up(backend: str, dims: tuple[int, int], *, weighted: bool) -> list[torch.Tensor]:
    """What lookups of bags of none to five rows compute: output, statistics, weights' gradient.

    Five bags of a feature fill no program; tables of three formats share a launch, and the second
    feature looks up the first one's table, whose sets many of its lookups share.
    """
    configs = [
        EmbeddingTable(40, dims[0], "int8", 0.2, "lfu", 4),
        EmbeddingTable(33, dims[1], "bf16", 0.2, "lru", 2, hash="mixed"),
        EmbeddingTable(9, dims[0], "int4", 0.0),
    ]
    generator = torch.Generator().manual_seed(3)
    with environment(SUBULP_BACKEND=backend), np.errstate(all="ignore"):
        tables = embedding_jobs.of(configs, "sgd", [0, 0, 1, 2])
        lengths = torch.randint(0, 4, (4, 5), generator=generator)
        lengths[0] = torch.tensor([0, 5, 1, 0, 3])
        rows = torch.tensor([40, 40, 33, 9]).repeat_interleave(lengths.sum(1))
        values = (torch.rand(len(rows), generator=generator) * rows).long()
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)))
        weights = torch.randn(len(rows), generator=generator) if weighted else None
        width = 2 * dims[0] + dims[1] + dims[0]
        grad = torch.randn(5, width, generator=generator)
        # Caches hold some of the rows.
        with environment(SUBULP_BACKEND="reference"):
            embedding_update(*tables.update(values, offsets, None, grad, 1))
        out, statistics = embedding_pool(*tables.pool(values, offsets, weights))
        return [out, statistics, embedding_weight_grad(*tables.weight_grad(values, offsets, grad))]


@pytest.mark.parametrize(("dims", "weighted"), [((16, 32), False), ((17, 3), True)], ids=str)
def test_lookups(dims, weighted):
    """Whatever bags are beside a bag, its rows are added in the order of its lookups."""
    expected = looked_up("reference", dims, weighted=weighted)
    assert 0 < int(expected[1][:, 1].sum()) < int(expected[1][:, 0].sum())
    compute = partial(looked_up, "triton", dims, weighted=weighted)
    for found in each("lookup_kernel", BAGS, compute):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("bags", [1, 4])
def test_the_first_lookup_that_is_wrong_is_named(bags):
    """Programs take a bag's second lookup after the first one of its neighbours."""
    tables = embedding_jobs.of([EmbeddingTable(20, 8, "int8", 0.2)], "sgd", [0])
    values, offsets = torch.arange(9), torch.tensor([0, 3, 6, 9])
    values[[2, 3]] = torch.tensor([77, 99])
    configuration = {"BAGS": bags, "AHEAD": 1, "num_warps": 1}
    with environment(SUBULP_BACKEND="triton"), tuning.fixed("lookup_kernel", configuration):
        with pytest.raises(IndexError, match="row number 77 at position 2"):
            embedding_pool(*tables.pool(values, offsets, None))
        offsets[2] = 1
        with pytest.raises(ValueError, match="decrease from 3 to 1 at position 2"):
            embedding_pool(*tables.pool(values % 20, offsets, None))

"""Every configuration compiles without a stack, and multiplies on the default's units."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from subulp.numerics.metrics import LANES
from subulp.ops.embedding import triton as embedding_triton
from subulp.ops.head import triton as head_triton
from subulp.ops.mixture import triton_product
from subulp.ops.step import triton as step_triton

from . import aot_worker
from .support import BF16, E4M3, FP16, FP32, Setup

NIGHTLY = pytest.mark.nightly
on_all = pytest.mark.parametrize(
    "capability",
    [90, *(pytest.param(c, marks=NIGHTLY) for c in (80, 89, 100))],
)


def check(compiler, compile_, table) -> None:
    """Compile each configuration of a table."""
    units = set()
    for configuration in table:
        found = compiler.submit(partial(compile_, configuration=configuration)).result()
        resources = found.resources()
        assert (resources["stack"], resources["local"]) == (0, 0), configuration
        units.add(frozenset(found.units()))
    # Others would add in another order.
    assert len(units) == 1


@on_all
@pytest.mark.parametrize(
    ("dtype", "rows", "constant", "transposed"),
    [
        pytest.param(
            *(dtype, rows, constant, transposed),
            marks=[]
            if (dtype, rows) == (BF16, 512) and (not constant or transposed == (True, True))
            else NIGHTLY,
        )
        for dtype, rows, constant in (
            *((BF16, 512, constant) for constant in (False, True)),
            *((BF16, 64, constant) for constant in (False, True)),
            (FP16, 512, False),
        )
        for transposed in ((False, False), (False, True), (True, True))
    ],
    ids=str,
)
def test_products(compiler, dtype, rows, constant, transposed, capability):
    call = partial(
        aot_worker.compile_mixture_product,
        capability,
        dtype,
        rows=rows,
        transposed=transposed,
        constant=constant,
    )
    check(compiler, call, triton_product.configurations(rows, dtype, constant=constant))


@on_all
@pytest.mark.parametrize(
    ("dtype", "sizes", "products"),
    [
        (E4M3, aot_worker.MAIN, "bf16"),
        (E4M3, aot_worker.RAGGED, "bf16"),
        (E4M3, aot_worker.RAGGED, "fp32"),
        pytest.param(BF16, aot_worker.MAIN, "fp32", marks=NIGHTLY),
        pytest.param(FP16, aot_worker.RAGGED, "bf16", marks=NIGHTLY),
        pytest.param(FP32, aot_worker.MAIN, "fp32", marks=NIGHTLY),
    ],
    ids=str,
)
def test_heads(compiler, dtype, sizes, products, capability):
    call = partial(aot_worker.compile_head, dtype, capability, sizes, products)
    # Rows that begin anywhere, and weights in FP32, which are not rounded.
    is_aligned = sizes == aot_worker.MAIN
    flags = {"DROPOUT": False, "RANDOM": dtype != FP32, "ALIGNED": is_aligned}
    check(compiler, call, head_triton.configurations(flags))


@on_all
@pytest.mark.parametrize("dtype", [E4M3, pytest.param(FP32, marks=NIGHTLY)], ids=str)
def test_heads_with_dropout_and_remainders(compiler, dtype, capability):
    call = partial(aot_worker.compile_dropout, "update", dtype, capability)
    check(compiler, call, head_triton.configurations({"DROPOUT": True}))


@on_all
@pytest.mark.parametrize(
    "setup",
    [
        Setup("adam", "stochastic", BF16),
        Setup("adam", "collage-plus", BF16, grad_dtype=FP32),
        Setup("adam", "stochastic", E4M3),
        Setup("adam", "extra-bits-7-stochastic", FP16),
        Setup("sgd", "extra-bits-8", BF16, nesterov=True),
        pytest.param(Setup("adam", "fp32", FP32), marks=NIGHTLY),
        pytest.param(Setup("adam", "collage-plus", E4M3), marks=NIGHTLY),
        pytest.param(Setup("adam", "extra-bits-16", BF16), marks=NIGHTLY),
    ],
    ids=str,
)
def test_steps(compiler, setup, capability):
    call = partial(aot_worker.compile_step, setup, capability)
    check(compiler, call, step_triton.CONFIGURATIONS)


@on_all
@pytest.mark.parametrize(
    "table", [("int4", "rowwise", "lfu", 128), ("bf16", "adagrad", "lru", 300)], ids=str
)
@pytest.mark.parametrize("kernel", ["spans", "update"])
def test_updates_of_tables(compiler, kernel, table, capability):
    call = partial(aot_worker.compile_embedding, capability, kernel, table)
    narrow = table[-1] <= 128
    check(compiler, call, embedding_triton.NARROW if narrow else embedding_triton.WIDE)


@on_all
@pytest.mark.parametrize(
    "table",
    [
        ("int4", "rowwise", "lfu", 128),
        ("bf16", "adagrad", "lru", 300),
        # Not read by four elements.
        ("e4m3", "rowwise", "lru", 13),
        pytest.param(("int8", "rowwise", "lfu", 127), marks=NIGHTLY),
        pytest.param(("fp32", "sgd", "lfu", 1000), marks=NIGHTLY),
        pytest.param(("fp32", "sgd", "lfu", 61), marks=NIGHTLY),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["pool", "weight-grad"])
def test_lookups(compiler, kernel, table, capability):
    call = partial(aot_worker.compile_embedding, capability, kernel, table)
    block = max(LANES, triton.next_power_of_2(table[-1]))
    aligned = table[-1] % 4 == 0
    table = embedding_triton.lookup_configurations(block, is_long=True, aligned=aligned)
    check(compiler, call, table)

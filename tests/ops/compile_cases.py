"""Cases of every kernel, to be compiled: its main sizes, one of each kind of storage and rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from subulp.numerics.int_rows import INT8
from subulp.numerics.metrics import LANES, TILE_ROWS
from subulp.ops.all_finite import triton as all_finite_triton
from subulp.ops.embedding import triton as embedding_triton
from subulp.ops.embedding import triton_update
from subulp.ops.head import (
    triton_batch,
    triton_fp8,
    triton_logistic,
    triton_rows,
    triton_sum,
    triton_topk,
)
from subulp.ops.mixture import triton_product
from subulp.ops.step import triton as step_triton
from subulp.ops.step import triton_scales
from subulp.ops.triton.launch import Target

from . import aot_worker
from .compiled import Compiled
from .support import BF16, E4M3, FP16, FP32, Setup

TARGETS: dict[str, Target] = {"sm_80": 80, "sm_89": 89, "sm_90": 90, "sm_100": 100}
TARGETS["gfx942"] = "gfx942"


@dataclass(frozen=True)
class Case:
    """A kernel and its arguments.

    Attributes:
        compiled: The code for a ``target``.
        elements: Of a block, where a program takes blocks of elements: of the rows of a table that
            are looked up side by side or of the one that is updated, of a tile that a mixture is
            read by, of the part of a product.
    """

    compiled: Callable[..., Compiled]
    elements: int | None = None


def _step(*setup: Any, sharded: bool = False, **options: Any) -> Case:
    compiled = partial(aot_worker.compile_step, Setup(*setup, **options), sharded=sharded)
    return Case(compiled, step_triton.BLOCK)


def _scales(op: str, *, given: bool) -> Case:
    compiled = partial(aot_worker.compile_scales, op, BF16, given=given)
    return Case(compiled, None if given else triton_scales.BLOCK)


_HEAD_ELEMENTS = 64 * 64


def _head(dtype: Any, **options: Any) -> Case:
    return Case(partial(aot_worker.compile_head, dtype, **options), _HEAD_ELEMENTS)


def _table(kernel: str, *table: Any) -> Case:
    compiled = partial(aot_worker.compile_embedding, kernel=kernel, table=table)
    if kernel == "order":
        return Case(compiled, triton_update.POSITIONS)
    dim = table[-1]
    if kernel in ("pool", "weight-grad"):
        # One lookup of each bag, as the job's are.
        part = embedding_triton.lookup_configurations(dim, is_long=False, aligned=True)[0]
        return Case(compiled, part["BAGS"] * dim)
    return Case(compiled, dim)


def _logits(**options: Any) -> Case:
    return Case(partial(aot_worker.compile_logistic, loss=True, **options), triton_logistic.BLOCK)


# Of a step through a tile: its rows, and columns whose sums are apart.
_MIXTURE_ELEMENTS = TILE_ROWS * LANES


def _mixture(kernel: str) -> Case:
    # Blocks and chunks are of tiles that others have read.
    elements = None if kernel in ("blocks", "chunks") else _MIXTURE_ELEMENTS
    return Case(partial(aot_worker.compile_mixture, kernel, (128, 128), FP32), elements)


def _kept(kernel: str) -> Case:
    return Case(partial(aot_worker.compile_kept_mixture, kernel, BF16), _MIXTURE_ELEMENTS)


def _both(kernel: str) -> Case:
    compiled = partial(aot_worker.compile_mixture_both, kernel, 128, BF16)
    return Case(compiled, _MIXTURE_ELEMENTS)


def _product(
    dtype: Any = BF16,
    rows: int = 512,
    transposed: tuple[bool, bool] = (False, True),
    constant: bool = False,
) -> Case:
    part = triton_product.configurations(rows, dtype, constant=constant)[0]
    compiled = partial(
        aot_worker.compile_mixture_product,
        dtype=dtype,
        rows=rows,
        transposed=transposed,
        constant=constant,
    )
    return Case(compiled, part["ROWS"] * part["COLUMNS"])


_TABLES = {
    "fp32, SGD, LFU": ("fp32", "sgd", "lfu", 64),
    "bf16, Adagrad, LRU": ("bf16", "adagrad", "lru", 128),
    "e4m3, row-wise, LRU": ("e4m3", "rowwise", "lru", 64),
    "int8, row-wise, LFU": ("int8", "rowwise", "lfu", 128),
    "int4, row-wise, LFU": ("int4", "rowwise", "lfu", 128),
}
_TABLE = _TABLES["e4m3, row-wise, LRU"]

CASES = {
    "Adam, fp32": _step("adam", "fp32", FP32),
    "Adam, nearest, bf16": _step("adam", "nearest", BF16),
    "Adam, stochastic, bf16": _step("adam", "stochastic", BF16),
    "Adam, stochastic, bf16, shards": _step("adam", "stochastic", BF16, sharded=True),
    "Adam, kahan, bf16": _step("adam", "kahan", BF16),
    "Adam, collage-light, bf16": _step("adam", "collage-light", BF16),
    "Adam, collage-plus, bf16": _step("adam", "collage-plus", BF16),
    "Adam, master, bf16": _step("adam", "master", BF16),
    "Adam, extra-bits-8, bf16": _step("adam", "extra-bits-8", BF16),
    "Adam, extra-bits-7-stochastic, fp16": _step("adam", "extra-bits-7-stochastic", FP16),
    "Adam, stochastic, e4m3": _step("adam", "stochastic", E4M3),
    "Adam, collage-plus, e4m3": _step("adam", "collage-plus", E4M3),
    "SGD, nearest, bf16": _step("sgd", "nearest", BF16),
    "SGD, kahan, bf16": _step("sgd", "kahan", BF16),
    "SGD, extra-bits-8, bf16, Nesterov": _step("sgd", "extra-bits-8", BF16, nesterov=True),
    "SGD, stochastic, e4m3": _step("sgd", "stochastic", E4M3),
    "scales, sought": _scales("adam", given=False),
    "scales, given": _scales("sgd", given=True),
    "counts, Adam": Case(partial(aot_worker.compile_counts, "adam", E4M3, rate=FP32)),
    "counts, SGD": Case(partial(aot_worker.compile_counts, "sgd", BF16)),
    "all finite, fp32": Case(partial(aot_worker.compile_all_finite, FP32), all_finite_triton.BLOCK),
    "all finite, bf16": Case(partial(aot_worker.compile_all_finite, BF16), all_finite_triton.BLOCK),
    "head, fp32": _head(FP32),
    "head, bf16, products in bf16": _head(BF16, products="bf16"),
    "head, e4m3, products in bf16": _head(E4M3, products="bf16"),
    "head, e4m3, ragged": _head(E4M3, sizes=aot_worker.RAGGED),
    "head, e4m3, dropout and remainders": Case(
        partial(aot_worker.compile_dropout, "update", E4M3),
        _HEAD_ELEMENTS,
    ),
    "head, e4m3, weights kept": Case(
        partial(aot_worker.compile_dropout, "dropped", E4M3), triton_rows.BLOCK
    ),
    "head, e4m3, rows of a rank": Case(aot_worker.compile_part, triton_rows.BLOCK),
    "logits, fp32": _logits(narrow=False),
    "logits, bf16": _logits(narrow=True),
    "sum": Case(aot_worker.compile_sum, triton_sum.BLOCK),
    "loss": Case(aot_worker.compile_total),
    **{
        f"batch, {kernel}": Case(partial(aot_worker.compile_batch, kernel), triton_batch.BLOCK)
        for kernel in ("check", "split", "zero")
    },
    "inputs in e4m3": Case(aot_worker.compile_inputs, triton_fp8.BLOCK),
    "keys of scores": Case(aot_worker.compile_keys, triton_topk.BLOCK),
    "head, int8, decode": Case(
        partial(aot_worker.compile_integers, "decode", INT8), aot_worker.MAIN[1]
    ),
    "head, int8, step": Case(
        partial(aot_worker.compile_integers, "step", INT8), aot_worker.MAIN[1]
    ),
    "tables, weights' gradient": _table("weight-grad", *_TABLE),
    "tables, order": _table("order", *_TABLE),
    "tables, spans": _table("spans", *_TABLE),
    **{f"tables, lookup, {name}": _table("pool", *t) for name, t in _TABLES.items()},
    **{f"tables, update, {name}": _table("update", *t) for name, t in _TABLES.items()},
    **{f"mixture, {kernel}": _mixture(kernel) for kernel in aot_worker.MIXTURE_KERNELS},
    **{f"mixture, {kernel}, kept": _kept(kernel) for kernel in ("measure", "candidates", "write")},
    **{
        f"mixture, {kernel.removesuffix('_both')}, along both": _both(kernel)
        for kernel in aot_worker.BOTH_KERNELS
    },
    "mixture, product": _product(),
    "mixture, product, by tensor": _product(constant=True),
    "mixture, product, both transposed": _product(transposed=(True, True)),
    "mixture, product, fp16": _product(FP16),
    "mixture, product, few rows": _product(rows=64),
}


def measure(name: str, target: str) -> dict[str, Any]:
    """What a case compiles to, and the seconds that it takes; counts are the same everywhere."""
    case = CASES[name]
    start = time.perf_counter()
    compiled = case.compiled(target=TARGETS[target])
    seconds = round(time.perf_counter() - start, 2)
    count = len(compiled.instructions())
    found = {"seconds": seconds, **compiled.resources(), "shared": compiled.shared}
    found |= {**compiled.spills(), "instructions": count, "loops": compiled.loops()}
    if case.elements is not None:
        found["instructions_per_element"] = round(count * compiled.threads / case.elements, 1)
    return found

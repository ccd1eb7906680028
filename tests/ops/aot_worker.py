"""Compiles kernels in a process of its own: Triton cannot compile where it interprets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from subulp.nn.cached_table import CachedTable, EmbeddingTable
from subulp.numerics import E4M3, format_of, simulated
from subulp.numerics.int_rows import IntFormat, row_bytes
from subulp.numerics.mixture import RECIPES, TENSOR, THREE_WAY
from subulp.numerics.random_bits import WHOLE, Region
from subulp.ops import adam, sgd
from subulp.ops.adam import triton as adam_triton
from subulp.ops.all_finite import triton as all_finite_triton
from subulp.ops.capture import Held
from subulp.ops.embedding import Job, Lookups, TableUpdate
from subulp.ops.embedding import triton as embedding_triton
from subulp.ops.head import (
    RandomAddress,
    triton_batch,
    triton_fp8,
    triton_integers,
    triton_logistic,
    triton_rows,
    triton_sum,
    triton_topk,
)
from subulp.ops.head import triton as head_triton
from subulp.ops.head.exact_sum import LOWEST, PARTS, WIDTH
from subulp.ops.head.tiles import Place
from subulp.ops.mixture import DecodeJob
from subulp.ops.mixture import triton as mixture_triton
from subulp.ops.mixture.operand import Operand, ProductJob
from subulp.ops.sgd import triton as sgd_triton
from subulp.ops.step import triton_news, triton_scales
from subulp.ops.triton import codec
from subulp.ops.triton.choices import Configuration
from subulp.ops.triton.launch import Target, compile_for

from .compiled import Compiled
from .head_jobs import job as head_job
from .support import Setup, arguments, fresh_state


def start() -> None:
    """Nothing: by then this module is imported."""


def compile_step(
    setup: Setup,
    target: Target,
    sharded: bool = False,
    configuration: Configuration | None = None,
) -> Compiled:
    param = torch.zeros(32, dtype=setup.dtype)
    grad = param.to(setup.grad_dtype or setup.dtype)
    # Four columns of eight rows of sixteen.
    region = Region.of((8, 4), (16, 1), 0) if sharded else WHOLE
    args = arguments(setup, fresh_state(setup, [param]), [grad], 1, runs=region.runs)
    if setup.op == "adam":
        return Compiled.of(adam_triton.compile_for(target, adam.make_job(**args), configuration))
    return Compiled.of(sgd_triton.compile_for(target, sgd.make_job(**args), configuration))


def compile_after_new_names() -> None:
    """Kernels that share functions, while names of formats and recipes come to be known."""
    kernels = "measure", "candidates", "decode"
    for bits, (kernel, recipe) in enumerate(zip(kernels, RECIPES.values(), strict=False), 2):
        job: Any = mixture_triton.encode_job((64, 64), (1, 32), torch.float32, recipe)
        if kernel == "decode":
            job = DecodeJob(mixture_triton.encoded(job))
        mixture_triton.compile_for(90, kernel, job)
        codec.name_of(simulated(4, bits))


def compile_scales(
    op: str, grad_dtype: torch.dtype, target: Target, given: bool = False
) -> Compiled:
    setup = Setup(op, "nearest", torch.float8_e4m3fn, grad_dtype=grad_dtype)
    param = torch.zeros(32, dtype=setup.dtype)
    found = torch.zeros(1) if given else None
    grads = [param.to(grad_dtype)]
    args = arguments(setup, fresh_state(setup, [param]), grads, 1, gradient_amaxes=found)
    job = adam.make_job(**args) if op == "adam" else sgd.make_job(**args)
    return Compiled.of(triton_scales.compile_for(target, job))


def compile_counts(
    op: str, dtype: torch.dtype, target: Target, rate: torch.dtype | None = None
) -> Compiled:
    setup = Setup(op, "nearest", dtype)
    param = torch.zeros(32, dtype=dtype)
    lr = 0.1 if rate is None else torch.tensor(0.1, dtype=rate)
    args = arguments(setup, fresh_state(setup, [param]), [param], 0, lr=lr, held=Held())
    job = adam.make_job(**args) if op == "adam" else sgd.make_job(**args)
    return Compiled.of(triton_news.compile_for(target, job))


def compile_all_finite(dtype: torch.dtype, target: Target) -> Compiled:
    return Compiled.of(all_finite_triton.compile_for(target, dtype))


MAIN, RAGGED, ONES = (131_072, 768, 128), (1001, 100, 37), (1, 1, 1)
"""Labels, dimensions and instances of a head. Integers are compiled in where they are 1."""


def compile_head(
    dtype: torch.dtype,
    target: Target,
    sizes: tuple[int, int, int] = MAIN,
    products: str = "fp32",
    configuration: Configuration | None = None,
) -> Compiled:
    labels, dim, batch = sizes
    job = replace(
        head_job(format_of(dtype), weight_decay=0.1, products=products),
        rows=torch.empty(labels, dim, dtype=dtype, device="meta"),
        x=torch.empty(batch, dim, device="meta"),
        random=RandomAddress(seed=5, stream=0, step=3, offset=labels * dim),
    )
    return Compiled.of(head_triton.compile_for(target, job, configuration))


def compile_dropout(
    kernel: str,
    dtype: torch.dtype,
    target: Target,
    sizes: tuple[int, int, int] = MAIN,
    configuration: Configuration | None = None,
) -> Compiled:
    """The update of rows with a remainder and dropout, or the weights that are kept."""
    labels, dim, batch = sizes
    if kernel == "dropped":
        place = Place(0, labels, 0, labels)
        return Compiled.of(
            triton_rows.compile_for(target, dtype, (labels, dim), place, dropout=True)
        )
    job = replace(
        head_job(format_of(dtype), weight_decay=0.1, dropout=0.5),
        rows=torch.empty(labels, dim, dtype=dtype, device="meta"),
        remainder=torch.empty(labels // 4, dim, dtype=torch.bfloat16, device="meta"),
        x=torch.empty(batch, dim, device="meta"),
    )
    return Compiled.of(head_triton.compile_for(target, job, configuration))


def compile_part(target: Target, sizes: tuple[int, int, int] = MAIN) -> Compiled:
    """The rows of E4M3 of one rank among zeros, for BF16 and FP8 products."""
    labels, dim, _ = sizes
    place = Place(0, labels // 2, labels - labels // 2, labels)
    shape = labels // 2, dim
    return Compiled.of(
        triton_rows.compile_for(target, E4M3.dtype, shape, place, dropout=False, codes=True)
    )


def compile_logistic(
    target: Target, *, loss: bool, narrow: bool, sizes: tuple[int, int, int] = MAIN
) -> Compiled:
    labels, _, batch = sizes
    return Compiled.of(
        triton_logistic.compile_for(
            target, (labels, batch), count=5 * batch, first=labels, loss=loss, narrow=narrow
        )
    )


def compile_batch(
    kernel: str, target: Target, sizes: tuple[int, int, int] = MAIN, *, permuted: bool = True
) -> Compiled:
    """``"check"``, ``"split"`` or ``"zero"``, of a batch with five labels an instance."""
    labels, dim, batch = sizes
    shape = labels, dim, batch, 5 * batch
    return Compiled.of(triton_batch.compile_for(target, kernel, shape, permuted=permuted))


def compile_inputs(target: Target, sizes: tuple[int, int, int] = MAIN) -> Compiled:
    """Inputs in E4M3, with zeros up to multiples of 16."""
    _, dim, batch = sizes
    padded = -(-batch // 16) * 16, -(-dim // 16) * 16
    return Compiled.of(triton_fp8.compile_for(target, (batch, dim), *padded))


def compile_integers(
    kernel: str, fmt: IntFormat, target: Target, sizes: tuple[int, int, int] = MAIN
) -> Compiled:
    """``"decode"`` or ``"step"`` of a head's rows of integers, with remainders and dropout."""
    labels, dim, batch = sizes
    job = replace(
        head_job(fmt, weight_decay=0.1, dropout=0.5),
        rows=torch.empty(labels, row_bytes(dim, fmt.bits), dtype=torch.uint8, device="meta"),
        remainder=torch.empty(labels // 4, dim, dtype=torch.bfloat16, device="meta"),
        x=torch.empty(batch, dim, device="meta"),
    )
    return Compiled.of(triton_integers.compile_for(target, kernel, job))


def compile_total(target: Target) -> Compiled:
    return Compiled.of(triton_sum.compile_total(target, PARTS))


def compile_keys(target: Target, sizes: tuple[int, int, int] = MAIN) -> Compiled:
    return Compiled.of(triton_topk.compile_for(target, (sizes[2], sizes[0])))


def compile_sum(target: Target, sizes: tuple[int, int, int] = MAIN) -> Compiled:
    return Compiled.of(triton_sum.compile_for(target, sizes[0], PARTS, LOWEST, WIDTH))


TABLE_KERNELS = ("pool", "weight-grad", "order", "spans", "update")


def compile_embedding(
    target: Target,
    kernel: str,
    table: tuple[str, str, str, int],
    sizes: tuple[int, int] = (26, 2048),
    configuration: Configuration | None = None,
) -> Compiled:
    """A kernel for a table's storage, rule, policy and dimension; features and instances."""
    job = table_job(*table, *sizes)
    if kernel in ("pool", "weight-grad"):
        pool = kernel == "pool"
        return Compiled.of(
            embedding_triton.compile_lookup(target, job, pool=pool, configuration=configuration)
        )
    return Compiled.of(embedding_triton.compile_update(target, kernel, job, configuration))


def table_job(storage: str, rule: str, policy: str, dim: int, features: int, batch: int) -> Job:
    cached = CachedTable(EmbeddingTable(640, dim, storage, 0.1, policy, 8))  # type: ignore[arg-type]
    none = torch.empty(0, dtype=torch.int32)
    roles = [none if t is None else t for t in (cached.counts, cached.stamps, cached.floors)]
    shapes = {"sgd": (0,), "adagrad": (640, dim), "rowwise": (640,)}
    update = TableUpdate(*roles, torch.zeros(shapes[rule]), True, 0, 0.1, 0.1, 1e-6)
    # As models have them, beside a small table of another kind, unless there is one feature alone.
    small = TableUpdate(none, none, none, update.accumulator[:9], False, 1, 0.1, 0.1, 1e-6)
    tables = [cached.as_op(), CachedTable(EmbeddingTable(9, dim, "fp32")).as_op()]
    count = min(2, features)
    values = torch.zeros(features * batch, dtype=torch.int64)
    lookups = Lookups(
        [i % count for i in range(features)], values, torch.arange(len(values) + 1), None
    )
    return Job("update", tables[:count], lookups, updates=[update, small][:count], step=1)


MIXTURE_KERNELS = "measure", "blocks", "candidates", "chunks", "write", "decode"

MATRICES = {"square": (4096, 4096), "flat": (1024, 4096), "ragged": (1001, 300)}
"""Rows and columns of mixtures: their main sizes, and one that nothing divides."""


def mixture_job(
    kernel: str, block: tuple[int, int], dtype: torch.dtype, size: str = "square"
) -> Any:
    """A job that launches a kernel."""
    shape, recipe = MATRICES[size], THREE_WAY
    if kernel == "blocks":
        # Of more tiles than one.
        block = shape
    elif kernel == "chunks":
        shape, block, recipe = (shape[0] * 8, shape[1]), (1, 32), TENSOR
    job = mixture_triton.encode_job(shape, block, dtype, recipe)
    if kernel != "decode":
        return job
    room = torch.empty(shape, dtype=dtype, device="meta")
    return DecodeJob(mixture_triton.encoded(job), room)


def compile_mixture(
    kernel: str,
    block: tuple[int, int],
    dtype: torch.dtype,
    target: Target,
    size: str = "square",
) -> Compiled:
    job = mixture_job(kernel, block, dtype, size)
    return Compiled.of(mixture_triton.compile_for(target, kernel, job))


@triton.jit
def reciprocal_kernel(x, out, ours: tl.constexpr):
    number = tl.load(x)
    if ours:
        result = codec.reciprocal(number, "e4m3", True)
    else:
        result = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [number], dtype=tl.float32, is_pure=True, pack=1
        )
    tl.store(out, result)


def compile_reciprocal(ours: bool, target: Target) -> Compiled:
    """Of ours, or of what the assembler makes of its own."""
    told = {"x": "*fp32", "out": "*fp32"}
    return Compiled.of(compile_for(reciprocal_kernel, target, told, ours=ours, num_warps=1))


def compile_kept_mixture(kernel: str, dtype: torch.dtype, target: Target) -> Compiled:
    job = mixture_triton.encode_job((4096, 4096), (128, 128), dtype, kept=True)
    return Compiled.of(mixture_triton.compile_for(target, kernel, job))


BOTH_KERNELS = "measure_both", "candidates_both", "write_both"


def compile_mixture_both(
    kernel: str,
    side: int,
    dtype: torch.dtype,
    target: Target,
    size: str = "square",
) -> Compiled:
    job = mixture_triton.encode_both_job(MATRICES[size], side, dtype)
    return Compiled.of(mixture_triton.compile_for(target, kernel, job))


def product_job(
    target: Target,
    dtype: torch.dtype,
    rows: int,
    transposed: tuple[bool, bool],
    constant: bool,
    columns: int = 4096,
    length: int = 4096,
) -> ProductJob:
    """A product of mixtures, on units of FP8 where a GPU has them."""
    operands = []
    for height, turned in zip((rows, columns), transposed, strict=True):
        shape = (length, height) if turned else (height, length)
        job = mixture_triton.encode_job(shape, shape if constant else (128, 128), dtype)
        operands.append(Operand(mixture_triton.encoded(job), None, turned))
    units = isinstance(target, int) and target >= 89
    bias = torch.empty(columns, dtype=dtype, device="meta")
    return ProductJob(*operands, dtype, bias, units)


def compile_mixture_product(
    target: Target,
    dtype: torch.dtype,
    rows: int,
    transposed: tuple[bool, bool],
    constant: bool,
    columns: int = 4096,
    length: int = 4096,
    configuration: Configuration | None = None,
) -> Compiled:
    job = product_job(target, dtype, rows, transposed, constant, columns, length)
    return Compiled.of(mixture_triton.compile_for(target, "product", job, configuration))

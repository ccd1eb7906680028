# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products of mixtures in Triton: one launch, which looks at the types of the blocks by itself.

Where all blocks of 128 rows and 128 columns of the result are in E4M3, units of FP8 multiply them
and their scales follow; all others are decoded in registers and rounded to the dtype of the
activations. Sums are FP32.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import format_of
from ..triton import codec, tuning
from ..triton.choices import Configuration
from ..triton.launch import registers
from . import triton_recipe as recipes
from . import triton_scales as scales
from .operand import Operand, ProductJob
from .triton_decode import name_of
from .triton_tiles import Launch


def multiply(job: ProductJob) -> Tensor:
    """``a @ b.T + bias``."""
    out = job.result()
    sizes = {"rows": out.shape[0], "columns": out.shape[1], "length": job.a.shape[1]}
    configuration = tuning.choose(
        "product_kernel",
        configurations(out.shape[0], job.dtype, constant=job.is_constant),
        _flags(job) | {name: tuning.rounded(size, MOST) for name, size in sizes.items()},
        job.device,
        # Of all that a launch is given, it writes to the result alone.
        lambda: partial(_run, job, torch.empty_like(out)),
    )
    _run(job, out, configuration)
    return out


def _run(job: ProductJob, out: Tensor, configuration: Configuration) -> None:
    planned(job, out, configuration).run(job.device)


def planned(job: ProductJob, out: Tensor, configuration: Configuration | None = None) -> Launch:
    """The launch that writes the product, by default in the first of its configurations."""
    rows, columns = out.shape
    if configuration is None:
        configuration = configurations(rows, job.dtype, constant=job.is_constant)[0]
    grid = triton.cdiv(rows, configuration["ROWS"]) * triton.cdiv(columns, configuration["COLUMNS"])
    arguments = (
        *(*_arguments(job.a), *_arguments(job.b), out if job.bias is None else job.bias, out),
        *(rows, columns, job.a.shape[1]),
    )
    return Launch(product_kernel, (grid,), arguments, {**_flags(job), **configuration})


MOST = 1 << 14
"""Products with more rows, columns or terms are measured as one of so many."""

_TALL: tuning.Table = (
    {"ROWS": 128, "COLUMNS": 64, "num_warps": 8},
    {"ROWS": 128, "COLUMNS": 64, "num_warps": 8, "num_stages": 4},
    {"ROWS": 64, "COLUMNS": 128, "num_warps": 8},
    {"ROWS": 64, "COLUMNS": 128, "num_warps": 8, "num_stages": 4},
)
_SMALL: Configuration = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4}
_FEW_ROWS: tuning.Table = (
    _SMALL,
    {"ROWS": 64, "COLUMNS": 32, "num_warps": 4},
    {"ROWS": 64, "COLUMNS": 128, "num_warps": 8},
)
# Decoded FP32 takes twice the registers: only so many threads have enough of them.
_OF_FP32: tuning.Table = ({"ROWS": 64, "COLUMNS": 64, "num_warps": 8},)


def configurations(rows: int, dtype: torch.dtype, *, constant: bool) -> tuning.Table:
    """Sizes of the part of the result that a program computes, and what belongs to them.

    With fewer than 64 rows or four warps, or with more than eight, some GPUs multiply on other
    units, which add in another order.

    Args:
        rows: Rows of the result.
        dtype: Its dtype.
        constant: Whether no scale changes along the contraction.
    """
    return _OF_FP32 if dtype == torch.float32 else _narrow(rows <= 64, constant)


@cache
def _narrow(few_rows: bool, constant: bool) -> tuning.Table:
    if constant and not few_rows:
        # Two programs fit a multiprocessor, which assemblers find by themselves.
        return _TALL
    # Of 128 rows and 128 columns the numbers fill the registers, here those of so few warps do.
    table = _FEW_ROWS if few_rows else (*_TALL, _SMALL)
    return tuple({**sizes, **registers(255)} for sizes in table)


def order_of(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """What no configuration changes.

    Returns:
        ``PART``, how many values are decoded at once, which is an order of the sums; ``TOGETHER``,
        rows and columns of the result that units of FP8 multiply together or not at all, at least
        those of any part; ``BAND``, rows of parts that share what they read of the second factor.
    """
    tall = rows > 64 and dtype != torch.float32
    return {"PART": 32 if tall else 16, "TOGETHER": 128, "BAND": 8}


def _flags(job: ProductJob) -> dict[str, Any]:
    assert job.step is not None
    return {
        **_constants("A_", job.a),
        **_constants("B_", job.b),
        "TO": format_of(job.dtype).name,
        "BIAS": job.bias is not None,
        "UNITS": job.units and job.is_aligned,
        "STEP": job.step,
        "CONSTANT": job.is_constant,
        **order_of(job.a.shape[0], job.dtype),
        "INTERPRETED": not isinstance(product_kernel, triton.JITFunction),
    }


def _arguments(operand: Operand) -> tuple[Any, ...]:
    """Tensors and sizes of a factor, as its rows and the contraction see them."""
    m = operand.mixture
    of_blocks, of_groups = (m.exponents.shape[1], 1), (m.mantissa.shape[2], 1)
    pairs = (m.block, of_blocks, m.blocks_of_group, of_groups)
    turned = [pair[::-1] if operand.transposed else pair for pair in pairs]
    low = m.lower_bytes() if m.wide.numel() else m.codes
    tensors = m.codes, low, m.types, m.mantissa, m.exponents
    return (
        *(tensor.contiguous() for tensor in tensors),
        m.mantissa.shape[1] * m.mantissa.shape[2],
        *(size for pair in turned for size in pair),
    )


def _constants(prefix: str, operand: Operand) -> dict[str, Any]:
    m = operand.mixture
    found = {
        "RECIPE": name_of(m.formats),
        "OF_TENSOR": m.types.numel() == 1,
        "WIDE": m.wide_format.name,
        "LOW": m.wide.numel() > 0,
        "TURNED": operand.transposed,
    }
    return {f"{prefix}{name}": value for name, value in found.items()}


# -------------------------------------------------------------------------------------- the kernel


@triton.jit
def blocks_at(
    types,
    mantissa,
    exponents,
    group_count,
    row,
    here,
    k,
    height,
    width,
    block_row,
    block_k,
    group_height,
    group_width,
    group_row,
    group_k,
    RECIPE: tl.constexpr,
    OF_TENSOR: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Types of the blocks of some rows at one place of the contraction, and inverse scales."""
    i = row // height
    j = k // width
    block = i * block_row + j * block_k
    group = i // group_height * group_row + j // group_width * group_k
    if OF_TENSOR and not UNITS:
        # Fewer registers, which run short on sm_80; beside the code for units assemblers spill some
        # for it.
        kind = tl.broadcast_to(tl.load(types).to(tl.int32), row.shape)
    else:
        kind = tl.load(types + block * (not OF_TENSOR), mask=here, other=0).to(tl.int32)
    shared = tl.load(mantissa + group, mask=here, other=1.0)
    for other in tl.static_range(1, recipes.narrow_formats(RECIPE)):
        if recipes.mantissa_row(RECIPE, other) > 0:
            mine = here & (kind == other)
            at = mantissa + recipes.mantissa_row(RECIPE, other) * group_count + group
            shared = tl.where(mine, tl.load(at, mask=mine, other=1.0), shared)
    exponent = tl.load(exponents + block, mask=here, other=0).to(tl.int32)
    scale = scales.join(shared.to(tl.int32, bitcast=True), exponent)
    return kind, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def all_in_e4m3(
    types,
    row,
    here,
    length,
    height,
    width,
    block_row,
    block_k,
    RECIPE: tl.constexpr,
    OF_TENSOR: tl.constexpr,
):
    """1 if all blocks of some rows are, else 0."""
    others = tl.zeros(row.shape, tl.int32)
    first = row // height * block_row
    if OF_TENSOR:
        others += tl.load(types) != recipes.type_of(RECIPE, "e4m3")
    else:
        for k in range(0, tl.cdiv(length, width)):
            kind = tl.load(types + first + k * block_k, mask=here, other=0).to(tl.int32)
            others += (here & (kind != recipes.type_of(RECIPE, "e4m3"))).to(tl.int32)
    return tl.where(tl.max(others, 0) > 0, 0, 1)


@triton.jit
def rounded(value, TO: tl.constexpr):
    """FP32 values that a narrower dtype has: the interpreter does not multiply BF16."""
    return codec.value(codec.nearest(value, TO), TO)


@triton.jit
def decoded(
    codes,
    low,
    types,
    mantissa,
    exponents,
    group_count,
    row,
    of_rows,
    begin,
    length,
    stride_row,
    stride_k,
    height,
    width,
    block_row,
    block_k,
    group_height,
    group_width,
    group_row,
    group_k,
    RECIPE: tl.constexpr,
    OF_TENSOR: tl.constexpr,
    WIDE: tl.constexpr,
    LOW: tl.constexpr,
    TO: tl.constexpr,
    PART: tl.constexpr,
    UNITS: tl.constexpr,
    CONSTANT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Values of some rows, rounded."""
    last: tl.constexpr = recipes.narrow_formats(RECIPE)
    k = begin + tl.arange(0, PART)
    here = of_rows[:, None] & (k < length)[None, :]
    at = row[:, None].to(tl.int64) * stride_row + k[None, :] * stride_k
    # The first block is the only one.
    of_block = 0 if CONSTANT and not UNITS else begin
    kind, inverse = blocks_at(
        types, mantissa, exponents, group_count, row, of_rows, of_block, height, width, block_row,
        block_k, group_height, group_width, group_row, group_k, RECIPE, OF_TENSOR, UNITS,
    )  # fmt: skip
    code = tl.load(codes + at, mask=here, other=0).to(tl.uint32)
    value = codec.value(code, recipes.candidate(RECIPE, 0))
    for i in tl.static_range(1, last):
        other = codec.value(code, recipes.candidate(RECIPE, i))
        value = tl.where(kind[:, None] == i, other, value)
    value = value * inverse[:, None]
    if TO == "fp16":
        # Nothing finite becomes infinite.
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    if LOW:
        is_wide = (kind == last)[:, None]
        lower = tl.load(low + at, mask=here & is_wide, other=0).to(tl.uint32)
        both = code << 8 | lower
    # FP16's numbers are taken as they are stored: by way of FP32 they need registers.
    stored: tl.constexpr = LOW and TO == "fp16" and WIDE == "fp16" and not INTERPRETED
    if LOW and not stored:
        value = tl.where(is_wide, codec.value(both, WIDE), value)
    if TO != "fp32":
        if INTERPRETED:
            value = rounded(value, TO)
        else:
            value = value.to(tl.float16 if TO == "fp16" else tl.bfloat16)
    if stored:
        value = tl.where(is_wide, both.to(tl.uint16).to(tl.float16, bitcast=True), value)
    return value


@triton.jit
def product_kernel(
    a_codes,
    a_low,
    a_types,
    a_mantissa,
    a_exponents,
    a_group_count,
    a_height,
    a_width,
    a_block_row,
    a_block_k,
    a_group_height,
    a_group_width,
    a_group_row,
    a_group_k,
    b_codes,
    b_low,
    b_types,
    b_mantissa,
    b_exponents,
    b_group_count,
    b_height,
    b_width,
    b_block_row,
    b_block_k,
    b_group_height,
    b_group_width,
    b_group_row,
    b_group_k,
    bias,
    out,
    rows,
    columns,
    length,
    A_RECIPE: tl.constexpr,
    A_OF_TENSOR: tl.constexpr,
    A_WIDE: tl.constexpr,
    A_LOW: tl.constexpr,
    A_TURNED: tl.constexpr,
    B_RECIPE: tl.constexpr,
    B_OF_TENSOR: tl.constexpr,
    B_WIDE: tl.constexpr,
    B_LOW: tl.constexpr,
    B_TURNED: tl.constexpr,
    TO: tl.constexpr,
    BIAS: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PART: tl.constexpr,
    TOGETHER: tl.constexpr,
    CONSTANT: tl.constexpr,
    BAND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Programs of a band of rows follow each other, column by column.
    if UNITS:
        # So the compiler knows that vectors are whole.
        rows, columns, length = rows // 16 * 16, columns // 16 * 16, length // 16 * 16
    a_stride_row = 1 if A_TURNED else length
    a_stride_k = tl.cast(rows, tl.int64) if A_TURNED else 1
    b_stride_row = 1 if B_TURNED else length
    b_stride_k = tl.cast(columns, tl.int64) if B_TURNED else 1
    down = tl.cdiv(rows, ROWS)
    of_band = BAND * tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0) // of_band * BAND
    height = tl.minimum(down - first, BAND)
    first_row = (first + tl.program_id(0) % of_band % height) * ROWS
    first_column = tl.program_id(0) % of_band // height * COLUMNS
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    of_a, of_b = row < rows, column < columns
    a_at = a_codes + row[:, None].to(tl.int64) * a_stride_row
    b_at = b_codes + column[:, None].to(tl.int64) * b_stride_row
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    narrow = 0
    if UNITS:
        # The same rows and columns whatever the tile: what units multiply is rounded otherwise.
        lane = tl.arange(0, TOGETHER)
        rows_of_a = first_row // TOGETHER * TOGETHER + lane
        rows_of_b = first_column // TOGETHER * TOGETHER + lane
        narrow = all_in_e4m3(
            a_types, rows_of_a, rows_of_a < rows, length, a_height, a_width, a_block_row, a_block_k,
            A_RECIPE, A_OF_TENSOR,
        ) * all_in_e4m3(
            b_types, rows_of_b, rows_of_b < columns, length, b_height, b_width, b_block_row,
            b_block_k, B_RECIPE, B_OF_TENSOR,
        )  # fmt: skip
    if UNITS and narrow != 0:
        for begin in range(0, length, STEP):
            k = begin + tl.arange(0, STEP)
            a = tl.load(
                a_at + k[None, :] * a_stride_k,
                of_a[:, None] & (k < length)[None, :],
                other=0,
            )
            b = tl.load(
                b_at + k[None, :] * b_stride_k,
                of_b[:, None] & (k < length)[None, :],
                other=0,
            )
            a, b = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
            if CONSTANT:
                # Units of Hopper keep few bits of long sums.
                total = tl.dot(a, tl.trans(b), total, max_num_imprecise_acc=STEP)
            else:
                _kind, a_inverse = blocks_at(
                    a_types, a_mantissa, a_exponents, a_group_count, row, of_a, begin, a_height,
                    a_width, a_block_row, a_block_k, a_group_height, a_group_width, a_group_row,
                    a_group_k, A_RECIPE, A_OF_TENSOR, UNITS,
                )  # fmt: skip
                _kind, b_inverse = blocks_at(
                    b_types, b_mantissa, b_exponents, b_group_count, column, of_b, begin, b_height,
                    b_width, b_block_row, b_block_k, b_group_height, b_group_width, b_group_row,
                    b_group_k, B_RECIPE, B_OF_TENSOR, UNITS,
                )  # fmt: skip
                total += tl.dot(a, tl.trans(b)) * a_inverse[:, None] * b_inverse[None, :]
        if CONSTANT:
            _kind, a_inverse = blocks_at(
                a_types, a_mantissa, a_exponents, a_group_count, row, of_a, 0, a_height, a_width,
                a_block_row, a_block_k, a_group_height, a_group_width, a_group_row, a_group_k,
                A_RECIPE, A_OF_TENSOR, UNITS,
            )  # fmt: skip
            _kind, b_inverse = blocks_at(
                b_types, b_mantissa, b_exponents, b_group_count, column, of_b, 0, b_height, b_width,
                b_block_row, b_block_k, b_group_height, b_group_width, b_group_row, b_group_k,
                B_RECIPE, B_OF_TENSOR, UNITS,
            )  # fmt: skip
            total *= a_inverse[:, None] * b_inverse[None, :]
    else:
        for begin in range(0, length, PART):
            left = decoded(
                a_codes, a_low, a_types, a_mantissa, a_exponents, a_group_count, row, of_a, begin,
                length, a_stride_row, a_stride_k, a_height, a_width, a_block_row, a_block_k,
                a_group_height, a_group_width, a_group_row, a_group_k, A_RECIPE, A_OF_TENSOR,
                A_WIDE, A_LOW, TO, PART, UNITS, CONSTANT, INTERPRETED,
            )  # fmt: skip
            right = decoded(
                b_codes, b_low, b_types, b_mantissa, b_exponents, b_group_count, column, of_b,
                begin, length, b_stride_row, b_stride_k, b_height, b_width, b_block_row, b_block_k,
                b_group_height, b_group_width, b_group_row, b_group_k, B_RECIPE, B_OF_TENSOR,
                B_WIDE, B_LOW, TO, PART, UNITS, CONSTANT, INTERPRETED,
            )  # fmt: skip
            # FP32 is not cut to TF32.
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if BIAS:
        added = tl.load(bias + column, mask=of_b, other=0.0).to(tl.float32)
        total += added[None, :]
    if INTERPRETED and TO == "bf16":
        total = rounded(total, TO)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    here = of_a[:, None] & of_b[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=here)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decoding in Triton: one launch, whatever the types of the blocks, to FP32, BF16 or FP16."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ...numerics import Format, format_of
from ...numerics.mixture import Entry, Recipe, always
from ..triton import codec
from . import triton_recipe as recipes
from . import triton_scales as scales
from .job import DecodeJob
from .triton_tiles import Launch, Tiles, place, steps, warps_of


def decode(job: DecodeJob) -> Tensor:
    """The matrix."""
    out = job.result()
    planned(job, out).run(job.device)
    return out


def planned(job: DecodeJob, out: Tensor) -> Launch:
    """The launch that writes the matrix."""
    m = job.mixture
    tiles = Tiles(m.shape, m.block)
    # Without wide blocks there is none, and no kernel asks for it.
    low = m.lower_bytes() if m.wide.numel() else m.codes
    arguments = (
        *(m.codes.contiguous(), m.types.contiguous(), m.mantissa.contiguous()),
        *(m.exponents.contiguous(), low.contiguous(), out.view(codec.WORDS[out.dtype.itemsize])),
        *(m.mantissa.shape[1] * m.mantissa.shape[2], *tiles.sizes),
        *(*m.blocks_of_group, m.mantissa.shape[2]),
    )
    options = {
        "RECIPE": name_of(m.formats),
        "OF_TENSOR": m.types.numel() == 1,
        "WIDE": m.wide_format.name,
        "LOW": m.wide.numel() > 0,
        "TO": format_of(out.dtype).name,
        **tiles.layout,
        "num_warps": warps_of(tiles.layout),
    }
    return Launch(decode_kernel, (tiles.programs,), arguments, options)


@functools.cache
def name_of(formats: tuple[Format, ...]) -> str:
    """A recipe of these formats: what chose among them does not matter any more."""
    return recipes.name_of(Recipe("decoded", tuple(Entry(fmt, always) for fmt in formats)))


# -------------------------------------------------------------------------------------- the kernel


@triton.jit
def inverse_of(
    mantissa,
    exponents,
    block,
    here,
    group_count,
    across,
    group_rows,
    group_columns,
    groups_across,
    ROW: tl.constexpr,
):
    """What values of blocks are multiplied by."""
    group = scales.group_of(block, across, group_rows, group_columns, groups_across)
    shared = tl.load(mantissa + ROW * group_count + group, mask=here, other=1.0)
    exponent = tl.load(exponents + block, mask=here, other=0).to(tl.int32)
    scale = scales.join(shared.to(tl.int32, bitcast=True), exponent)
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def decode_kernel(
    codes,
    types,
    mantissa,
    exponents,
    low,
    out,
    group_count,
    rows,
    columns,
    block_rows,
    block_columns,
    across,
    tiles_down,
    tiles_across,
    group_rows,
    group_columns,
    groups_across,
    RECIPE: tl.constexpr,
    OF_TENSOR: tl.constexpr,
    WIDE: tl.constexpr,
    LOW: tl.constexpr,
    TO: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    row, inside, start, end, block, _tile, exists = place(
        tl.program_id(0), rows, columns, block_rows, block_columns, across, tiles_down,
        tiles_across, ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    kind = tl.load(types + block * (not OF_TENSOR)).to(tl.int32)
    last: tl.constexpr = recipes.narrow_formats(RECIPE)
    for i in tl.static_range(last + LOW):
        if tl.max((kind == i).to(tl.int32), 0) > 0:
            mine = inside & (kind == i)
            if i < last:
                factor = inverse_of(
                    mantissa, exponents, block, exists, group_count, across, group_rows,
                    group_columns, groups_across, recipes.mantissa_row(RECIPE, i),
                )[:, None]  # fmt: skip
            for begin in range(start, end, LANES):
                column = begin + tl.arange(0, LANES)
                at, here = steps(row, mine, column, end, columns)
                code = tl.load(codes + at, mask=here, other=0).to(tl.uint32)
                if i < last:
                    value = codec.value(code, recipes.candidate(RECIPE, i)) * factor
                else:
                    lower = tl.load(low + at, mask=here, other=0).to(tl.uint32)
                    value = codec.value(code << 8 | lower, WIDE)
                tl.store(out + at, codec.nearest(value, TO), mask=here)

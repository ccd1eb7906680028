# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Magnitudes of a matrix in Triton, from which scales follow, and a number of all its bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton import codec
from . import triton_scales as scales
from .triton_tiles import load, place, steps


@triton.jit
def spread(x):
    """Numbers (uint32) each of whose bits depends on all bits of ``x``, one to one."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def marks_of(value, at, here):
    """What values at their places add to the number of a matrix's bytes, int64.

    Two functions of a value and its place, each one to one in the value: another value at a place
    is always noticed, and others at several places as good as always.
    """
    bits = value.to(tl.uint32, bitcast=True)
    place = at.to(tl.uint32)
    low = spread(bits ^ (place * 0x9E3779B1))
    high = spread(bits * 0x27D4EB2F + place * 0x165667B1)
    both = (high.to(tl.int64) << 32) | low.to(tl.int64)
    return tl.where(here, both, 0)


@triton.jit
def note_blocks(
    top,
    bottom,
    total,
    block,
    here,
    amax,
    least,
    counted,
    groups,
    whole,
    across,
    group_rows,
    group_columns,
    groups_across,
    GROUPS: tl.constexpr,
    OF_TENSOR: tl.constexpr,
):
    """Write magnitudes of blocks, and add them to those of groups and the tensor."""
    # Patterns of NaNs lie above infinity's.
    top = tl.minimum(top, 0x7F800000)
    finite = top < 0x7F800000
    bottom = tl.where(finite, tl.minimum(bottom, 0x7F800000), 0x7F800000)
    total = tl.where(finite, total, 0).to(tl.int64)
    tl.store(amax + block, top.to(tl.float32, bitcast=True), mask=here)
    tl.store(least + block, bottom.to(tl.float32, bitcast=True), mask=here)
    tl.store(counted + block, total, mask=here)
    # Of these, no order shows in the result.
    if OF_TENSOR:
        tl.atomic_max(whole, tl.max(tl.where(here, top, 0), 0).to(tl.int64))
        # All begin at 0, this one too.
        tl.atomic_max(whole + 1, tl.max(tl.where(here, 0x7F800000 - bottom, 0), 0).to(tl.int64))
        tl.atomic_add(whole + 2, tl.sum(tl.where(here, total, 0), 0))
    of_group = tl.where(finite & here, top, 0)
    if GROUPS == "one":
        tl.atomic_max(groups, tl.max(of_group, 0))
    elif GROUPS == "many":
        group = scales.group_of(block, across, group_rows, group_columns, groups_across)
        tl.atomic_max(groups + group, of_group, mask=here)


@triton.jit
def measure_kernel(
    x,
    largest,
    smallest,
    counts,
    amax,
    least,
    counted,
    groups,
    whole,
    now,
    after,
    group_count,
    stride_row,
    stride_column,
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
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    OF_TENSOR: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    row, inside, start, end, _block, tile, exists = place(
        tl.program_id(0), rows, columns, block_rows, block_columns, across, tiles_down,
        tiles_across, ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    most = tl.zeros((ROWS, LANES), tl.int32)
    least_of = tl.full((ROWS, LANES), 0x7FFFFFFF, tl.int32)
    count = tl.zeros((ROWS, LANES), tl.int32)
    if KEPT:
        mark = tl.zeros((ROWS, LANES), tl.int64)
    for begin in range(start, end, LANES):
        column = begin + tl.arange(0, LANES)
        at, here = steps(row, inside, column, end, columns)
        value = load(x, row, column, here, stride_row, stride_column, FORMAT)
        magnitude = codec.magnitude_of(value).to(tl.int32)
        some = magnitude != 0
        most = tl.maximum(most, magnitude)
        least_of = tl.minimum(least_of, tl.where(some, magnitude, 0x7FFFFFFF))
        count += some.to(tl.int32)
        if KEPT:
            mark += marks_of(value, at, here)
    most_, least_, count_ = tl.max(most, 1), tl.min(least_of, 1), tl.sum(count, 1)
    if not BY_ROW:
        most_ = tl.max(most_, 0, keep_dims=True)
        least_ = tl.min(least_, 0, keep_dims=True)
        count_ = tl.sum(count_, 0, keep_dims=True)
    if IS_BLOCK:
        note_blocks(
            most_, least_, count_, tile, exists, amax, least, counted, groups, whole, across,
            group_rows, group_columns, groups_across, GROUPS, OF_TENSOR,
        )  # fmt: skip
    else:
        # What the next launch begins with; there are no more groups than tiles.
        tl.store(groups + tile, tl.zeros(tile.shape, tl.int32), mask=exists & (tile < group_count))
        tl.store(largest + tile, most_, mask=exists)
        tl.store(smallest + tile, least_, mask=exists)
        tl.store(counts + tile, count_, mask=exists)
    if KEPT:
        tl.atomic_add(now, tl.sum(tl.sum(mark, 1), 0))
        if tl.program_id(0) == 0:
            tl.store(after, tl.zeros((), tl.int64))


@triton.jit
def blocks_kernel(
    largest,
    smallest,
    counts,
    amax,
    least,
    counted,
    groups,
    whole,
    blocks,
    across,
    tiles_down,
    tiles_across,
    group_rows,
    group_columns,
    groups_across,
    TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    OF_TENSOR: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    here = block < blocks
    width = across * tiles_across
    first = block // across * tiles_down * width + block % across * tiles_across
    most = tl.zeros((BLOCKS, TILES), tl.int32)
    few = tl.full((BLOCKS, TILES), 0x7F800000, tl.int32)
    count = tl.zeros((BLOCKS, TILES), tl.int64)
    for begin in range(0, tiles_down * tiles_across, TILES):
        tile = begin + tl.arange(0, TILES)
        at = first[:, None] + (tile // tiles_across * width + tile % tiles_across)[None, :]
        some = here[:, None] & (tile < tiles_down * tiles_across)[None, :]
        most = tl.maximum(most, tl.load(largest + at, mask=some, other=0))
        few = tl.minimum(few, tl.load(smallest + at, mask=some, other=0x7F800000))
        count += tl.load(counts + at, mask=some, other=0)
    note_blocks(
        tl.max(most, 1), tl.min(few, 1), tl.sum(count, 1), block, here, amax, least, counted,
        groups, whole, across, group_rows, group_columns, groups_across, GROUPS, OF_TENSOR,
    )  # fmt: skip

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A matrix and its transpose encoded together by sub-channels in Triton, from one read a launch.

Scales and decisions of the two differ, and so do sums of errors. A program reads a tile whose
columns and rows are whole blocks of both, 16 rows at a time: blocks along rows are complete with
them, blocks along columns with the tile. Launches are those of triton_encode.py, each of them for
both; numbers and orders of sums are the same.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...numerics import format_of
from ...numerics.mixture import wide_format_of
from ..triton import codec
from . import triton_recipe as recipes
from .job import EncodeBothJob, part_of
from .triton_encode import WRITERS, Plan, scale_of, tried, write_blocks
from .triton_measure import note_blocks
from .triton_tiles import Launch, halves, load

_WIDTH = 128


def encode(job: EncodeBothJob) -> tuple[Tensor, ...]:
    """The stored tensors and the numbers of the summary of the matrix, then of its transpose."""
    found, launches = planned(job)
    for each in launches:
        each.run(job.device)
    return found


def planned(job: EncodeBothJob) -> tuple[tuple[Tensor, ...], list[Launch]]:
    """All results, and the launches that write them."""
    plans = Plan(job.along_rows), Plan(job.along_columns)
    found = [(plan.stored(), plan.numbers()) for plan in plans]
    results = tuple(t for stored, numbers in found for t in (*stored, numbers))
    side = job.side
    assert side is not None
    return results, _launches(job.along_rows.x, plans, found, side)


def _launches(
    x: Tensor,
    plans: tuple[Plan, Plan],
    found: list[tuple[tuple[Tensor, ...], Tensor]],
    side: int,
) -> list[Launch]:
    plan = plans[0]
    words = x.view(codec.WORDS[x.dtype.itemsize])
    programs = triton.cdiv(x.shape[0], side) * triton.cdiv(x.shape[1], _WIDTH)
    of_x = *x.stride(), *x.shape
    sizes = *of_x, *(size for p in plans for size in (p.tiles.grid[1], *p.group_sizes))
    options: dict[str, Any] = {"FORMAT": format_of(x.dtype).name, "SIDE": side, "num_warps": 4}
    asked = {"GROUPS": plan.asked, "GROUPS_T": plans[1].asked, "OF_TENSOR": plan.of_tensor}
    measured = tuple(t for p in plans for t in (*p.of_blocks, p.groups, p.whole))
    recipe = {
        "RECIPE": plan.recipe,
        "SCALING": plan.job.scaling,
        "CONVERTS": plan.converts,
    }
    of_each = tuple(
        t
        for p, (stored, _numbers) in zip(plans, found, strict=True)
        for t in (p.of_blocks[0], p.groups, stored[0], p.sums)
    )
    pairs = triton.cdiv(plan.sums.shape[0], 2)
    launches = [
        Launch(measure_both_kernel, (programs,), (words, *measured, *sizes), options | asked),
        Launch(
            candidates_both_kernel,
            (programs, pairs),
            (words, *of_each, *sizes),
            # Two sums of each value's column are many registers for fewer threads.
            options | recipe | {"METRIC": plan.job.metric, "num_warps": 8},
        ),
    ]
    arguments: list[Any] = []
    kinds = []
    for p, (stored, numbers) in zip(plans, found, strict=True):
        codes, types, mantissa, exponents, low = stored
        kind, chunks, of_chunks, before = p.chunks()
        launches += before
        kinds.append(kind)
        arguments += [*p.of_blocks, p.whole, p.sums, of_chunks, p.groups]
        arguments += [codes, low, types, mantissa, exponents, numbers]
        arguments += [numbers.shape[0], chunks, p.tiles.blocks, mantissa[0].numel()]
        arguments += [p.job.block[1], p.tiles.grid[1], *p.group_sizes]
    parts = sum(numbers.shape[0] for _stored, numbers in found)
    # Where codes cannot be written as vectors, each has an address of its own, in registers.
    is_aligned = all(size == 1 or size % 16 == 0 for size in of_x)
    written = {
        "WIDE": wide_format_of(x.dtype).name,
        "PART": part_of(plan.job.block),
        "CHUNKS": kinds[0],
        "CHUNKS_T": kinds[1],
        "num_warps": 4 if is_aligned else 8,
    }
    launches.append(
        Launch(
            write_both_kernel,
            (parts + min(WRITERS, programs),),
            (words, *arguments, plan.job.threshold, programs, *of_x),
            options | recipe | written,
        )
    )
    return launches


# ------------------------------------------------------------------------------------- the kernels


@triton.jit
def blocks_of_rows(row, first, rows, across, SIDE: tl.constexpr):
    """Blocks along 16 rows of a tile, flattened, and which of them exist."""
    block = tl.arange(0, 128 // SIDE) + first // SIDE
    here = (row < rows)[:, None] & (block < across)[None, :]
    at = row[:, None] * across + block[None, :]
    size: tl.constexpr = 16 * (128 // SIDE)
    return tl.reshape(at, (size,)), tl.reshape(here, (size,))


@triton.jit
def over_columns(x, SIDE: tl.constexpr):
    """Numbers of blocks along rows (n,) at each of the values: (16, 128)."""
    n: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, None], (n, SIDE)), (16, 128))


@triton.jit
def place(row, column, columns):
    """Places of values in a matrix."""
    return row[:, None].to(tl.int64) * columns + column[None, :]


@triton.jit
def place_of_transpose(row, column, rows):
    """Places of values in the transpose."""
    return column[None, :].to(tl.int64) * rows + row[:, None]


@triton.jit
def add_in_order(total, x, STEPS: tl.constexpr):
    """Add (n, STEPS, 16) to (n, 16), step by step."""
    n: tl.constexpr = total.shape[0]
    if STEPS == 1:
        total += tl.reshape(x, (n, 16))
    else:
        parts = tl.permute(tl.reshape(x, (n, 2, STEPS // 2, 16)), (0, 2, 3, 1))
        first, second = tl.split(parts)
        total = add_in_order(total, first, STEPS // 2)
        total = add_in_order(total, second, STEPS // 2)
    return total


@triton.jit
def sums_of_rows(term, SIDE: tl.constexpr):
    """Sums of blocks along rows from the terms of 16 rows, in the order of sixteen lanes."""
    n: tl.constexpr = 16 * (128 // SIDE)
    total = tl.zeros((n, 16), tl.float32)
    total = add_in_order(total, tl.reshape(term, (n, SIDE // 16, 16)), SIDE // 16)
    return halves(total, 16)


@triton.jit
def measure_both_kernel(
    x,
    amax,
    least,
    counted,
    groups,
    whole,
    amax_t,
    least_t,
    counted_t,
    groups_t,
    whole_t,
    stride_row,
    stride_column,
    rows,
    columns,
    across,
    group_rows,
    group_columns,
    groups_across,
    across_t,
    group_rows_t,
    group_columns_t,
    groups_across_t,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_T: tl.constexpr,
    OF_TENSOR: tl.constexpr,
    SIDE: tl.constexpr,
):
    wide = tl.cdiv(columns, 128)
    unit, first = tl.program_id(0) // wide, tl.program_id(0) % wide * 128
    column = first + tl.arange(0, 128)
    n: tl.constexpr = 16 * (128 // SIDE)
    most_t = tl.zeros((16, 128), tl.int32)
    few_t = tl.full((16, 128), 0x7FFFFFFF, tl.int32)
    count_t = tl.zeros((16, 128), tl.int32)
    for begin in range(0, SIDE, 16):
        row = unit * SIDE + begin + tl.arange(0, 16)
        here = (row < rows)[:, None] & (column < columns)[None, :]
        value = load(x, row, column, here, stride_row, stride_column, FORMAT)
        magnitude = codec.magnitude_of(value).to(tl.int32)
        some = magnitude != 0
        smallest = tl.where(some, magnitude, 0x7FFFFFFF)
        most_t = tl.maximum(most_t, magnitude)
        few_t = tl.minimum(few_t, smallest)
        count_t += some.to(tl.int32)
        block, exists = blocks_of_rows(row, first, rows, across, SIDE)
        note_blocks(
            tl.max(tl.reshape(magnitude, (n, SIDE)), 1), tl.min(tl.reshape(smallest, (n, SIDE)), 1),
            tl.sum(tl.reshape(some.to(tl.int32), (n, SIDE)), 1), block, exists, amax, least,
            counted, groups, whole, across, group_rows, group_columns, groups_across, GROUPS,
            OF_TENSOR,
        )  # fmt: skip
    note_blocks(
        tl.max(most_t, 0), tl.min(few_t, 0), tl.sum(count_t, 0), column * across_t + unit,
        column < columns, amax_t, least_t, counted_t, groups_t, whole_t, across_t, group_rows_t,
        group_columns_t, groups_across_t, GROUPS_T, OF_TENSOR,
    )  # fmt: skip


@triton.jit
def errors_of_both(
    first_of: tl.constexpr,
    x,
    amax,
    groups,
    codes,
    sums,
    amax_t,
    groups_t,
    codes_t,
    sums_t,
    stride_row,
    stride_column,
    rows,
    columns,
    across,
    group_rows,
    group_columns,
    groups_across,
    across_t,
    group_rows_t,
    group_columns_t,
    groups_across_t,
    FORMAT: tl.constexpr,
    RECIPE: tl.constexpr,
    METRIC: tl.constexpr,
    SCALING: tl.constexpr,
    CONVERTS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Sums of blocks in two candidates, from one read."""
    wide = tl.cdiv(columns, 128)
    unit, first = tl.program_id(0) // wide, tl.program_id(0) % wide * 128
    column = first + tl.arange(0, 128)
    block_t = tl.where(column < columns, column, 0) * across_t + unit
    finite_t = (tl.load(amax_t + block_t) < float("inf"))[None, :]
    blocks, blocks_t = tl.cast(rows, tl.int64) * across, tl.cast(columns, tl.int64) * across_t
    count: tl.constexpr = recipes.candidates(RECIPE)
    both: tl.constexpr = first_of + 1 < count
    one: tl.constexpr = recipes.candidate(RECIPE, first_of)
    other: tl.constexpr = recipes.candidate(RECIPE, first_of + 1 if both else first_of)
    factor_t = scale_of(
        amax_t, groups_t, block_t, across_t, group_rows_t, group_columns_t, groups_across_t, one,
        SCALING,
    )[None, :]  # fmt: skip
    factor2_t = scale_of(
        amax_t, groups_t, block_t, across_t, group_rows_t, group_columns_t, groups_across_t, other,
        SCALING,
    )[None, :]  # fmt: skip
    total = tl.zeros((16, 128), tl.float32)
    total2 = tl.zeros((16, 128), tl.float32)
    for begin in range(0, SIDE, 16):
        row = unit * SIDE + begin + tl.arange(0, 16)
        here = (row < rows)[:, None] & (column < columns)[None, :]
        value = load(x, row, column, here, stride_row, stride_column, FORMAT)
        block, exists = blocks_of_rows(row, first, rows, across, SIDE)
        known = tl.where(exists, block, 0)
        finite = over_columns(tl.load(amax + known).to(tl.int32, bitcast=True), SIDE) < 0x7F800000
        # Blocks that are not finite have no errors.
        value_t = tl.where(finite_t, value, 0.0)
        value = tl.where(finite, value, 0.0)
        some, some_t = tl.where(value != 0.0, 1.0, 0.0), tl.where(value_t != 0.0, 1.0, 0.0)
        for i in tl.static_range(2 if both else 1):
            factor = scale_of(
                amax, groups, known, across, group_rows, group_columns, groups_across,
                recipes.candidate(RECIPE, first_of + i), SCALING,
            )  # fmt: skip
            code, term = tried(
                value, over_columns(factor, SIDE), some, recipes.candidate(RECIPE, first_of + i),
                METRIC, CONVERTS,
            )  # fmt: skip
            at = blocks * (first_of + i) + block
            tl.store(sums + at, sums_of_rows(term, SIDE), mask=exists)
            code_t, term_t = tried(
                value_t, factor_t if i == 0 else factor2_t, some_t,
                recipes.candidate(RECIPE, first_of + i), METRIC, CONVERTS,
            )  # fmt: skip
            if i == 0:
                total += term_t
            else:
                total2 += term_t
            if first_of + i == 0:
                tl.store(codes + place(row, column, columns), code.to(tl.uint8), mask=here)
                at_t = place_of_transpose(row, column, rows)
                tl.store(codes_t + at_t, code_t.to(tl.uint8), mask=here)
    at = blocks_t * first_of + block_t
    tl.store(sums_t + at, halves(tl.trans(total), 16), mask=column < columns)
    if both:
        at += blocks_t
        tl.store(sums_t + at, halves(tl.trans(total2), 16), mask=column < columns)


@triton.jit
def candidates_both_kernel(
    x,
    amax,
    groups,
    codes,
    sums,
    amax_t,
    groups_t,
    codes_t,
    sums_t,
    stride_row,
    stride_column,
    rows,
    columns,
    across,
    group_rows,
    group_columns,
    groups_across,
    across_t,
    group_rows_t,
    group_columns_t,
    groups_across_t,
    FORMAT: tl.constexpr,
    RECIPE: tl.constexpr,
    METRIC: tl.constexpr,
    SCALING: tl.constexpr,
    CONVERTS: tl.constexpr,
    SIDE: tl.constexpr,
):
    pairs: tl.constexpr = (recipes.candidates(RECIPE) + 1) // 2
    for pair in tl.static_range(pairs):
        if tl.program_id(1) == pair:
            errors_of_both(
                2 * pair, x, amax, groups, codes, sums, amax_t, groups_t, codes_t, sums_t,
                stride_row, stride_column, rows, columns, across, group_rows, group_columns,
                groups_across, across_t, group_rows_t, group_columns_t, groups_across_t, FORMAT,
                RECIPE, METRIC, SCALING, CONVERTS, SIDE,
            )  # fmt: skip


@triton.jit
def write_both_kernel(
    x,
    amax,
    least,
    counted,
    whole,
    sums,
    of_chunks,
    groups,
    codes,
    low,
    types,
    mantissa,
    exponents,
    numbers,
    parts,
    chunks,
    blocks,
    group_count,
    block_columns,
    across,
    group_rows,
    group_columns,
    groups_across,
    amax_t,
    least_t,
    counted_t,
    whole_t,
    sums_t,
    of_chunks_t,
    groups_t,
    codes_t,
    low_t,
    types_t,
    mantissa_t,
    exponents_t,
    numbers_t,
    parts_t,
    chunks_t,
    blocks_t,
    group_count_t,
    block_columns_t,
    across_t,
    group_rows_t,
    group_columns_t,
    groups_across_t,
    threshold,
    programs,
    stride_row,
    stride_column,
    rows,
    columns,
    FORMAT: tl.constexpr,
    RECIPE: tl.constexpr,
    SCALING: tl.constexpr,
    CONVERTS: tl.constexpr,
    WIDE: tl.constexpr,
    PART: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_T: tl.constexpr,
    SIDE: tl.constexpr,
):
    program = tl.program_id(0)
    of_tensor: tl.constexpr = recipes.is_of_tensor(RECIPE)
    last: tl.constexpr = recipes.narrow_formats(RECIPE)
    if program < parts:
        write_blocks(
            program, amax, least, counted, whole, sums, of_chunks, groups, types, mantissa,
            exponents, numbers, threshold, blocks, chunks, blocks, group_count, rows, columns, 1,
            block_columns, across, 1, 1, group_rows, group_columns, groups_across, RECIPE, SCALING,
            PART, True, CHUNKS,
        )  # fmt: skip
    elif program < parts + parts_t:
        write_blocks(
            program - parts, amax_t, least_t, counted_t, whole_t, sums_t, of_chunks_t, groups_t,
            types_t, mantissa_t, exponents_t, numbers_t, threshold, blocks_t, chunks_t, blocks_t,
            group_count_t, columns, rows, 1, block_columns_t, across_t, 1, 1, group_rows_t,
            group_columns_t, groups_across_t, RECIPE, SCALING, PART, True, CHUNKS_T,
        )  # fmt: skip
    else:
        of_all, of_all_t = tl.zeros((1,), tl.int32), tl.zeros((1,), tl.int32)
        if of_tensor:
            of_all = recipes.types_of(
                of_all, of_all == 0, amax, least, counted, whole, sums, of_chunks, threshold,
                blocks, chunks, blocks, across, 1, 1, RECIPE, True, CHUNKS,
            )  # fmt: skip
            of_all_t = recipes.types_of(
                of_all_t, of_all_t == 0, amax_t, least_t, counted_t, whole_t, sums_t, of_chunks_t,
                threshold, blocks_t, chunks_t, blocks_t, across_t, 1, 1, RECIPE, True, CHUNKS_T,
            )  # fmt: skip
        wide = tl.cdiv(columns, 128)
        begin = program - parts - parts_t
        for mine in range(begin, programs, tl.num_programs(0) - parts - parts_t):
            unit, first = mine // wide, mine % wide * 128
            column = first + tl.arange(0, 128)
            of_columns = column < columns
            block_t = tl.where(of_columns, column, 0) * across_t + unit
            if of_tensor:
                kind_t = tl.broadcast_to(of_all_t, (128,))
            else:
                kind_t = recipes.types_of(
                    block_t, of_columns, amax_t, least_t, counted_t, whole_t, sums_t, of_chunks_t,
                    threshold, blocks_t, chunks_t, blocks_t, across_t, 1, 1, RECIPE, True, CHUNKS_T,
                )  # fmt: skip
            for step in range(0, SIDE, 16):
                row = unit * SIDE + step + tl.arange(0, 16)
                block, exists = blocks_of_rows(row, first, rows, across, SIDE)
                if of_tensor:
                    kind = tl.broadcast_to(of_all, block.shape)
                else:
                    kind = recipes.types_of(
                        block, exists, amax, least, counted, whole, sums, of_chunks, threshold,
                        blocks, chunks, blocks, across, 1, 1, RECIPE, True, CHUNKS,
                    )  # fmt: skip
                if tl.max(kind, 0) + tl.max(kind_t, 0) > 0:
                    here = (row < rows)[:, None] & of_columns[None, :]
                    value = load(x, row, column, here, stride_row, stride_column, FORMAT)
                    at, at_t = place(row, column, columns), place_of_transpose(row, column, rows)
                    for i in tl.static_range(1, last + 1):
                        if tl.max((kind == i).to(tl.int32), 0) > 0:
                            own = here & (over_columns(kind, SIDE) == i)
                            if i < last:
                                factor = scale_of(
                                    amax, groups, tl.where(exists, block, 0), across, group_rows,
                                    group_columns, groups_across, recipes.candidate(RECIPE, i),
                                    SCALING,
                                )  # fmt: skip
                                scaled = value * over_columns(factor, SIDE)
                                # Where an infinity or NaN is, no block is narrow.
                                code, _value = codec.rounded(
                                    scaled, recipes.candidate(RECIPE, i), CONVERTS
                                )
                            else:
                                both = codec.nearest(value, WIDE)
                                code = both >> 8
                                tl.store(low + at, (both & 0xFF).to(tl.uint8), mask=own)
                            tl.store(codes + at, code.to(tl.uint8), mask=own)
                        if tl.max((kind_t == i).to(tl.int32), 0) > 0:
                            own_t = here & (kind_t == i)[None, :]
                            if i < last:
                                factor_t = scale_of(
                                    amax_t, groups_t, block_t, across_t, group_rows_t,
                                    group_columns_t, groups_across_t,
                                    recipes.candidate(RECIPE, i), SCALING,
                                )  # fmt: skip
                                scaled_t = value * factor_t[None, :]
                                code_t, _value = codec.rounded(
                                    scaled_t, recipes.candidate(RECIPE, i), CONVERTS
                                )
                            else:
                                both_t = codec.nearest(value, WIDE)
                                code_t = both_t >> 8
                                lower = (both_t & 0xFF).to(tl.uint8)
                                tl.store(low_t + at_t, lower, mask=own_t)
                            tl.store(codes_t + at_t, code_t.to(tl.uint8), mask=own_t)

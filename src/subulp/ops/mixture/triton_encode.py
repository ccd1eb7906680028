# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Encoding in Triton: three or four launches, and nothing that the host waits for.

1. ``measure_kernel``: magnitudes of tiles.
2. ``blocks_kernel``: of blocks, of groups and of the tensor, whose mantissas are known then. Where
   each block is a single tile, the first kernel does this too.
3. ``candidates_kernel``: errors of tiles, and codes of the first format, which most have.
4. ``write_kernel``: some programs decide about blocks and write what is known of them; the others
   decide about their tiles, and write those of other types.

Where a tensor decides that has more than 65,536 blocks, ``chunks_kernel`` adds up their errors
first. Lower bytes of wide numbers lie at their places: how many there are, the host need not know.

Of what is kept (kept.py), the first kernel computes a number of all bytes; the last two return at
once where it is the one of before.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import format_of
from ...numerics.mixture import mantissa_rows, wide_format_of
from ...numerics.partition import grid_of
from ..triton import codec
from ..triton.launch import converts_at, registers
from . import triton_recipe as recipes
from . import triton_scales as scales
from .job import EncodeJob, part_of
from .triton_measure import blocks_kernel, measure_kernel
from .triton_tiles import Launch, Tiles, load, place, steps, sums_of_tiles, warps_of
from .zeros import zeros

WRITERS = 2048
"""Programs that look for tiles of other types: enough to fill a device several times."""

# Numbers of tiles that a program reads at once, all of a block if there are no more.
_READ = 128
TILES = 16


def encode(job: EncodeJob) -> tuple[Tensor, ...]:
    """The stored tensors, and the numbers of a summary, of each part of the blocks."""
    stored, numbers, launches = planned(job)
    for each in launches:
        each.run(job.device)
    if job.kept is not None:
        job.kept.keep(stored, numbers)
    return *stored, numbers


def planned(job: EncodeJob) -> tuple[tuple[Tensor, ...], Tensor, list[Launch]]:
    """The stored tensors, the numbers of a summary, and the launches that write them."""
    plan = Plan(job)
    before = None if job.kept is None else job.kept.stored
    stored, numbers = plan.stored() if before is None else before, plan.numbers()
    return stored, numbers, plan.launches(stored, numbers)


class Plan:
    """The launches over one matrix, and the numbers that they leave to each other.

    Args:
        job: The matrix and what decides.

    Attributes:
        job: The same.
        tiles: Those of the matrix.
        recipe: Name of the recipe.
        of_tensor: Whether the tensor decides.
        of_blocks: Largest and smallest magnitudes of blocks, and counts of their non-zero values.
        whole: The same of the tensor, if it decides.
        groups: Largest magnitudes of groups.
        group_sizes: Rows and columns of blocks in a group, and groups beside each other.
        asked: How many groups there are: ``"one"``, ``"many"`` or ``"none"``.
        sums: Of the errors of tiles in each candidate.
        converts: Whether the GPU converts to FP8.
    """

    def __init__(self, job: EncodeJob) -> None:
        self.job, self.converts = job, converts_at(job.device)
        self.tiles = tiles = Tiles(job.x.shape, job.block)
        self._x = job.x.view(codec.WORDS[job.x.dtype.itemsize])
        self.recipe = recipes.name_of(job.recipe)
        self.of_tensor = job.recipe.granularity == "tensor"
        self.of_blocks = [
            self._empty(dtype, tiles.blocks)
            for dtype in (torch.float32, torch.float32, torch.int64)
        ]
        # Largest and smallest magnitudes, and counts of non-zero values.
        self._of_tiles = self.of_blocks
        if not tiles.is_block:
            self._of_tiles = [self._empty(torch.int32, tiles.count) for _ in range(3)]
        groups = grid_of(tiles.grid, job.groups)
        self.group_sizes = (*job.groups, groups[1])
        self._begin(groups)
        formats = len(job.recipe.candidates)
        self.sums = self._empty(torch.float32, formats, tiles.count)
        self._marks = (self.whole,) * 3 if job.kept is None else job.kept.places(job.device)

    def stored(self) -> tuple[Tensor, ...]:
        """Room for codes, types, mantissas, exponents and lower bytes."""
        job, grid = self.job, self.tiles.grid
        groups = (1, 1) if job.scaling == "e8m0" else grid_of(grid, job.groups)
        return (
            self._empty(torch.uint8, *job.x.shape),
            self._empty(torch.uint8, *((1, 1) if self.of_tensor else grid)),
            self._empty(torch.float32, 1 + max(mantissa_rows(job.recipe.formats)), *groups),
            self._empty(torch.int8, *grid),
            self._empty(torch.uint8, *job.x.shape),
        )

    def numbers(self) -> Tensor:
        """Room for those of the summary, of each part of the blocks."""
        parts = triton.cdiv(self.tiles.blocks, part_of(self.job.block))
        return self._empty(torch.float64, parts, 2 * len(self.job.recipe.formats) + 8)

    def launches(self, stored: tuple[Tensor, ...], numbers: Tensor) -> list[Launch]:
        """All of them, in their order."""
        launches = [self._measure(), self._candidates(stored[0]), *self._write(stored, numbers)]
        if not self.tiles.is_block:
            launches.insert(1, self._add_blocks())
        return launches

    def _begin(self, groups: tuple[int, int]) -> None:
        """Numbers of the tensor and of groups, which begin at 0."""
        is_gam, room = self.job.scaling == "gam", zeros(self.job.device)
        self.whole, self.groups = room[:3], room[4:].view(torch.int32)[:1]
        self.asked = "one" if is_gam else "none"
        if is_gam and groups != (1, 1):
            self.asked = "many"
            # Where blocks are added up later, the first launch writes the zeros.
            make = torch.zeros if self.tiles.is_block else torch.empty
            self.groups = make(groups, dtype=torch.int32, device=self.job.device)

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.job.device)

    @property
    def _of_x(self) -> dict[str, Any]:
        """Options of kernels that read the matrix."""
        layout = self.tiles.layout
        return {
            "FORMAT": format_of(self.job.x.dtype).name,
            "KEPT": self.job.kept is not None,
            **layout,
            "num_warps": warps_of(layout),
        }

    def _measure(self) -> Launch:
        """Magnitudes of tiles."""
        job, tiles = self.job, self.tiles
        now, _before, after = self._marks
        many = self.asked == "many" and not tiles.is_block
        arguments = (
            *(self._x, *self._of_tiles, *self.of_blocks, self.groups, self.whole, now, after),
            *(self.groups.numel() if many else 0, *job.x.stride(), *tiles.sizes),
            *self.group_sizes,
        )
        options = {
            "GROUPS": self.asked,
            "OF_TENSOR": self.of_tensor,
            "IS_BLOCK": tiles.is_block,
            **self._of_x,
        }
        return Launch(measure_kernel, (tiles.programs,), arguments, options)

    def _add_blocks(self) -> Launch:
        """Magnitudes of blocks, groups and the tensor."""
        tiles, blocks = self.tiles, _READ // TILES
        arguments = (
            *(*self._of_tiles, *self.of_blocks, self.groups, self.whole),
            *(tiles.blocks, tiles.grid[1], *tiles.per_block, *self.group_sizes),
        )
        options = {
            "TILES": TILES,
            "BLOCKS": blocks,
            "GROUPS": self.asked,
            "OF_TENSOR": self.of_tensor,
        }
        return Launch(blocks_kernel, (triton.cdiv(tiles.blocks, blocks),), arguments, options)

    def _candidates(self, codes: Tensor) -> Launch:
        """Errors of tiles in every candidate, and codes of the first."""
        job, tiles = self.job, self.tiles
        now, before, _after = self._marks
        arguments = (
            *(self._x, self.of_blocks[0], self.groups, codes, self.sums, now, before),
            *(tiles.count, *job.x.stride(), *tiles.sizes, *self.group_sizes),
        )
        options = {
            "RECIPE": self.recipe,
            "METRIC": job.metric,
            "SCALING": job.scaling,
            "CONVERTS": self.converts,
            **self._of_x,
        }
        pairs = triton.cdiv(self.sums.shape[0], 2)
        return Launch(candidates_kernel, (tiles.programs, pairs), arguments, options)

    def chunks(self) -> tuple[str, int, Tensor, list[Launch]]:
        """How a tensor's errors are added up, how many chunks there are, their sums, and the
        launches that write them.
        """
        tiles, sums = self.tiles, self.sums
        chunks = triton.cdiv(tiles.blocks, recipes.CHUNK)
        asked = "one" if chunks == 1 else "few" if chunks <= recipes.FEW else "many"
        if not (self.of_tensor and asked == "many"):
            return asked, chunks, sums, []
        of_chunks = self._empty(torch.float32, sums.shape[0], chunks)
        of_each = triton.cdiv(chunks, recipes.FEW), sums.shape[0]
        sizes = tiles.count, chunks, tiles.blocks, tiles.grid[1], *tiles.per_block
        options = {"IS_BLOCK": tiles.is_block}
        launch = Launch(chunks_kernel, of_each, (sums, of_chunks, *sizes), options)
        return asked, chunks, of_chunks, [launch]

    def _write(self, stored: tuple[Tensor, ...], numbers: Tensor) -> list[Launch]:
        """Types, and all that follows from them."""
        codes, types, mantissa, exponents, low = stored
        job, tiles = self.job, self.tiles
        asked, chunks, of_chunks, launches = self.chunks()
        parts = numbers.shape[0]
        now, before, _after = self._marks
        numbers_before = None if job.kept is None else job.kept.numbers
        arguments = (
            *(self._x, *self.of_blocks, self.whole, self.sums, of_chunks, self.groups),
            *(codes, low, types, mantissa, exponents, numbers),
            *(numbers if numbers_before is None else numbers_before, now, before),
            *(job.threshold, parts, tiles.programs, tiles.count, chunks, tiles.blocks),
            *(mantissa.shape[1] * mantissa.shape[2], *job.x.stride(), *tiles.sizes),
            *self.group_sizes,
        )
        options = {
            "RECIPE": self.recipe,
            "SCALING": job.scaling,
            "CONVERTS": self.converts,
            "WIDE": wide_format_of(job.x.dtype).name,
            "PART": part_of(job.block),
            "IS_BLOCK": tiles.is_block,
            "CHUNKS": asked,
            **self._of_x,
            **registers(128),
        }
        grid = (parts + min(WRITERS, tiles.programs),)
        return [*launches, Launch(write_kernel, grid, arguments, options)]


# ------------------------------------------------------------------------------------- the kernels


@triton.jit
def are_same(now, before, KEPT: tl.constexpr):
    """Whether the matrix has the bytes of the call before."""
    found = tl.full((), 0, tl.int1)
    if KEPT:
        found = tl.load(now) == tl.load(before)
    return found


@triton.jit
def tried(value, factor, some, FORMAT: tl.constexpr, METRIC: tl.constexpr, CONVERTS: tl.constexpr):
    """Codes of finite values at a scale, and the terms of a metric of ``numerics.metrics.KNOWN``.

    ``some`` is 1 where a value is not zero, and 0 elsewhere.
    """
    scaled = value * factor
    code, rounded = codec.rounded(scaled, FORMAT, CONVERTS)
    if METRIC == "underflow":
        term = tl.where(rounded == 0.0, some, 0.0)
    else:
        term = tl.abs((scaled - rounded) * codec.reciprocal(scaled, FORMAT, CONVERTS))
        if METRIC == "squared-relative-error":
            term = term * term
        # What rounds to zero is lost whole; a zero loses nothing.
        term = tl.where(rounded == 0.0, some, term)
    return code, term


@triton.jit
def scale_of(
    amax,
    groups,
    block,
    across,
    group_rows,
    group_columns,
    groups_across,
    FORMAT: tl.constexpr,
    SCALING: tl.constexpr,
):
    """Scales of blocks."""
    largest = tl.load(amax + block)
    shared = scales.shared_of(
        largest, groups, block, across, group_rows, group_columns, groups_across, FORMAT, SCALING
    )
    return scales.join(shared, scales.exponent_of(largest, shared, FORMAT))


@triton.jit
def errors_of(
    first: tl.constexpr,
    x,
    amax,
    groups,
    codes,
    sums,
    tiles,
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
    RECIPE: tl.constexpr,
    METRIC: tl.constexpr,
    SCALING: tl.constexpr,
    CONVERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Sums of tiles in two candidates, from one read."""
    row, inside, start, end, block, tile, exists = place(
        tl.program_id(0), rows, columns, block_rows, block_columns, across, tiles_down,
        tiles_across, ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    both: tl.constexpr = first + 1 < recipes.candidates(RECIPE)
    one: tl.constexpr = recipes.candidate(RECIPE, first)
    other: tl.constexpr = recipes.candidate(RECIPE, first + 1 if both else first)
    # Blocks that are not finite have no errors, and are wide.
    inside &= tl.load(amax + block) < float("inf")
    factor = scale_of(
        amax, groups, block, across, group_rows, group_columns, groups_across, one, SCALING
    )[:, None]
    factor2 = scale_of(
        amax, groups, block, across, group_rows, group_columns, groups_across, other, SCALING
    )[:, None]
    total = tl.zeros((ROWS, LANES), tl.float32)
    total2 = tl.zeros((ROWS, LANES), tl.float32)
    for begin in range(start, end, LANES):
        column = begin + tl.arange(0, LANES)
        at, here = steps(row, inside, column, end, columns)
        value = load(x, row, column, here, stride_row, stride_column, FORMAT)
        some = tl.where(value != 0.0, 1.0, 0.0)
        code, term = tried(value, factor, some, one, METRIC, CONVERTS)
        if first == 0:
            tl.store(codes + at, code.to(tl.uint8), mask=here)
        total += term
        if both:
            _code, term = tried(value, factor2, some, other, METRIC, CONVERTS)
            total2 += term
    of_tiles = sums_of_tiles(total, LANES, ROWS, BY_ROW)
    tl.store(sums + tl.cast(tiles, tl.int64) * first + tile, of_tiles, mask=exists)
    if both:
        of_tiles = sums_of_tiles(total2, LANES, ROWS, BY_ROW)
        tl.store(sums + tl.cast(tiles, tl.int64) * (first + 1) + tile, of_tiles, mask=exists)


@triton.jit
def candidates_kernel(
    x,
    amax,
    groups,
    codes,
    sums,
    now,
    before,
    tiles,
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
    RECIPE: tl.constexpr,
    METRIC: tl.constexpr,
    SCALING: tl.constexpr,
    CONVERTS: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    same = are_same(now, before, KEPT)
    pairs: tl.constexpr = (recipes.candidates(RECIPE) + 1) // 2
    for pair in tl.static_range(pairs):
        if (tl.program_id(1) == pair) & (same == 0):
            errors_of(
                2 * pair, x, amax, groups, codes, sums, tiles, stride_row, stride_column, rows,
                columns, block_rows, block_columns, across, tiles_down, tiles_across, group_rows,
                group_columns, groups_across, FORMAT, RECIPE, METRIC, SCALING, CONVERTS, ROWS,
                BY_ROW, LANES, SPAN,
            )  # fmt: skip


@triton.jit
def chunks_kernel(
    sums,
    of_chunks,
    tiles,
    chunks,
    blocks,
    across,
    tiles_down,
    tiles_across,
    IS_BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0) * 16 + tl.arange(0, 16)
    candidate = tl.program_id(1).to(tl.int64)
    found = recipes.sums_of_chunks(
        sums + candidate * tiles, chunk, blocks, across, tiles_down, tiles_across, IS_BLOCK
    )
    tl.store(of_chunks + candidate * chunks + chunk, found, mask=chunk < chunks)


@triton.jit
def write_scales(
    mantissa,
    exponents,
    types,
    here,
    amax,
    groups,
    block,
    group_count,
    across,
    group_rows,
    group_columns,
    groups_across,
    RECIPE: tl.constexpr,
    SCALING: tl.constexpr,
):
    """Exponents of these blocks, and mantissas of as many groups."""
    largest = tl.load(amax + block, mask=here, other=0.0)
    for i in tl.static_range(recipes.narrow_formats(RECIPE)):
        shared = scales.shared_of(
            largest, groups, tl.where(here, block, 0), across, group_rows, group_columns,
            groups_across, recipes.candidate(RECIPE, i), SCALING,
        )  # fmt: skip
        own = scales.exponent_of(largest, shared, recipes.candidate(RECIPE, i))
        if i == 0:
            # That of wide blocks too.
            exponent = own
        exponent = tl.where(types == i, own, exponent)
    tl.store(exponents + block, exponent.to(tl.int8), mask=here)
    here = block < group_count
    of_group = tl.where(largest < float("inf"), largest, 0.0)
    if SCALING == "gam":
        of_group = tl.load(groups + block, mask=here, other=0).to(tl.float32, bitcast=True)
    for row in tl.static_range(recipes.mantissas(RECIPE)):
        found = scales.mantissa_of(of_group, recipes.format_of_mantissa(RECIPE, row), SCALING)
        found = found.to(tl.float32, bitcast=True)
        tl.store(mantissa + row * group_count + block, found, mask=here)


@triton.jit
def write_tile(
    x,
    codes,
    low,
    types,
    row,
    inside,
    start,
    end,
    columns,
    block,
    amax,
    groups,
    stride_row,
    stride_column,
    across,
    group_rows,
    group_columns,
    groups_across,
    FORMAT: tl.constexpr,
    RECIPE: tl.constexpr,
    SCALING: tl.constexpr,
    CONVERTS: tl.constexpr,
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Numbers of a program's rows that are of other types than the first."""
    last: tl.constexpr = recipes.narrow_formats(RECIPE)
    for i in tl.static_range(1, last + 1):
        if tl.max((types == i).to(tl.int32), 0) > 0:
            mine = inside & (types == i)
            if i < last:
                factor = scale_of(
                    amax, groups, block, across, group_rows, group_columns, groups_across,
                    recipes.candidate(RECIPE, i), SCALING,
                )[:, None]  # fmt: skip
            for begin in range(start, end, LANES):
                column = begin + tl.arange(0, LANES)
                at, here = steps(row, mine, column, end, columns)
                value = load(x, row, column, here, stride_row, stride_column, FORMAT)
                if i < last:
                    # Where an infinity or NaN is, no block is narrow.
                    code, _value = codec.rounded(
                        value * factor, recipes.candidate(RECIPE, i), CONVERTS
                    )
                else:
                    both = codec.nearest(value, WIDE)
                    code = both >> 8
                    tl.store(low + at, (both & 0xFF).to(tl.uint8), mask=here)
                tl.store(codes + at, code.to(tl.uint8), mask=here)


@triton.jit
def write_numbers(
    numbers,
    types,
    here,
    amax,
    least,
    counted,
    sums,
    block,
    tiles,
    rows,
    columns,
    block_rows,
    block_columns,
    across,
    tiles_down,
    tiles_across,
    RECIPE: tl.constexpr,
    IS_BLOCK: tl.constexpr,
):
    """What a summary is made of, as ``numerics.mixture.numbers_of``, of these blocks."""
    last: tl.constexpr = recipes.narrow_formats(RECIPE)
    height = tl.minimum(block_rows, rows - block // across * block_rows)
    width = tl.minimum(block_columns, columns - block % across * block_columns)
    size = height.to(tl.int64) * width
    count = tl.load(counted + block, mask=here, other=0)
    narrow = tl.zeros(block.shape, tl.float64)
    for i in tl.static_range(last + 1):
        mine = here & (types == i)
        tl.store(numbers + 2 * i, tl.sum(mine.to(tl.int64), 0).to(tl.float64))
        tl.store(numbers + 2 * i + 1, tl.sum(tl.where(mine, size, 0), 0).to(tl.float64))
        if i < last:
            of_blocks = sums + tl.cast(tiles, tl.int64) * i
            found = recipes.sums_of_blocks(
                of_blocks, block, mine, across, tiles_down, tiles_across, IS_BLOCK
            )
            narrow += found.to(tl.float64)
    numbers += 2 * (last + 1)
    found = recipes.sums_of_blocks(
        sums, block, here, across, tiles_down, tiles_across, IS_BLOCK
    )  # fmt: skip
    inf = float("inf")
    tl.store(numbers, tl.sum(narrow, 0))
    tl.store(numbers + 1, tl.sum(tl.where(types < last, count, 0), 0).to(tl.float64))
    tl.store(numbers + 2, tl.sum(found.to(tl.float64), 0))
    tl.store(numbers + 3, tl.sum(count, 0).to(tl.float64))
    most, few = tl.load(amax + block, mask=here, other=0.0), tl.load(least + block, here, inf)
    tl.store(numbers + 4, tl.max(most, 0).to(tl.float64))
    tl.store(numbers + 5, tl.min(few, 0).to(tl.float64))


@triton.jit
def write_blocks(
    part,
    amax,
    least,
    counted,
    whole,
    sums,
    of_chunks,
    groups,
    types,
    mantissa,
    exponents,
    numbers,
    threshold,
    tiles,
    chunks,
    blocks,
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
    SCALING: tl.constexpr,
    PART: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Decide about a part of the blocks, and write what is known of them."""
    of_tensor: tl.constexpr = recipes.is_of_tensor(RECIPE)
    fields: tl.constexpr = recipes.fields(RECIPE)
    each = part * PART + tl.arange(0, PART)
    here = each < blocks
    decided = recipes.types_of(
        each, here, amax, least, counted, whole, sums, of_chunks, threshold, tiles, chunks,
        blocks, across, tiles_down, tiles_across, RECIPE, IS_BLOCK, CHUNKS,
    )  # fmt: skip
    if of_tensor:
        one = tl.arange(0, 1)
        tl.store(types + one, decided.to(tl.uint8), mask=part + one == 0)
        decided = tl.broadcast_to(decided, (PART,))
    else:
        tl.store(types + each, decided.to(tl.uint8), mask=here)
    write_scales(
        mantissa, exponents, decided, here, amax, groups, each, group_count, across, group_rows,
        group_columns, groups_across, RECIPE, SCALING,
    )  # fmt: skip
    write_numbers(
        numbers + part * fields, decided, here, amax, least, counted, sums, each, tiles,
        rows, columns, block_rows, block_columns, across, tiles_down, tiles_across, RECIPE,
        IS_BLOCK,
    )  # fmt: skip


@triton.jit
def write_kernel(
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
    numbers_before,
    now,
    before,
    threshold,
    parts,
    programs,
    tiles,
    chunks,
    blocks,
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
    RECIPE: tl.constexpr,
    SCALING: tl.constexpr,
    CONVERTS: tl.constexpr,
    WIDE: tl.constexpr,
    KEPT: tl.constexpr,
    PART: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    program = tl.program_id(0)
    of_tensor: tl.constexpr = recipes.is_of_tensor(RECIPE)
    fields: tl.constexpr = recipes.fields(RECIPE)
    if are_same(now, before, KEPT):
        # Each summary has numbers of its own.
        field = tl.arange(0, recipes.power_of_two(fields))
        mine = field < tl.where(program < parts, fields, 0)
        copied = tl.load(numbers_before + program * fields + field, mask=mine)
        tl.store(numbers + program * fields + field, copied, mask=mine)
    elif program < parts:
        write_blocks(
            program, amax, least, counted, whole, sums, of_chunks, groups, types, mantissa,
            exponents, numbers, threshold, tiles, chunks, blocks, group_count, rows, columns,
            block_rows, block_columns, across, tiles_down, tiles_across, group_rows, group_columns,
            groups_across, RECIPE, SCALING, PART, IS_BLOCK, CHUNKS,
        )  # fmt: skip
    else:
        of_all = tl.zeros((1,), tl.int32)
        if of_tensor:
            of_all = recipes.types_of(
                of_all, of_all == 0, amax, least, counted, whole, sums, of_chunks,
                threshold, tiles, chunks, blocks, across, tiles_down, tiles_across, RECIPE,
                IS_BLOCK, CHUNKS,
            )  # fmt: skip
        for mine in range(program - parts, programs, tl.num_programs(0) - parts):
            row, inside, start, end, block, _tile, _exists = place(
                mine, rows, columns, block_rows, block_columns, across, tiles_down, tiles_across,
                ROWS, BY_ROW, SPAN,
            )  # fmt: skip
            if of_tensor:
                of_tile = tl.broadcast_to(of_all, block.shape)
            else:
                of_tile = recipes.types_of(
                    block, block >= 0, amax, least, counted, whole, sums, of_chunks, threshold,
                    tiles, chunks, blocks, across, tiles_down, tiles_across, RECIPE, IS_BLOCK,
                    CHUNKS,
                )  # fmt: skip
            write_tile(
                x, codes, low, of_tile, row, inside, start, end, columns, block, amax, groups,
                stride_row, stride_column, across, group_rows, group_columns, groups_across,
                FORMAT, RECIPE, SCALING, CONVERTS, WIDE, LANES,
            )  # fmt: skip

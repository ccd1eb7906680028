# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Mixtures in Triton: the passes of :mod:`.passes`, for magnitudes, for errors, for the rest.

A program handles a tile (numerics/metrics.py), or some rows that are tiles of their own. The second
pass has already written the codes of the first format, the third one writes blocks of another type,
and leaves out programs without any. Two formats take one launch of each, more take one for each
further pair, or format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import E4M3, E5M2, Format, format_of
from ...numerics.metrics import LANES, RELATIVE_ERROR, TILE_COLUMNS, TILE_ROWS, lane_sums
from ...numerics.mixture import wide_format_of
from ...numerics.partition import grid_of
from ..triton import codec, launch
from . import passes
from .job import DecodeJob, EncodeJob, Job

ROWS = 32
"""Rows of a program whose rows are tiles of their own."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def run(job: Job) -> tuple[Tensor, ...] | Tensor:
    """Run ``job``: return the stored tensors and the numbers of a summary, or the decoded matrix.

    Raises:
        RuntimeError: The kernels do not run on the device of the tensors.
    """
    launch.check_device(measure_kernel, job.device)
    if isinstance(job, DecodeJob):
        return _decode(job)
    return passes.encode(job, _Passes(job))


class _Tiles:
    """Where the tiles of a matrix lie, and one launch over them."""

    def __init__(self, shape: torch.Size, block: tuple[int, int], device: torch.device) -> None:
        self.shape, self.block, self.device = shape, block, device
        self.down, self.across = grid_of(shape, block)
        self.tiles_down = triton.cdiv(block[0], TILE_ROWS)
        self.tiles_across = triton.cdiv(block[1], TILE_COLUMNS)
        self.bands = self.down * self.tiles_down
        self.columns = self.across * self.tiles_across

    def launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        layout = layout_of(self.block)
        per_program = layout["ROWS"] if layout["BY_ROW"] else 1
        grid = (triton.cdiv(self.bands, per_program), self.columns)
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
            kernel[grid](
                *args,
                *self.shape,
                *self.block,
                self.across,
                self.tiles_down,
                self.tiles_across,
                **layout,
                **options,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )

    def empty(self, dtype: torch.dtype) -> Tensor:
        """A number for each tile."""
        return torch.empty(self.bands, self.columns, dtype=dtype, device=self.device)

    def by_block(self, of_tiles: Tensor) -> Tensor:
        """(block rows, block columns, tiles), row by row."""
        cut = of_tiles.view(self.down, self.tiles_down, self.across, self.tiles_across)
        return cut.transpose(1, 2).flatten(2)


WARPS = 8


def layout_of(block: tuple[int, int]) -> dict[str, Any]:
    """Constexpr arguments of every kernel: rows of a program, and whether they are tiles."""
    if block[0] == 1:
        return {"ROWS": ROWS, "BY_ROW": True, "LANES": LANES, "SPAN": TILE_COLUMNS}
    rows = triton.next_power_of_2(min(block[0], TILE_ROWS))
    return {"ROWS": rows, "BY_ROW": False, "LANES": LANES, "SPAN": TILE_COLUMNS}


class _Passes:
    """The passes over one matrix, see :mod:`.passes`."""

    def __init__(self, job: EncodeJob) -> None:
        x = job.x
        self._metric = job.metric
        self._tiles = _Tiles(x.shape, job.block, x.device)
        self._words = x.view(_WORDS[x.dtype.itemsize])
        self._name = {"FORMAT": format_of(x.dtype).name}
        self._codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)

    def measure(self) -> tuple[Tensor, Tensor, Tensor]:
        tiles = self._tiles
        largest, smallest, counts = (tiles.empty(torch.int32) for _ in range(3))
        tiles.launch(measure_kernel, self._words, largest, smallest, counts, **self._name)
        amax = tiles.by_block(largest).amax(-1).view(torch.float32)
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
        # No magnitude is a NaN's pattern.
        least = tiles.by_block(smallest).amin(-1).view(torch.float32).nan_to_num(nan=torch.inf)
        return amax, least, tiles.by_block(counts).sum(-1, dtype=torch.int64)

    def errors(self, factors: Mapping[Format, Tensor]) -> Mapping[Format, Tensor]:
        tiles, found = self._tiles, {}
        formats = list(factors)
        # Two at a time, from one read; the first launch also writes the codes of the first format,
        # which most blocks will have.
        for i in range(0, len(formats), 2):
            pair = formats[i : i + 2]
            sums = [tiles.empty(torch.float32) for _ in pair]
            tiles.launch(
                candidates_kernel,
                *(self._words, factors[pair[0]], factors[pair[-1]]),
                *(self._codes, sums[0], sums[-1]),
                **self._name,
                FIRST=codec.name_of(pair[0]),
                SECOND=codec.name_of(pair[-1]),
                BOTH=len(pair) == 2,
                WRITE=i == 0,
                METRIC=self._metric,
            )
            for fmt, of_tiles in zip(pair, sums, strict=True):
                found[fmt] = lane_sums(tiles.by_block(of_tiles))
        return found

    def write(self, choice: passes.Choice) -> tuple[Tensor, Tensor]:
        wide = torch.empty(choice.count, dtype=torch.uint8, device=self._codes.device)
        last = len(choice.formats)
        # The first launch writes the wide blocks too.
        for kind in range(1, max(last, 2)):
            here = min(kind, last - 1)
            self._tiles.launch(
                rest_kernel,
                *(self._words, choice.factors[here], choice.types, choice.offsets),
                *(self._codes, wide),
                **self._name,
                NARROW=codec.name_of(choice.formats[here]),
                KIND=kind if kind < last else -1,
                LAST=last if kind == 1 else -1,
                WIDE=choice.wide_format.name,
            )
        return self._codes, wide


def _decode(job: DecodeJob) -> Tensor:
    m = job.mixture
    tiles = _Tiles(m.shape, m.block, job.device)
    types = m.block_types().contiguous()
    last = len(m.formats)
    offsets, count = passes.wide_offsets(types, last, m.shape, m.block)
    if count != m.wide.numel():
        raise ValueError(f"wide has shape {tuple(m.wide.shape)}: expected ({count},)")
    inverse = passes.inverse_scales(m)
    out = torch.empty(m.shape, dtype=torch.float32, device=job.device)
    stored = m.codes.contiguous(), inverse, types, offsets, m.wide.contiguous()
    for kind in range(0, last, 2):
        # The first launch decodes the wide blocks too.
        tiles.launch(
            decode_kernel,
            *(*stored, out),
            FIRST=codec.name_of(m.formats[kind]),
            SECOND=codec.name_of(m.formats[min(kind + 1, last - 1)]),
            KIND=kind,
            LAST=last if kind == 0 else -1,
            COUNT=last,
            WIDE=m.wide_format.name,
        )
    return out


def compile_for(capability: int, kernel: str, block: tuple[int, int], dtype: torch.dtype) -> Any:
    """Compile a kernel ahead of time, see :func:`subulp.ops.triton.launch.compile_for`."""
    word = {2: "*i16", 4: "*i32"}[dtype.itemsize]
    byte, real, whole, long = "*u8", "*fp32", "*i32", "*i64"
    arguments: dict[str, dict[str, str]] = {
        "measure": {"x": word, "largest": whole, "smallest": whole, "counts": whole},
        "candidates": {
            **{"x": word, "scale1": real, "scale2": real, "codes": byte},
            **{"sums1": real, "sums2": real},
        },
        "rest": {
            **{"x": word, "scale": real, "types": byte, "offsets": long},
            **{"codes": byte, "wide": byte},
        },
        "decode": {
            **{"codes": byte, "inverse": real, "types": byte, "offsets": long},
            **{"wide": byte, "out": real},
        },
    }
    pair = {"FIRST": E4M3.name, "SECOND": E5M2.name}
    wide: dict[str, Any] = {"KIND": 1, "LAST": 2, "WIDE": wide_format_of(dtype).name}
    options: dict[str, Any] = {
        "measure": {},
        "candidates": {**pair, "BOTH": True, "WRITE": True, "METRIC": RELATIVE_ERROR},
        "rest": {"NARROW": E5M2.name, **wide},
        "decode": {**pair, **wide, "KIND": 0, "COUNT": 2},
    }[kernel]
    sizes = "rows", "columns", "block_rows", "block_columns", "across", "tiles_down", "tiles_across"
    options = {**options, **layout_of(block), "num_warps": WARPS}
    if kernel != "decode":
        options["FORMAT"] = format_of(dtype).name
    signature = arguments[kernel] | dict.fromkeys(sizes, "i32")
    return launch.compile_for(globals()[f"{kernel}_kernel"], capability, signature, **options)


# ------------------------------------------------------------------------------------- the kernels


@triton.jit
def place(
    rows,
    columns,
    block_rows,
    block_columns,
    across,
    tiles_down,
    tiles_across,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    SPAN: tl.constexpr,
):
    """A program's rows, which of them exist, its columns, the rows' blocks, tile and origin."""
    unit = tl.program_id(0)
    j = tl.program_id(1) // tiles_across
    lane = tl.arange(0, ROWS)
    if BY_ROW:
        row = unit * ROWS + lane
        inside = row < rows
        tile = row
    else:
        i = unit // tiles_down
        first = i * block_rows + unit % tiles_down * 128
        row = first + lane
        inside = row < tl.minimum(tl.minimum(first + 128, (i + 1) * block_rows), rows)
        tile = unit + lane * 0
    start = j * block_columns + tl.program_id(1) % tiles_across * SPAN
    end = tl.minimum(tl.minimum(start + SPAN, (j + 1) * block_columns), columns)
    # Rows that do not exist have the last block's numbers.
    block = tl.minimum(row, rows - 1) // block_rows * across + j
    tile = tile.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return row, inside, start, end, block, tile


@triton.jit
def store_of_tiles(to, tile, value, inside, reduced, ROWS: tl.constexpr, BY_ROW: tl.constexpr):
    """A number for each row that is a tile, or the one of all rows."""
    if BY_ROW:
        tl.store(to + tile, value, mask=inside)
    else:
        tl.store(to + tile, reduced + value * 0, mask=tl.arange(0, ROWS) == 0)


@triton.jit
def halves(x, SIZE: tl.constexpr):
    """Sums over the last dimension of (n, SIZE) by halves: (n,)."""
    n: tl.constexpr = x.shape[0]
    size: tl.constexpr = SIZE
    if size == 1:
        result = tl.reshape(x, (n,))
    else:
        half: tl.constexpr = size // 2
        a, b = tl.split(tl.permute(tl.reshape(x, (n, 2, half)), (0, 2, 1)))
        result = halves(a + b, half)
    return result


@triton.jit
def measure_kernel(
    x,
    largest,
    smallest,
    counts,
    rows,
    columns,
    block_rows,
    block_columns,
    across,
    tiles_down,
    tiles_across,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    row, inside, start, end, _block, tile = place(
        rows, columns, block_rows, block_columns, across, tiles_down, tiles_across,
        ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    most = tl.zeros((ROWS, LANES), tl.int32)
    least = tl.full((ROWS, LANES), 0x7FFFFFFF, tl.int32)
    count = tl.zeros((ROWS, LANES), tl.int32)
    lane = tl.arange(0, LANES)
    for begin in range(start, end, LANES):
        column = begin + lane
        here = inside[:, None] & (column < end)[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        value = load(x, at, here, FORMAT)
        magnitude = codec.magnitude_of(value).to(tl.int32)
        some = magnitude != 0
        most = tl.maximum(most, magnitude)
        least = tl.minimum(least, tl.where(some, magnitude, 0x7FFFFFFF))
        count += some.to(tl.int32)
    top, bottom, total = tl.max(most, 1), tl.min(least, 1), tl.sum(count, 1)
    store_of_tiles(largest, tile, top, inside, tl.max(top, 0), ROWS, BY_ROW)
    store_of_tiles(smallest, tile, bottom, inside, tl.min(bottom, 0), ROWS, BY_ROW)
    store_of_tiles(counts, tile, total, inside, tl.sum(total, 0), ROWS, BY_ROW)


@triton.jit
def load(x, at, here, FORMAT: tl.constexpr):
    """FP32 values."""
    code = tl.load(x + at, mask=here, other=0)
    return codec.value(code.to(tl.uint32) & ((1 << codec.width(FORMAT)) - 1), FORMAT)


@triton.jit
def term_of(scaled, code, counted, FORMAT: tl.constexpr, METRIC: tl.constexpr):
    """The terms of a metric of ``numerics.metrics.KNOWN``."""
    rounded = codec.value(code, FORMAT)
    one = tl.full(scaled.shape, 1.0, tl.float32)
    if METRIC == "underflow":
        term = tl.where(rounded == 0.0, one, 0.0)
    else:
        inverse = tl.div_rn(one, tl.where(rounded == 0.0, one, tl.abs(scaled)))
        term = tl.where(rounded == 0.0, one, tl.abs(scaled - rounded) * inverse)
        if METRIC == "squared-relative-error":
            term = term * term
    return tl.where(counted, term, 0.0)


@triton.jit
def candidates_kernel(
    x,
    scale1,
    scale2,
    codes,
    sums1,
    sums2,
    rows,
    columns,
    block_rows,
    block_columns,
    across,
    tiles_down,
    tiles_across,
    FORMAT: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BOTH: tl.constexpr,
    WRITE: tl.constexpr,
    METRIC: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    row, inside, start, end, block, tile = place(
        rows, columns, block_rows, block_columns, across, tiles_down, tiles_across,
        ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    factor1 = tl.load(scale1 + block)[:, None]
    factor2 = tl.load(scale2 + block)[:, None]
    first = tl.zeros((ROWS, LANES), tl.float32)
    second = tl.zeros((ROWS, LANES), tl.float32)
    lane = tl.arange(0, LANES)
    for begin in range(start, end, LANES):
        column = begin + lane
        here = inside[:, None] & (column < end)[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        value = load(x, at, here, FORMAT)
        counted = (codec.magnitude_of(value) != 0) & (factor1 > 0.0)
        scaled = value * factor1
        code = codec.nearest(scaled, FIRST)
        if WRITE:
            tl.store(codes + at, code.to(tl.uint8), mask=here)
        first += term_of(scaled, code, counted, FIRST, METRIC)
        if BOTH:
            scaled = value * factor2
            second += term_of(scaled, codec.nearest(scaled, SECOND), counted, SECOND, METRIC)
    of_rows = halves(first, LANES)
    whole = halves(tl.reshape(of_rows, (1, ROWS)), ROWS)
    store_of_tiles(sums1, tile, of_rows, inside, tl.sum(whole, 0), ROWS, BY_ROW)
    if BOTH:
        of_rows = halves(second, LANES)
        whole = halves(tl.reshape(of_rows, (1, ROWS)), ROWS)
        store_of_tiles(sums2, tile, of_rows, inside, tl.sum(whole, 0), ROWS, BY_ROW)


@triton.jit
def place_of_low(
    row,
    column,
    first,
    block_rows,
    block_columns,
    columns,
    tiles_across,
):
    """Places of the lower bytes of a block whose own begin at ``first``."""
    left = tl.program_id(1) // tiles_across * block_columns
    width = tl.minimum(block_columns, columns - left)
    below = (row % block_rows).to(tl.int64) * width
    return first[:, None] + below[:, None] + (column - left)[None, :]


@triton.jit
def rest_kernel(
    x,
    scale,
    types,
    offsets,
    codes,
    wide,
    rows,
    columns,
    block_rows,
    block_columns,
    across,
    tiles_down,
    tiles_across,
    FORMAT: tl.constexpr,
    NARROW: tl.constexpr,
    KIND: tl.constexpr,
    LAST: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    # Blocks of the type KIND in NARROW and those of LAST in WIDE; -1 is none.
    row, inside, start, end, block, _tile = place(
        rows, columns, block_rows, block_columns, across, tiles_down, tiles_across,
        ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    kind = tl.load(types + block).to(tl.int32)
    needed = inside & ((kind == KIND) | (kind == LAST))
    if tl.max(needed.to(tl.int32), 0) > 0:
        is_wide = (kind == LAST)[:, None]
        first = tl.load(offsets + block)
        factor = tl.load(scale + block)[:, None]
        lane = tl.arange(0, LANES)
        for begin in range(start, end, LANES):
            column = begin + lane
            here = needed[:, None] & (column < end)[None, :]
            at = row[:, None].to(tl.int64) * columns + column[None, :]
            value = load(x, at, here, FORMAT)
            both = codec.nearest(value, WIDE)
            code = both >> 8
            if KIND >= 0:
                code = tl.where(is_wide, code, codec.nearest(value * factor, NARROW))
            tl.store(codes + at, code.to(tl.uint8), mask=here)
            if LAST >= 0:
                low = place_of_low(
                    row, column, first, block_rows, block_columns, columns, tiles_across
                )
                tl.store(wide + low, (both & 0xFF).to(tl.uint8), mask=here & is_wide)


@triton.jit
def decode_kernel(
    codes,
    inverse,
    types,
    offsets,
    wide,
    out,
    rows,
    columns,
    block_rows,
    block_columns,
    across,
    tiles_down,
    tiles_across,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    KIND: tl.constexpr,
    LAST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    # Blocks of the types KIND and KIND + 1 in FIRST and SECOND, those of LAST in WIDE; -1 is none.
    row, inside, start, end, block, _tile = place(
        rows, columns, block_rows, block_columns, across, tiles_down, tiles_across,
        ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    of_row = tl.load(types + block).to(tl.int32)
    kind = of_row[:, None]
    mine = inside & ((of_row == KIND) | (of_row == LAST))
    if KIND + 1 < COUNT:
        mine = mine | (inside & (of_row == KIND + 1))
    factor = tl.load(inverse + block)[:, None]
    first = tl.load(offsets + block)
    lane = tl.arange(0, LANES)
    for begin in range(start, end, LANES):
        column = begin + lane
        here = mine[:, None] & (column < end)[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        code = tl.load(codes + at, mask=here, other=0).to(tl.uint32)
        value = codec.value(code, FIRST)
        if KIND + 1 < COUNT:
            value = tl.where(kind == KIND + 1, codec.value(code, SECOND), value)
        value = value * factor
        if LAST >= 0:
            low = place_of_low(row, column, first, block_rows, block_columns, columns, tiles_across)
            lower = tl.load(wide + low, mask=here & (kind == LAST), other=0).to(tl.uint32)
            value = tl.where(kind == LAST, codec.value(code << 8 | lower, WIDE), value)
        tl.store(out + at, value, mask=here)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Mixtures in Triton: a pass for magnitudes, one for candidates and their errors, one for the rest.

A program handles a tile (numerics/metrics.py), or some rows that are tiles of their own. What needs
all tiles of a block or all blocks happens between the passes, by the definition's own functions on
the numbers of tiles. The second pass has already written the codes of E4M3, the third one writes
blocks of another type, and leaves out programs without any.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import E4M3, E5M2, Format, format_of
from ...numerics.metrics import LANES, TILE_COLUMNS, TILE_ROWS, lane_sums
from ...numerics.mixture import Evidence, Mixture, decide, numbers_of
from ...numerics.partition import grid_of, sizes_of_blocks
from ...numerics.scaling import BlockScales, scales_of
from ..triton import codec, launch
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
    return _decode(job) if isinstance(job, DecodeJob) else _encode(job)


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


def _encode(job: EncodeJob) -> tuple[Tensor, ...]:
    x, recipe = job.x, job.recipe
    tiles = _Tiles(x.shape, job.block, x.device)
    words, name = x.view(_WORDS[x.dtype.itemsize]), {"FORMAT": format_of(x.dtype).name}

    largest, smallest, counts = (tiles.empty(torch.int32) for _ in range(3))
    tiles.launch(measure_kernel, words, largest, smallest, counts, **name)
    amax = tiles.by_block(largest).amax(-1).view(torch.float32)
    amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
    finite = torch.isfinite(amax)

    formats = (E4M3, E5M2)
    scales = {f.name: scales_of(amax, f, job.scaling, job.groups) for f in formats}
    # Blocks that are not finite have no errors: the kernels know them by the scale 0.
    factors = {n: torch.where(finite, s.per_block(), 0.0) for n, s in scales.items()}
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    both = recipe.granularity == "block"
    sums = {f.name: tiles.empty(torch.float32) for f in formats[: 1 + both]}
    in_e4m3 = sums[E4M3.name]
    tiles.launch(
        candidates_kernel,
        *(words, factors[E4M3.name], factors[E5M2.name]),
        *(codes, in_e4m3, sums.get(E5M2.name, in_e4m3)),
        **name,
        BOTH=both,
    )

    def block_sums(fmt: Format) -> Tensor:
        return lane_sums(tiles.by_block(sums[fmt.name]))

    least = tiles.by_block(smallest).amin(-1).view(torch.float32)
    counted = tiles.by_block(counts).sum(-1, dtype=torch.int64) * finite
    evidence = Evidence(
        recipe,
        amax,
        # No magnitude is a NaN's pattern.
        least.nan_to_num(nan=torch.inf),
        counted,
        job.threshold,
        block_sums,
    )
    types = decide(recipe, evidence)
    last = len(recipe.formats)
    of_blocks = types.expand(amax.shape).contiguous()
    offsets, count = _offsets(of_blocks, last, x.shape, job.block)
    wide = torch.empty(count, dtype=torch.uint8, device=x.device)
    tiles.launch(
        rest_kernel,
        *(words, factors[E5M2.name], of_blocks, offsets, codes, wide),
        **name,
        LAST=last,
    )
    exponents = scales[E4M3.name].exponents
    if last == 2:
        exponents = torch.where(of_blocks == 1, scales[E5M2.name].exponents, exponents)
    mantissa = scales[E4M3.name].mantissa[None].contiguous()
    groups = scales[E4M3.name].blocks_of_group
    found = Mixture(codes, types, mantissa, exponents, wide, recipe.formats, job.block, groups)
    return *found.tensors, numbers_of(found, evidence)


def _decode(job: DecodeJob) -> Tensor:
    m = job.mixture
    tiles = _Tiles(m.shape, m.block, job.device)
    types = m.block_types().contiguous()
    last = len(m.formats)
    offsets, _ = _offsets(types, last, m.shape, m.block)
    inverse = BlockScales(m.mantissa[0], m.exponents, m.blocks_of_group).inverse_per_block()
    out = torch.empty(m.shape, dtype=torch.float32, device=job.device)
    stored = m.codes.contiguous(), inverse.contiguous(), types, offsets, m.wide.contiguous()
    tiles.launch(decode_kernel, *stored, out, LAST=last)
    return out


def _offsets(
    types: Tensor, last: int, shape: torch.Size, block: tuple[int, int]
) -> tuple[Tensor, int]:
    """Where each block's lower bytes begin, int64, and how many there are."""
    sizes = sizes_of_blocks(shape, block).to(types.device) * (types == last)
    ends = sizes.flatten().cumsum(0)
    return (ends - sizes.flatten()).view(types.shape), int(ends[-1])


def compile_for(capability: int, kernel: str, block: tuple[int, int], dtype: torch.dtype) -> Any:
    """Compile a kernel ahead of time, see :func:`subulp.ops.triton.launch.compile_for`."""
    word = {2: "*i16", 4: "*i32"}[dtype.itemsize]
    byte, real, whole, long = "*u8", "*fp32", "*i32", "*i64"
    arguments: dict[str, dict[str, str]] = {
        "measure": {"x": word, "largest": whole, "smallest": whole, "counts": whole},
        "candidates": {
            **{"x": word, "scale4": real, "scale5": real, "codes": byte},
            **{"sums4": real, "sums5": real},
        },
        "rest": {
            **{"x": word, "scale5": real, "types": byte, "offsets": long},
            **{"codes": byte, "wide": byte},
        },
        "decode": {
            **{"codes": byte, "inverse": real, "types": byte, "offsets": long},
            **{"wide": byte, "out": real},
        },
    }
    options: dict[str, Any] = {"candidates": {"BOTH": True}, "measure": {}}.get(kernel, {"LAST": 2})
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
def error_of(scaled, code, counted, FORMAT: tl.constexpr):
    """The terms of ``numerics.metrics.relative_error``."""
    rounded = codec.value(code, FORMAT)
    magnitude = tl.abs(scaled)
    one = tl.full(scaled.shape, 1.0, tl.float32)
    inverse = tl.div_rn(one, tl.where(rounded == 0.0, one, magnitude))
    error = tl.where(rounded == 0.0, 1.0, tl.abs(scaled - rounded) * inverse)
    return tl.where(counted, error, 0.0)


@triton.jit
def candidates_kernel(
    x,
    scale4,
    scale5,
    codes,
    sums4,
    sums5,
    rows,
    columns,
    block_rows,
    block_columns,
    across,
    tiles_down,
    tiles_across,
    FORMAT: tl.constexpr,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    row, inside, start, end, block, tile = place(
        rows, columns, block_rows, block_columns, across, tiles_down, tiles_across,
        ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    factor4 = tl.load(scale4 + block)[:, None]
    factor5 = tl.load(scale5 + block)[:, None]
    first = tl.zeros((ROWS, LANES), tl.float32)
    second = tl.zeros((ROWS, LANES), tl.float32)
    lane = tl.arange(0, LANES)
    for begin in range(start, end, LANES):
        column = begin + lane
        here = inside[:, None] & (column < end)[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        value = load(x, at, here, FORMAT)
        counted = (codec.magnitude_of(value) != 0) & (factor4 > 0.0)
        scaled = value * factor4
        code = codec.nearest(scaled, "e4m3")
        tl.store(codes + at, code.to(tl.uint8), mask=here)
        first += error_of(scaled, code, counted, "e4m3")
        if BOTH:
            scaled = value * factor5
            second += error_of(scaled, codec.nearest(scaled, "e5m2"), counted, "e5m2")
    of_rows = halves(first, LANES)
    whole = halves(tl.reshape(of_rows, (1, ROWS)), ROWS)
    store_of_tiles(sums4, tile, of_rows, inside, tl.sum(whole, 0), ROWS, BY_ROW)
    if BOTH:
        of_rows = halves(second, LANES)
        whole = halves(tl.reshape(of_rows, (1, ROWS)), ROWS)
        store_of_tiles(sums5, tile, of_rows, inside, tl.sum(whole, 0), ROWS, BY_ROW)


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
    scale5,
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
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    row, inside, start, end, block, _tile = place(
        rows, columns, block_rows, block_columns, across, tiles_down, tiles_across,
        ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    kind = tl.load(types + block).to(tl.int32)
    needed = inside & (kind > 0)
    if tl.max(needed.to(tl.int32), 0) > 0:
        is_wide = (kind == LAST)[:, None]
        first = tl.load(offsets + block)
        factor5 = tl.load(scale5 + block)[:, None]
        lane = tl.arange(0, LANES)
        for begin in range(start, end, LANES):
            column = begin + lane
            here = needed[:, None] & (column < end)[None, :]
            at = row[:, None].to(tl.int64) * columns + column[None, :]
            value = load(x, at, here, FORMAT)
            both = codec.nearest(value, "bf16")
            code = both >> 8
            if LAST == 2:
                code = tl.where(is_wide, code, codec.nearest(value * factor5, "e5m2"))
            tl.store(codes + at, code.to(tl.uint8), mask=here)
            low = place_of_low(row, column, first, block_rows, block_columns, columns, tiles_across)
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
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    row, inside, start, end, block, _tile = place(
        rows, columns, block_rows, block_columns, across, tiles_down, tiles_across,
        ROWS, BY_ROW, SPAN,
    )  # fmt: skip
    kind = tl.load(types + block).to(tl.int32)[:, None]
    factor = tl.load(inverse + block)[:, None]
    first = tl.load(offsets + block)
    lane = tl.arange(0, LANES)
    for begin in range(start, end, LANES):
        column = begin + lane
        here = inside[:, None] & (column < end)[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        code = tl.load(codes + at, mask=here, other=0).to(tl.uint32)
        value = codec.value(code, "e4m3")
        if LAST == 2:
            value = tl.where(kind == 1, codec.value(code, "e5m2"), value)
        value = value * factor
        low = place_of_low(row, column, first, block_rows, block_columns, columns, tiles_across)
        lower = tl.load(wide + low, mask=here & (kind == LAST), other=0).to(tl.uint32)
        value = tl.where(kind == LAST, codec.value(code << 8 | lower, "bf16"), value)
        tl.store(out + at, value, mask=here)

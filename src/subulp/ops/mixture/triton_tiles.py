# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Tiles of a matrix (numerics/metrics.py) in Triton: who handles them, and sums in their order.

A program handles a tile, or some rows that are tiles of their own. What it knows of each of its
tiles, and of the block that the tile is of, is a vector: of those rows, or of one number.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ...numerics.metrics import LANES, TILE_COLUMNS, TILE_ROWS
from ...numerics.partition import grid_of
from ..triton import codec
from ..triton.launch import Target, compile_for, converts

ROWS = 32
"""Rows of a program whose rows are tiles of their own."""

# They are counted in 32 bits, with room for a last step beyond them.
_MOST = 1 << 30


class Tiles:
    """Where the tiles of a matrix lie.

    Args:
        shape: Rows and columns of the matrix.
        block: Rows and columns of a block.

    Attributes:
        grid: Rows and columns of blocks.
        count: Tiles.
        programs: How many handle them.
        layout: Constexpr arguments of kernels over tiles.
        sizes: Their arguments at run time.

    Raises:
        ValueError: There are too many to be counted.
    """

    def __init__(self, shape: torch.Size, block: tuple[int, int]) -> None:
        self.grid = down, across = grid_of(shape, block)
        self.per_block = triton.cdiv(block[0], TILE_ROWS), triton.cdiv(block[1], TILE_COLUMNS)
        bands, columns = down * self.per_block[0], across * self.per_block[1]
        self.count = bands * columns
        if self.count >= _MOST:
            raise ValueError(
                f"blocks of {block[0]} x {block[1]} of a matrix of "
                f"{shape[0]} x {shape[1]} are {self.count:,} tiles, and the kernels count fewer "
                f"than {_MOST:,}: use larger blocks"
            )
        self.layout = layout_of(block)
        of_program = self.layout["ROWS"] if self.layout["BY_ROW"] else 1
        self.programs = triton.cdiv(bands, of_program) * columns
        self.sizes = (*shape, *block, across, *self.per_block)

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self.grid[0] * self.grid[1]

    @property
    def is_block(self) -> bool:
        """Whether every block is a single tile."""
        return self.per_block == (1, 1)


def layout_of(block: tuple[int, int]) -> dict[str, Any]:
    """Constexpr arguments: rows of a program, and whether they are tiles."""
    by_row = block[0] == 1
    rows = ROWS if by_row else triton.next_power_of_2(min(block[0], TILE_ROWS))
    return {"ROWS": rows, "BY_ROW": by_row, "LANES": LANES, "SPAN": TILE_COLUMNS}


def warps_of(layout: dict[str, Any]) -> int:
    """Warps of a program: at most eight values of a step for each thread."""
    values: int = layout["ROWS"] * layout["LANES"]
    return max(4, values // 256)


@dataclass(frozen=True)
class Launch:
    """A kernel with all that a launch gives it.

    Attributes:
        kernel: The kernel.
        grid: Programs.
        arguments: Those at run time, in their order.
        options: Constexpr arguments, and ``num_warps``.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """What it does."""
        name: str = self.kernel.__name__
        return name.removesuffix("_kernel")

    def run(self, device: torch.device) -> None:
        """Run it, every operation rounded by itself."""
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self.kernel[self.grid](*self.arguments, **self.options, enable_fp_fusion=False)

    def compile_for(self, target: Target) -> Any:
        """Compile it for a GPU that need not be there."""
        names = self.kernel.arg_names[: len(self.arguments)]
        told = dict(zip(names, map(_told, self.arguments), strict=True))
        options = dict(self.options)
        if "CONVERTS" in options:
            options["CONVERTS"] = converts(target)
        return compile_for(self.kernel, target, told, **options)


_POINTERS = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


def _told(argument: Any) -> int | str:
    """What a compiler is told of an argument."""
    if isinstance(argument, torch.Tensor):
        return _POINTERS[argument.dtype]
    return "fp32" if isinstance(argument, float) else int(argument)


# ------------------------------------------------------------------------------------ the functions


@triton.jit
def place(
    program,
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
    """A program's rows, which of them exist, its columns, and of its tiles: the block, the place,
    and whether they exist.
    """
    width = across * tiles_across
    unit = program // width
    column = program % width
    j = column // tiles_across
    lane = tl.arange(0, ROWS)
    if BY_ROW:
        row = unit * ROWS + lane
        inside = row < rows
        # Rows that do not exist have the last block's numbers.
        block = tl.minimum(row, rows - 1) * across + j
        tile = row * width + column
        exists = inside
    else:
        i = unit // tiles_down
        first = i * block_rows + unit % tiles_down * 128
        row = first + lane
        inside = row < tl.minimum(tl.minimum(first + 128, (i + 1) * block_rows), rows)
        block = i * across + j + tl.arange(0, 1)
        tile = unit * width + column + tl.arange(0, 1)
        exists = tile >= 0
    start = j * block_columns + column % tiles_across * SPAN
    end = tl.minimum(tl.minimum(start + SPAN, (j + 1) * block_columns), columns)
    return row, inside, start, end, block, tile, exists


@triton.jit
def steps(row, inside, column, end, columns):
    """Places of some columns of a program's rows in a contiguous matrix, and which exist."""
    here = inside[:, None] & (column < end)[None, :]
    return row[:, None].to(tl.int64) * columns + column[None, :], here


@triton.jit
def load(x, row, column, here, stride_row, stride_column, FORMAT: tl.constexpr):
    """FP32 values of some columns of a program's rows."""
    at = row[:, None].to(tl.int64) * stride_row + column[None, :].to(tl.int64) * stride_column
    code = tl.load(x + at, mask=here, other=0)
    return codec.value(code.to(tl.uint32) & ((1 << codec.width(FORMAT)) - 1), FORMAT)


@triton.jit
def halves(x, SIZE: tl.constexpr):
    """Sums over the last dimension of (n, SIZE) by halves: (n,)."""
    n: tl.constexpr = x.shape[0]
    if SIZE == 1:
        result = tl.reshape(x, (n,))
    else:
        # Sums of two have one order.
        result = halves(tl.sum(tl.reshape(x, (n, 2, SIZE // 2)), 1), SIZE // 2)
    return result


@triton.jit
def sums_of_tiles(x, LANES: tl.constexpr, ROWS: tl.constexpr, BY_ROW: tl.constexpr):
    """Sums of a program's tiles, from those of its rows' lanes (ROWS, LANES)."""
    of_rows = halves(x, LANES)
    return of_rows if BY_ROW else halves(tl.reshape(of_rows, (1, ROWS)), ROWS)

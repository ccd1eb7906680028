# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decisions in Triton: a recipe is a constant of the kernel, whatever its formats and tests.

The sums of a block, and those of a tensor, are added up in the order of numerics/metrics.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ...numerics.mixture import Acceptance, Recipe, mantissa_rows
from ..triton import codec
from .triton_tiles import halves

CHUNK = 4096
"""Blocks of a tensor whose sums are added up first."""

FEW = 16
"""Chunks that each program adds up by itself; the sums of more are added up beforehand."""


@dataclass(frozen=True)
class _Test:
    """A test, its formats by their places among the candidates."""

    kind: str
    place: int
    other: int
    span: float
    bound: float | None


@dataclass(frozen=True)
class _Facts:
    """A recipe as kernels ask for it: constants' functions may read numbers and names alone."""

    of_tensor: bool
    candidates: tuple[str, ...]
    rows: tuple[int, ...]
    entries: tuple[tuple[_Test, ...], ...]


_known: codec.Named[_Facts] = codec.Named()


def name_of(recipe: Recipe) -> str:
    """The constexpr name of a recipe: all that decides."""
    candidates = tuple(map(codec.name_of, recipe.candidates))
    entries = tuple(tuple(_plain(recipe, t) for t in entry.tests) for entry in recipe.entries)
    facts = _Facts(
        recipe.granularity == "tensor", candidates, mantissa_rows(recipe.formats), entries
    )
    tests = (
        ",".join(f"{t.kind} {t.place} {t.other} {t.span!r} {t.bound!r}" for t in entry)
        for entry in entries
    )
    name = f"{recipe.granularity};{','.join(candidates)};{';'.join(tests)}"
    _known[name] = facts
    return name


def _plain(recipe: Recipe, test: Acceptance) -> _Test:
    fmt, other = test.format, test.other
    place = recipe.candidates.index(fmt) if fmt in test.compared else -1
    place_of_other = -1 if other is None else recipe.candidates.index(other)
    span = 0.0 if fmt is None else fmt.max / fmt.smallest_normal
    return _Test(test.kind, place, place_of_other, span, test.threshold)


@triton.constexpr_function
def is_of_tensor(recipe):
    """Whether the tensor decides."""
    return _known[recipe].of_tensor


@triton.constexpr_function
def narrow_formats(recipe):
    """How many there are: the type of wide blocks."""
    return len(_known[recipe].entries)


@triton.constexpr_function
def fields(recipe):
    """How many numbers a summary is made of, see ``numerics.mixture.numbers_of``."""
    return 2 * (len(_known[recipe].entries) + 1) + 6


@triton.constexpr_function
def power_of_two(count):
    """The least that is not below a number."""
    return 1 << (count - 1).bit_length()


@triton.constexpr_function
def candidates(recipe):
    """How many formats have errors."""
    return len(_known[recipe].candidates)


@triton.constexpr_function
def candidate(recipe, i):
    """A format that has errors; the narrow ones come first."""
    return _known[recipe].candidates[i]


@triton.constexpr_function
def type_of(recipe, fmt):
    """The type of blocks in a format; -1 if there are none."""
    narrow = _known[recipe].candidates[: len(_known[recipe].entries)]
    return narrow.index(fmt) if fmt in narrow else -1


@triton.constexpr_function
def mantissas(recipe):
    """How many a group has."""
    return 1 + max(_known[recipe].rows)


@triton.constexpr_function
def format_of_mantissa(recipe, row):
    """A format whose largest value has this mantissa."""
    return _known[recipe].candidates[_known[recipe].rows.index(row)]


@triton.constexpr_function
def mantissa_row(recipe, i):
    """Row of the mantissas that a narrow format uses."""
    return _known[recipe].rows[i]


@triton.constexpr_function
def tests(recipe, entry):
    """How many tests an entry has."""
    return len(_known[recipe].entries[entry])


@triton.constexpr_function
def kind(recipe, entry, test):
    """What a test asks for."""
    return _known[recipe].entries[entry][test].kind


@triton.constexpr_function
def place(recipe, entry, test):
    """The candidate whose error a test asks for."""
    return _known[recipe].entries[entry][test].place


@triton.constexpr_function
def other_place(recipe, entry, test):
    """The candidate that it is compared with."""
    return _known[recipe].entries[entry][test].other


@triton.constexpr_function
def span(recipe, entry, test):
    """Largest over smallest normal value of the format that a test asks for."""
    return _known[recipe].entries[entry][test].span


@triton.constexpr_function
def has_bound(recipe, entry, test):
    """Whether a test has a number of its own."""
    return _known[recipe].entries[entry][test].bound is not None


@triton.constexpr_function
def bound(recipe, entry, test):
    """The number."""
    return _known[recipe].entries[entry][test].bound


# ------------------------------------------------------------------------------------------- sums


@triton.jit
def sums_of_blocks(sums, block, here, across, tiles_down, tiles_across, IS_BLOCK: tl.constexpr):
    """Sums of blocks (n,) from those of their tiles."""
    if IS_BLOCK:
        result = tl.load(sums + block, mask=here, other=0.0)
    else:
        width = across * tiles_across
        first = block // across * tiles_down * width + block % across * tiles_across
        lane = tl.arange(0, 16)
        total = tl.zeros((block.shape[0], 16), tl.float32)
        for begin in range(0, tiles_down * tiles_across, 16):
            tile = begin + lane
            at = first[:, None] + (tile // tiles_across * width + tile % tiles_across)[None, :]
            some = here[:, None] & (tile < tiles_down * tiles_across)[None, :]
            total += tl.load(sums + at, mask=some, other=0.0)
        result = halves(total, 16)
    return result


@triton.jit
def sums_of_chunks(
    sums,
    chunk,
    blocks,
    across,
    tiles_down,
    tiles_across,
    IS_BLOCK: tl.constexpr,
):
    """Sums of chunks (n,)."""
    n: tl.constexpr = chunk.shape[0]
    total = tl.zeros((n * 16,), tl.float32)
    first = tl.reshape(chunk[:, None] * 4096 + tl.arange(0, 16)[None, :], (n * 16,))
    for begin in range(0, tl.minimum(blocks, 4096), 16):
        block = first + begin
        total += sums_of_blocks(
            sums, block, block < blocks, across, tiles_down, tiles_across, IS_BLOCK
        )
    return halves(tl.reshape(total, (n, 16)), 16)


@triton.jit
def sum_of_all(
    sums,
    of_chunks,
    blocks,
    across,
    tiles_down,
    tiles_across,
    IS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Sum of all blocks (1,)."""
    if CHUNKS == "one":
        chunk = tl.zeros((1,), tl.int32)
        result = sums_of_chunks(sums, chunk, blocks, across, tiles_down, tiles_across, IS_BLOCK)
    else:
        lane = tl.arange(0, 16)
        if CHUNKS == "few":
            total = sums_of_chunks(sums, lane, blocks, across, tiles_down, tiles_across, IS_BLOCK)
        else:
            total = tl.zeros((16,), tl.float32)
            for begin in range(0, blocks, 16 * 4096):
                chunk = begin // 4096 + lane
                some = chunk * 4096 < blocks
                total += tl.load(of_chunks + chunk, mask=some, other=0.0)
        result = halves(tl.reshape(total, (1, 16)), 16)
    return result


# --------------------------------------------------------------------------------------- decisions


@triton.jit
def error_of(
    of: tl.constexpr,
    count,
    sums,
    of_chunks,
    tiles,
    chunks,
    block,
    here,
    blocks,
    across,
    tiles_down,
    tiles_across,
    RECIPE: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The metric of regions in a candidate."""
    of_tiles = sums + tl.cast(tiles, tl.int64) * of
    if is_of_tensor(RECIPE):
        total = sum_of_all(
            of_tiles, of_chunks + chunks * of, blocks, across, tiles_down, tiles_across, IS_BLOCK,
            CHUNKS,
        )  # fmt: skip
    else:
        total = sums_of_blocks(of_tiles, block, here, across, tiles_down, tiles_across, IS_BLOCK)
    return tl.div_rn(total, tl.maximum(count, 1).to(tl.float32))


@triton.jit
def accepts(
    entry: tl.constexpr,
    test: tl.constexpr,
    most,
    smallest,
    count,
    block,
    here,
    sums,
    of_chunks,
    threshold,
    tiles,
    chunks,
    blocks,
    across,
    tiles_down,
    tiles_across,
    RECIPE: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Which regions pass a test."""
    asked: tl.constexpr = kind(RECIPE, entry, test)
    if asked == "always":
        result = most >= 0.0
    elif asked == "fits-range":
        result = tl.div_rn(most, smallest) <= span(RECIPE, entry, test)
    else:
        error = error_of(
            place(RECIPE, entry, test), count, sums, of_chunks, tiles, chunks, block, here, blocks,
            across, tiles_down, tiles_across, RECIPE, IS_BLOCK, CHUNKS,
        )  # fmt: skip
        if asked == "below-threshold":
            if has_bound(RECIPE, entry, test):
                result = error < bound(RECIPE, entry, test)
            else:
                result = error < threshold
        else:
            other = error_of(
                other_place(RECIPE, entry, test), count, sums, of_chunks, tiles, chunks, block,
                here, blocks, across, tiles_down, tiles_across, RECIPE, IS_BLOCK, CHUNKS,
            )  # fmt: skip
            result = error < other if asked == "better-than" else error <= other
    return result


@triton.jit
def types_of(
    block,
    here,
    amax,
    least,
    counted,
    whole,
    sums,
    of_chunks,
    threshold,
    tiles,
    chunks,
    blocks,
    across,
    tiles_down,
    tiles_across,
    RECIPE: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The types of blocks (n,), int32; (1,) where the tensor decides."""
    if is_of_tensor(RECIPE):
        one = tl.arange(0, 1)
        most = tl.load(whole + one).to(tl.int32).to(tl.float32, bitcast=True)
        below = tl.load(whole + 1 + one).to(tl.int32)
        smallest = (0x7F800000 - below).to(tl.float32, bitcast=True)
        count = tl.load(whole + 2 + one)
    else:
        most = tl.load(amax + block, mask=here, other=0.0)
        smallest = tl.load(least + block, mask=here, other=float("inf"))
        count = tl.load(counted + block, mask=here, other=0)
    last: tl.constexpr = narrow_formats(RECIPE)
    found = tl.full(most.shape, last, tl.int32)
    for back in tl.static_range(last):
        passes = most >= 0.0
        for test in tl.static_range(tests(RECIPE, last - 1 - back)):
            passes &= accepts(
                last - 1 - back, test, most, smallest, count, block, here, sums, of_chunks,
                threshold, tiles, chunks, blocks, across, tiles_down, tiles_across, RECIPE,
                IS_BLOCK, CHUNKS,
            )  # fmt: skip
        found = tl.where(passes, last - 1 - back, found)
    found = tl.where(most == 0.0, 0, found)
    return tl.where(most < float("inf"), found, last)

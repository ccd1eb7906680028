"""Mixture of representations ("MoR", sections 2 and 3) in exact rationals, one block at a time.

A rational is rounded to FP32 wherever the definition says that an operation is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from .grid import Grid
from .rounding import round_exact

FP32 = Grid(8, 23)
E4M3, E5M2, BF16 = Grid(4, 3, has_infinity=False), Grid(5, 2), Grid(8, 7)
NO_SCALE = -128


def fp32(value: Fraction) -> Fraction:
    """To nearest, ties to even."""
    return Fraction(round_exact(value, FP32)) if value else value


def ideal(amax: Fraction, grid: Grid) -> tuple[Fraction, int]:
    """Mantissa and exponent of the quotient, rounded to 24 bits without an end of exponents."""
    quotient, exponent = grid.largest / amax, 0
    while quotient >= 2:
        quotient, exponent = quotient / 2, exponent + 1
    while quotient < 1:
        quotient, exponent = quotient * 2, exponent - 1
    mantissa = Fraction(round(quotient * 2**23), 2**23)
    return (mantissa / 2, exponent + 1) if mantissa == 2 else (mantissa, exponent)


def amax_of(values: Sequence[float]) -> Fraction | None:
    """``None`` if not all values are finite."""
    if not all(map(math.isfinite, values)):
        return None
    return max(Fraction(abs(v)) for v in values)


def group_mantissa(blocks: Sequence[Sequence[float]], grid: Grid) -> Fraction:
    """Algorithm 1: of the largest magnitude of the group's finite blocks."""
    amax = max((amax_of(b) or Fraction(0) for b in blocks), default=Fraction(0))
    return ideal(amax, grid)[0] if amax else Fraction(1)


def exponent(block: Sequence[float], shared: Fraction, grid: Grid) -> int:
    """Algorithm 1: the block's own, one less if its mantissa is below the group's."""
    amax = amax_of(block)
    if not amax:
        return NO_SCALE
    mantissa, e = ideal(amax, grid)
    return min(e if shared <= mantissa else e - 1, 127)


def scale(shared: Fraction, e: int) -> Fraction:
    """``shared * 2**e``; below the normal range it loses its last bit."""
    if e == NO_SCALE:
        return Fraction(1)
    exact = shared * Fraction(2) ** e
    unit = Fraction(2) ** -149
    return exact // unit * unit


def quantise(value: float, s: Fraction, grid: Grid) -> tuple[Fraction, Fraction]:
    """The scaled value and what it is rounded to."""
    scaled = fp32(Fraction(value) * s)
    return scaled, Fraction(round_exact(scaled, grid)) if scaled else scaled


def term(value: float, s: Fraction, grid: Grid) -> Fraction:
    """What a value of a finite block adds to the sum of errors."""
    if value == 0:
        return Fraction(0)
    scaled, rounded = quantise(value, s, grid)
    if rounded == 0:
        return Fraction(1)
    return fp32(abs(scaled - rounded) * fp32(1 / abs(scaled)))


def lanes(numbers: Sequence[np.float32]) -> np.float32:
    """Sixteen lanes in turn, then by halves."""
    found = [np.float32(0)] * 16
    for i, number in enumerate(numbers):
        found[i % 16] = number if i < 16 else found[i % 16] + number
    return halves(found)


def halves(numbers: Sequence[np.float32]) -> np.float32:
    size = 1 << (len(numbers) - 1).bit_length()
    found = [*numbers, *[np.float32(0)] * (size - len(numbers))]
    while len(found) > 1:
        half = len(found) // 2
        found = [found[i] + found[i + half] for i in range(half)]
    return found[0]


def block_sum(rows: Sequence[Sequence[Fraction]]) -> np.float32:
    """The sum of a block's terms, in the order of numerics.metrics."""
    tiles = []
    for top in range(0, len(rows), 128):
        for left in range(0, len(rows[0]), 4096):
            part = [row[left : left + 4096] for row in rows[top : top + 128]]
            tiles.append(halves([lanes([np.float32(float(t)) for t in row]) for row in part]))
    return lanes(tiles)


def mean(sums: Sequence[np.float32], count: int) -> np.float32:
    """One block's, or those of all blocks of a tensor."""
    if len(sums) == 1:
        whole = sums[0]
    else:
        whole = lanes([lanes(sums[i : i + 4096]) for i in range(0, len(sums), 4096)])
    return whole / np.float32(max(count, 1))

"""Rounding an exact rational to a grid: nearest-even, toward zero, stochastic from given bits."""

from __future__ import annotations

import math
from fractions import Fraction

from .grid import Grid

WORD = 2**32


def round_magnitude(
    magnitude: Fraction, grid: Grid, rounding: str = "nearest", bits: int | None = None
) -> int:
    """Code of the rounded magnitude; beyond the largest value it saturates.

    Stochastic rounding goes up iff ``floor(fraction * 2**32) + bits >= 2**32``.
    """
    code, fraction = grid.locate(magnitude)
    if code == grid.count - 1:
        return code
    if rounding == "nearest":
        up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and code % 2 == 1)
    elif rounding == "toward-zero":
        up = False
    elif rounding == "stochastic":
        up = threshold(fraction) + bits >= WORD
    else:
        raise AssertionError(rounding)
    return code + up


def threshold(fraction: Fraction) -> int:
    """How many of the 2**32 patterns round up."""
    return math.floor(fraction * WORD)


def round_exact(
    value: Fraction, grid: Grid, rounding: str = "nearest", bits: int | None = None
) -> float:
    """A non-zero rational, rounded; a result of zero keeps the sign."""
    assert value != 0
    code = round_magnitude(abs(value), grid, rounding, bits)
    return math.copysign(float(grid.value(code)), value)


def round_float(x: float, grid: Grid, rounding: str = "nearest", bits: int | None = None) -> float:
    """A float with its specials: NaN stays, infinity stays or becomes NaN, zeros keep the sign."""
    if not math.isfinite(x):
        return x if grid.has_infinity else math.nan
    return x if x == 0 else round_exact(Fraction(x), grid, rounding, bits)

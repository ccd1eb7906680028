"""Strict arithmetic ``F^P``: the exact result of one operation, rounded once, nearest-even."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import wraps

from .grid import Grid
from .rounding import round_exact, round_float


def _remembered(operation: Callable[..., float]) -> Callable[..., float]:
    """Keep results: the algorithms repeat the same few operations on the values of a small grid."""

    @wraps(operation)
    def wrapper(self: Strict, *operands: float) -> float:
        # 0.0 and -0.0 are the same key, hence the signs.
        key = (operation, *operands, *[math.copysign(1.0, v) for v in operands])
        if key not in self.known:
            self.known[key] = operation(self, *operands)
        return self.known[key]

    return wrapper


class Strict:
    """One floating-point unit for the values of ``grid``, which are given as Python floats.

    Results that are not finite, and the sign of an exact zero, follow IEEE 754: for these Python's
    own floats serve, since no rounding is involved. A finite result beyond the range saturates.
    """

    def __init__(self, grid: Grid):
        self.grid = grid
        self.known: dict[tuple, float] = {}

    def round(self, x: float) -> float:
        return round_float(x, self.grid)

    @_remembered
    def add(self, a: float, b: float) -> float:
        if not (math.isfinite(a) and math.isfinite(b)):
            return self.round(a + b)
        exact = Fraction(a) + Fraction(b)
        return round_exact(exact, self.grid) if exact else a + b

    def sub(self, a: float, b: float) -> float:
        return self.add(a, -b)

    @_remembered
    def mult(self, a: float, b: float) -> float:
        if not (math.isfinite(a) and math.isfinite(b)):
            return self.round(a * b)
        exact = Fraction(a) * Fraction(b)
        return round_exact(exact, self.grid) if exact else a * b

    @_remembered
    def div(self, a: float, b: float) -> float:
        if b == 0:
            invalid = a == 0 or math.isnan(a)
            sign = math.copysign(1.0, a) * math.copysign(1.0, b)
            return self.round(math.nan if invalid else sign * math.inf)
        if not (math.isfinite(a) and math.isfinite(b)):
            return self.round(a / b)
        exact = Fraction(a) / Fraction(b)
        return round_exact(exact, self.grid) if exact else a / b

    @_remembered
    def fma(self, a: float, b: float, c: float) -> float:
        if not all(map(math.isfinite, (a, b, c))):
            return self.round(a * b + c)
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        return round_exact(exact, self.grid) if exact else a * b + c

    def sqrt(self, a: float) -> float:
        """An irrational root rounds as the midpoint of the multiples of 2**-400 around it does."""
        if math.isnan(a) or a < 0:
            return math.nan
        if a == 0 or math.isinf(a):
            return self.round(a)
        scale = 4**400
        scaled = Fraction(a) * scale
        assert scaled.denominator == 1
        root = math.isqrt(scaled.numerator)
        inexact = root * root != scaled
        return round_exact((root + Fraction(inexact, 2)) / 2**400, self.grid)

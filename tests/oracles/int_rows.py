"""Rows of integers ("Mixed-Precision Embedding Using a Cache", Algorithm 1) in exact rationals.

A rational is rounded to FP32 wherever the definition says that an operation is rounded.
"""

from __future__ import annotations

import math
from fractions import Fraction

from .grid import Grid
from .rounding import round_exact

FP32 = Grid(8, 23)
LARGEST = FP32.largest

Row = tuple[list[int], float, float]


def fp32(value: Fraction) -> Fraction:
    """To nearest, ties to even."""
    return Fraction(round_exact(value, FP32)) if value else value


def encode(x: list[float], bits: int, random: list[int] | None = None) -> Row:
    """Integers, scale and bias of a row of FP32 numbers."""
    nothing = [0] * len(x)
    if not all(map(math.isfinite, x)):
        return nothing, math.nan, math.nan
    exact = [Fraction(v) for v in x]
    bias = min(exact)
    if max(exact) - bias >= LARGEST + (LARGEST - FP32.value(FP32.count - 2)) / 2:
        return nothing, math.nan, math.nan
    top = 2**bits - 1
    scale = fp32(fp32(max(exact) - bias) / top)
    if scale == 0:
        return nothing, 0.0, float(bias)
    q = []
    for i, value in enumerate(exact):
        t = fp32(fp32(value - bias) / scale)
        if random is None:
            q.append(min(round(t), top))
        else:
            u = Fraction(random[i] >> 8, 2**24)
            q.append(min(math.floor(t) + (t % 1 > u), top))
    return q, float(scale), float(bias)


def decode(row: Row) -> list[float]:
    """``q * scale + bias``."""
    q, scale, bias = row
    if math.isnan(scale):
        return [math.nan] * len(q)
    return [float(fp32(fp32(i * Fraction(scale)) + Fraction(bias))) for i in q]


def pack(q: list[int], bits: int) -> bytes:
    """The first integer lowest, as one number in base ``2**bits``, in whole bytes."""
    number = sum(value << (bits * i) for i, value in enumerate(q))
    return number.to_bytes(-(-len(q) * bits // 8), "little")

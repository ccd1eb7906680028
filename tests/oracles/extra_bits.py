"""Extra bits ("Memory Efficient Mixed Precision Optimizers", section 3.1) by their positions."""

from __future__ import annotations

import math
from fractions import Fraction

from .grid import Grid


def split(x: float, grid: Grid, k: int, coding: str, bits: int | None = None) -> tuple[float, int]:
    """Head and tail, the tail as its k (or k + 1) bits.

    A magnitude is ``steps`` steps of 2**-k away from zero on the line of codes. The low ``32 - k``
    bits decide the last step, the top k bits whether a stochastic head goes to its neighbour.
    """
    if not math.isfinite(x):
        return (x if grid.has_infinity else math.nan), 0
    code, fraction = grid.locate(abs(Fraction(x)))
    exact = (code + fraction) * 2**k
    steps, rest = math.floor(exact), exact - math.floor(exact)
    if bits is not None:
        low, top = bits % 2 ** (32 - k), bits // 2 ** (32 - k)
        steps += math.floor(rest * 2 ** (32 - k)) + low >= 2 ** (32 - k)
    elif coding == "nearest":
        steps += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2 == 1)
    if coding == "nearest":
        # The last head reaches up to half a step of the grid.
        steps = min(steps, (grid.count - 1) * 2**k + 2 ** (k - 1) - 1)
        code = math.floor(Fraction(steps, 2**k) + Fraction(1, 2))
        signed = steps - code * 2**k
        return math.copysign(float(grid.value(code)), x), signed + 2**k * (signed < 0)
    steps = min(steps, grid.count * 2**k - 1)
    code, tail = divmod(steps, 2**k)
    if coding == "stochastic" and tail + top >= 2**k and code < grid.count - 1:
        code, tail = code + 1, tail + 2**k
    return math.copysign(float(grid.value(code)), x), tail


def join(head: float, tail: int, grid: Grid, k: int, coding: str) -> Fraction:
    """The exact value that a finite head and its tail stand for."""
    code, fraction = grid.locate(abs(Fraction(head)))
    assert fraction == 0
    steps = code * 2**k + tail
    if coding == "nearest" and tail >= 2 ** (k - 1):
        steps -= 2**k
    elif tail >= 2**k:
        steps -= 2 * 2**k
    code, step = divmod(steps, 2**k)
    here = grid.value(code)
    ahead = grid.value(code + 1) if code + 1 < grid.count else 2 * here - grid.value(code - 1)
    return Fraction(math.copysign(1.0, head)) * (here + (ahead - here) * Fraction(step, 2**k))


def pack(tails: list[int], width: int) -> list[int]:
    """The tails as one string of bits, the lowest first, in groups of 32 tails, as signed words."""
    padded = tails + [0] * (-len(tails) % 32)
    string = "".join(format(tail, f"0{width}b")[::-1] for tail in padded)
    words = [int(string[i : i + 32][::-1], 2) for i in range(0, len(string), 32)]
    return [word - 2**32 if word >= 2**31 else word for word in words]

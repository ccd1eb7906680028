"""Extra bits ("Memory Efficient Mixed Precision Optimizers", section 3.1) by their positions."""

from __future__ import annotations

import math
from fractions import Fraction

from .grid import Grid


def split(x: float, grid: Grid, k: int, bits: int | None = None) -> tuple[float, int]:
    """Head and tail; with ``bits`` both are rounded stochastically, without they are cut.

    A magnitude is ``steps`` steps of 2**-k away from zero on the line of codes. The low ``32 - k``
    bits decide the last step, the top k bits whether the head goes to its neighbour.
    """
    if not math.isfinite(x):
        return (x if grid.has_infinity else math.nan), 0
    code, fraction = grid.locate(abs(Fraction(x)))
    exact = (code + fraction) * 2**k
    steps = math.floor(exact)
    if bits is not None:
        low, top = bits % 2 ** (32 - k), bits // 2 ** (32 - k)
        finest = math.floor(exact * 2 ** (32 - k)) % 2 ** (32 - k)
        steps += finest + low >= 2 ** (32 - k)
    steps = min(steps, grid.count * 2**k - 1)
    code, tail = divmod(steps, 2**k)
    if bits is not None and tail + top >= 2**k and code < grid.count - 1:
        code, tail = code + 1, tail + 2**k
    return math.copysign(float(grid.value(code)), x), tail


def join(head: float, tail: int, grid: Grid, k: int) -> Fraction:
    """The exact value that a finite head and its tail stand for."""
    code, fraction = grid.locate(abs(Fraction(head)))
    assert fraction == 0
    rounded_up, step = divmod(tail, 2**k)
    code -= rounded_up
    here = grid.value(code)
    ahead = grid.value(code + 1) if code + 1 < grid.count else 2 * here - grid.value(code - 1)
    return Fraction(math.copysign(1.0, head)) * (here + (ahead - here) * Fraction(step, 2**k))


def pack(tails: list[int], width: int) -> list[int]:
    """The tails as one string of bits, the lowest first, in groups of 32 tails, as signed words."""
    padded = tails + [0] * (-len(tails) % 32)
    string = "".join(format(tail, f"0{width}b")[::-1] for tail in padded)
    words = [int(string[i : i + 32][::-1], 2) for i in range(0, len(string), 32)]
    return [word - 2**32 if word >= 2**31 else word for word in words]

"""The multi-component algorithms of Collage (sections 3 and 4, appendix C), line by line."""

from __future__ import annotations

import math
from fractions import Fraction

from .arithmetic import Strict
from .rounding import round_exact, round_float

Pair = tuple[float, float]


def encode(f: Strict, x: float) -> Pair:
    """Definition 2.1 at length 2: ``hi = RN(x)``, ``lo = RN(x - hi)``, each rounded once."""
    hi = round_float(x, f.grid)
    if not math.isfinite(hi):
        return hi, 0.0
    rest = Fraction(x) - Fraction(hi)
    return hi, round_exact(rest, f.grid) if rest else 0.0


def fast2sum(f: Strict, a: float, b: float) -> Pair:
    """Theorem 4.1."""
    x = f.add(a, b)
    y = f.sub(b, f.sub(x, a))
    return x, y


def two_sum(f: Strict, a: float, b: float) -> Pair:
    """Algorithm 2 of appendix C."""
    x = f.add(a, b)
    b_virtual = f.sub(x, a)
    a_virtual = f.sub(x, b_virtual)
    b_roundoff = f.sub(b, b_virtual)
    a_roundoff = f.sub(a, a_virtual)
    y = f.add(a_roundoff, b_roundoff)
    return x, y


def split(f: Strict, a: float) -> Pair:
    """Algorithm 3 of appendix C, with Dekker's ``c = ceil(p / 2)``.

    The paper prints ``floor(p / 2)``, the same for even precision. For odd precision it leaves a
    high half too wide for its square to be exact.
    """
    p = f.grid.mantissa_bits + 1
    c = math.ceil(Fraction(p, 2))
    t = f.mult(f.add(2.0**c, 1.0), a)
    a_hi = f.sub(t, f.sub(t, a))
    a_lo = f.sub(a, a_hi)
    return a_hi, a_lo


def two_prod(f: Strict, a: float, b: float) -> Pair:
    """Algorithm 4 of appendix C; its "p" is the product x."""
    x = f.mult(a, b)
    a_hi, a_lo = split(f, a)
    b_hi, b_lo = split(f, b)
    err1 = f.sub(x, f.mult(a_hi, b_hi))
    err2 = f.sub(err1, f.mult(a_lo, b_hi))
    err3 = f.sub(err2, f.mult(a_hi, b_lo))
    e = f.sub(f.mult(a_lo, b_lo), err3)
    return x, e


def two_prod_fma(f: Strict, a: float, b: float) -> Pair:
    """Algorithm 5 of appendix C."""
    x = f.mult(a, b)
    e = f.fma(a, b, -x)
    return x, e


def grow(f: Strict, x: float, y: float, a: float, *, ordered: bool = True) -> Pair:
    """Algorithm 1; its first sum is TwoSum where ``|x| >= |a|`` is not given."""
    u, v = fast2sum(f, x, a) if ordered else two_sum(f, x, a)
    return fast2sum(f, u, f.add(y, v))


def scaling(f: Strict, a1: float, a2: float, v: float) -> Pair:
    """Algorithm 6 of appendix C; its third line is one fused multiply-add."""
    x, e = two_prod_fma(f, a1, v)
    e = f.fma(a2, v, e)
    return fast2sum(f, x, e)


def mul(f: Strict, a1: float, a2: float, b1: float, b2: float) -> Pair:
    """Algorithm 7 of appendix C."""
    x, e = two_prod_fma(f, a1, b1)
    e = f.add(e, f.add(f.mult(a1, b2), f.mult(a2, b1)))
    return fast2sum(f, x, e)

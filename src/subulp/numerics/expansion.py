"""Length-2 expansions and the multi-component algorithms in strict narrow arithmetic.

An expansion is the unevaluated sum ``hi + lo`` of two narrow floats (Collage, Definition 2.1).
Everything here takes and returns FP32 tensors whose values lie on the grid of ``fmt``; each
arithmetic operation is rounded once to that grid, nearest-even, as a machine with ``fmt`` units
would do it (the paper's ``F^P``). The error-free algorithms are exact as long as nothing leaves the
format's range: a result beyond the largest finite value saturates, and an error term finer than
the smallest subnormal is rounded to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import FP32, Format
from .rounding import round_to

Expansion = tuple[Tensor, Tensor]


def encode(x: Tensor, fmt: Format) -> Expansion:
    """Nearest length-2 expansion: ``hi = RN(x)``, ``lo = RN(x - hi)``.

    Args:
        x: FP32 or FP64 tensor of any values.
        fmt: Format of both components.

    Returns:
        ``(hi, lo)``, FP32 tensors like ``x`` on the grid of ``fmt``. ``lo`` is zero where
        ``hi`` is not finite.

    Raises:
        ValueError: ``x`` is neither FP32 nor FP64.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x has dtype {x.dtype}: encode takes FP32 or FP64 values")
    wide = x.to(torch.float64)
    hi = _round(wide, fmt)
    # hi and x are at most one binade apart, so the difference is exact (Sterbenz).
    difference = torch.where(torch.isfinite(hi), wide - hi.to(torch.float64), 0.0)
    return hi, _round(difference, fmt)


def decode(hi: Tensor, lo: Tensor) -> Tensor:
    """``hi + lo`` in FP32; exact for every expansion that ``encode`` makes from an FP32 value.

    The one exception is out of any model's reach: a BF16 expansion of magnitudes from
    ``2**128 - 2**111`` stands for ``2**128``, which FP32 does not have, and decodes to infinity.
    """
    return hi.to(torch.float32) + lo.to(torch.float32)


def add(a: Tensor, b: Tensor, fmt: Format) -> Tensor:
    """``F^P(a (+) b)``."""
    return _round_sum(a.to(torch.float64), b.to(torch.float64), fmt)


def sub(a: Tensor, b: Tensor, fmt: Format) -> Tensor:
    """``F^P(a (-) b)``."""
    return add(a, -b, fmt)


def mult(a: Tensor, b: Tensor, fmt: Format) -> Tensor:
    """``F^P(a (.) b)``."""
    return _round(a.to(torch.float64) * b.to(torch.float64), fmt)


def div(a: Tensor, b: Tensor, fmt: Format) -> Tensor:
    """``F^P(a / b)``."""
    return _round(a.to(torch.float64) / b.to(torch.float64), fmt)


def sqrt(a: Tensor, fmt: Format) -> Tensor:
    """``F^P(sqrt(a))``."""
    return _round(a.to(torch.float64).sqrt(), fmt)


def fma(a: Tensor, b: Tensor, c: Tensor, fmt: Format) -> Tensor:
    """``F^P(a (.) b (+) c)``, rounded once."""
    return _round_sum(a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64), fmt)


def fast2sum(a: Tensor, b: Tensor, fmt: Format) -> Expansion:
    """Sum and its rounding error (Collage, Theorem 4.1); exact if ``|a| >= |b|`` or ``a == 0``."""
    x = add(a, b, fmt)
    return x, sub(b, sub(x, a, fmt), fmt)


def two_sum(a: Tensor, b: Tensor, fmt: Format) -> Expansion:
    """Sum and its rounding error for operands in any order (Collage, appendix C, TwoSum)."""
    x = add(a, b, fmt)
    b_virtual = sub(x, a, fmt)
    a_virtual = sub(x, b_virtual, fmt)
    b_roundoff = sub(b, b_virtual, fmt)
    a_roundoff = sub(a, a_virtual, fmt)
    return x, add(a_roundoff, b_roundoff, fmt)


def split(a: Tensor, fmt: Format) -> Expansion:
    """High and low half of the significand, ``a = hi + lo`` (Collage, appendix C, Split).

    The paper splits at ``c = floor(p / 2)``. For odd precision (FP16 has 11 significand bits, E5M2
    three) that leaves a high half whose square does not fit ``p`` bits, and TwoProd would not be
    exact; ``c = ceil(p / 2)`` (Dekker) is the same for even ``p`` and right for odd.
    """
    c = (fmt.precision + 1) // 2
    factor = torch.full_like(a, 2.0**c + 1.0)
    t = mult(round_to(factor, fmt), a, fmt)
    hi = sub(t, sub(t, a, fmt), fmt)
    return hi, sub(a, hi, fmt)


def two_prod(a: Tensor, b: Tensor, fmt: Format) -> Expansion:
    """Product and its rounding error without FMA (Collage, Algorithm 4, whose "p" means x)."""
    x = mult(a, b, fmt)
    a_hi, a_lo = split(a, fmt)
    b_hi, b_lo = split(b, fmt)
    err1 = sub(x, mult(a_hi, b_hi, fmt), fmt)
    err2 = sub(err1, mult(a_lo, b_hi, fmt), fmt)
    err3 = sub(err2, mult(a_hi, b_lo, fmt), fmt)
    return x, sub(mult(a_lo, b_lo, fmt), err3, fmt)


def two_prod_fma(a: Tensor, b: Tensor, fmt: Format) -> Expansion:
    """Product and its rounding error with a fused multiply-add (Collage, Algorithm 5)."""
    x = mult(a, b, fmt)
    return x, fma(a, b, -x, fmt)


def grow(hi: Tensor, lo: Tensor, a: Tensor, fmt: Format, *, ordered: bool = True) -> Expansion:
    """Add a float to an expansion (Collage, Algorithm 1).

    Args:
        hi: First component.
        lo: Second component.
        a: Addend.
        fmt: Format of all.
        ordered: ``|hi| >= |a|`` or ``hi == 0`` holds everywhere, as the paper assumes of a weight
            and its update (default: ``True``). ``False`` takes TwoSum, which needs no order, for
            the first sum: a weight that starts near zero is smaller than its updates.
    """
    u, v = fast2sum(hi, a, fmt) if ordered else two_sum(hi, a, fmt)
    return fast2sum(u, add(lo, v, fmt), fmt)


def scaling(hi: Tensor, lo: Tensor, v: Tensor, fmt: Format) -> Expansion:
    """Multiply an expansion by a float (Collage, Algorithm 6); the second line is one FMA."""
    x, e = two_prod_fma(hi, v, fmt)
    e = fma(lo, v, e, fmt)
    return fast2sum(x, e, fmt)


def mul(a_hi: Tensor, a_lo: Tensor, b_hi: Tensor, b_lo: Tensor, fmt: Format) -> Expansion:
    """Multiply two expansions (Collage, Algorithm 7); every printed operation rounds once."""
    x, e = two_prod_fma(a_hi, b_hi, fmt)
    cross = add(mult(a_hi, b_lo, fmt), mult(a_lo, b_hi, fmt), fmt)
    e = add(e, cross, fmt)
    return fast2sum(x, e, fmt)


def _round(wide: Tensor, fmt: Format) -> Tensor:
    """FP64 to the grid of ``fmt``, nearest-even, without double rounding.

    FP32 stands between the two. Rounding to *odd* into FP32 keeps what the second rounding needs
    to know, because FP32 has at least two more bits than any format here (Boldo and Melquiond).
    """
    if fmt.mantissa_bits > FP32.mantissa_bits - 2:
        if fmt == FP32:
            nearest = wide.to(torch.float32)
            return torch.where(torch.isfinite(wide), nearest.clamp(-FP32.max, FP32.max), nearest)
        raise ValueError(f"{fmt} is too wide for strict arithmetic: at most 21 mantissa bits")
    nearest = wide.to(torch.float32)
    back = nearest.to(torch.float64)
    pattern = nearest.view(torch.int32)
    truncated = torch.where(back.abs() > wide.abs(), pattern - 1, pattern)
    odd = torch.where(back != wide, truncated | 1, truncated).view(torch.float32)
    return round_to(torch.where(torch.isfinite(wide), odd, nearest), fmt)


def _round_sum(a: Tensor, b: Tensor, fmt: Format) -> Tensor:
    """``a + b`` of FP64 operands, rounded once to ``fmt``: the FP64 sum is rounded to odd."""
    s = a + b
    b_virtual = s - a
    error = (a - (s - b_virtual)) + (b - b_virtual)
    pattern = s.view(torch.int64)
    # An error of the opposite sign means that the sum was rounded away from zero.
    truncated = torch.where((error != 0) & ((error > 0) != (s > 0)), pattern - 1, pattern)
    odd = torch.where(error != 0, truncated | 1, truncated).view(torch.float64)
    return _round(torch.where(torch.isfinite(s) & torch.isfinite(error), odd, s), fmt)

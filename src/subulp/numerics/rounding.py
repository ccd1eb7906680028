"""Rounding FP32 onto a narrower grid: nearest-even, toward zero, stochastic from given bits.

One idea serves every format, all modes and the extra bits. The non-negative values of a format,
in order, have the codes 0, 1, 2, ...; between two neighbours the grid is uniform. A magnitude thus
has a *position* on the line of codes: an integer code and a fraction of the step to the next one,
kept as fixed point with 32 fraction bits. Rounding adds an increment below one step and drops the
fraction; the mode is the increment. The Triton kernels do the same in 32-bit integers; the C++
kernels find code and fraction as the whole part and the rest of the magnitude in units of the grid.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .formats import Format, power_of_two

Rounding = Literal["nearest", "toward-zero", "stochastic"]

FRACTION_BITS = 32
_ALMOST_HALF = (1 << (FRACTION_BITS - 1)) - 1
_WORD = 0xFFFFFFFF


def round_to(
    x: Tensor, fmt: Format, rounding: Rounding = "nearest", *, bits: Tensor | None = None
) -> Tensor:
    """Round each value to the grid of ``fmt``.

    Finite values beyond the largest finite one saturate: a finite input never becomes infinite or
    NaN. An infinity stays where the format has one and becomes NaN where it has none (E4M3). NaN
    stays NaN. The sign of zero is kept, also for negative values that round to zero.

    Args:
        x: FP32 tensor, any shape.
        fmt: Target format.
        rounding: ``"nearest"`` (ties to even), ``"toward-zero"`` or ``"stochastic"`` (default:
            ``"nearest"``).
        bits: For ``"stochastic"`` only: uniform random bits of the shape of ``x``, as
            ``torch.uint32`` or as integers in ``[0, 2**32)`` in int64. The magnitude rounds up
            exactly if ``fraction + bits`` carries, ``fraction`` being the dropped part in units of
            2**-32 ulp. The mean over all 2**32 patterns is therefore ``x`` itself, subnormals
            included, whenever the dropped part is a multiple of 2**-32 ulp; a finer part is cut,
            a bias below 2**-32 ulp. A representable value never moves.

    Returns:
        FP32 tensor of the shape of ``x`` with values on the grid of ``fmt``.

    Raises:
        ValueError: ``x`` is not FP32, the mode is unknown, or ``bits`` is missing, superfluous, of
            another shape or dtype.
    """
    _check(x, rounding, bits)
    where = position(x, fmt)
    if rounding == "nearest":
        odd = (where >> FRACTION_BITS) & 1
        where = where + _ALMOST_HALF + odd
    elif rounding == "stochastic":
        assert bits is not None
        where = where + (bits.to(torch.int64) & _WORD)
    code = (where >> FRACTION_BITS).clamp(max=fmt.max_code)
    return restore_special(value_at(code, fmt), x, fmt)


def position(x: Tensor, fmt: Format) -> Tensor:
    """Position of ``|x|`` on the line of codes of ``fmt``, as fixed point with 32 fraction bits.

    Exact but for fraction bits beyond the 32nd, which are cut (they occur only far below the
    smallest subnormal). Values beyond the largest finite one have positions beyond ``max_code``;
    those of infinities and NaN mean nothing.

    Args:
        x: FP32 tensor.

    Returns:
        int64 tensor: ``code << 32 | fraction``.
    """
    magnitude = x.contiguous().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    field = magnitude >> 23
    significand = torch.where(field == 0, magnitude, (magnitude & 0x7FFFFF) | 0x800000)
    exponent = field.clamp(min=1) - 127
    grid_exponent = exponent.clamp(min=fmt.min_exponent)
    # Beyond 62 every bit has left the fraction, and a shift of 64 would not be defined.
    dropped = (23 - fmt.mantissa_bits + grid_exponent - exponent).clamp(max=62)
    steps_below_binade = (grid_exponent - fmt.min_exponent) << (fmt.mantissa_bits + FRACTION_BITS)
    return steps_below_binade + ((significand << FRACTION_BITS) >> dropped)


def value_at(where: Tensor, fmt: Format, fraction_bits: int = 0) -> Tensor:
    """Magnitude at a position with ``fraction_bits`` bits after the point (default: 0, a code).

    Args:
        where: int64 tensor of positions up to ``max_code + 1`` (exclusive).

    Returns:
        FP32 tensor; exact if the position came from an FP32 value or has no fraction.
    """
    code = where >> fraction_bits
    field = code >> fmt.mantissa_bits
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    significand = torch.where(field == 0, mantissa, mantissa | (1 << fmt.mantissa_bits))
    fixed = (significand << fraction_bits) | (where & ((1 << fraction_bits) - 1))
    unit = field.clamp(min=1) - 1 + fmt.min_exponent - fmt.mantissa_bits - fraction_bits
    return (fixed.to(torch.float64) * power_of_two(unit)).to(torch.float32)


def restore_special(magnitude: Tensor, x: Tensor, fmt: Format) -> Tensor:
    """Give a rounded magnitude the sign of ``x``, and NaN and infinities their place."""
    special = x if fmt.has_infinity else torch.full_like(x, torch.nan)
    return torch.where(torch.isfinite(x), torch.copysign(magnitude, x), special)


def _check(x: Tensor, rounding: str, bits: Tensor | None) -> None:
    if x.dtype != torch.float32:
        raise ValueError(f"x has dtype {x.dtype}: round_to takes FP32 values; call x.float() first")
    if rounding not in get_args(Rounding):
        choices = ", ".join(map(repr, get_args(Rounding)))
        raise ValueError(f"rounding={rounding!r} is unknown: use one of {choices}")
    if rounding != "stochastic":
        if bits is not None:
            raise ValueError(f"bits are given but rounding={rounding!r} uses none: leave them out")
        return
    if bits is None:
        raise ValueError("rounding='stochastic' needs bits: see numerics.random_bits.draw")
    check_bits(bits, x)


def check_bits(bits: Tensor, x: Tensor) -> None:
    """Raise ValueError unless ``bits`` are random bits for ``x``."""
    if bits.shape != x.shape:
        raise ValueError(f"bits have shape {tuple(bits.shape)}, x has {tuple(x.shape)}")
    if bits.dtype not in (torch.uint32, torch.int64):
        raise ValueError(f"bits have dtype {bits.dtype}: use torch.uint32, or int64 in [0, 2**32)")

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Scales of blocks in Triton: the arithmetic of numerics/scaling.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton import codec


@triton.constexpr_function
def largest_value(fmt):
    """Largest finite value of a format."""
    return codec.FORMATS[fmt].max


@triton.jit
def ideal(amax, FORMAT: tl.constexpr):
    """Mantissa, as the FP32 pattern of a number in [1, 2), and exponent of what fills a format."""
    # The quotient of a tiny amax would overflow.
    tiny = amax < 5.421010862427522e-20
    whole = tl.where(tiny, amax * 18446744073709551616.0, amax)
    largest = tl.full(amax.shape, largest_value(FORMAT), tl.float32)
    bits = tl.div_rn(largest, whole).to(tl.int32, bitcast=True)
    return (bits & 0x7FFFFF) | 0x3F800000, (bits >> 23) - 127 + tl.where(tiny, 64, 0)


@triton.jit
def group_of(block, across, group_rows, group_columns, groups_across):
    """The group that each block is of."""
    return block // across // group_rows * groups_across + block % across // group_columns


@triton.jit
def mantissa_of(amax, FORMAT: tl.constexpr, SCALING: tl.constexpr):
    """The mantissas of groups of these largest finite magnitudes; 1 of those without any."""
    found = tl.full(amax.shape, 0x3F800000, tl.int32)
    if SCALING != "e8m0":
        some = amax > 0.0
        mantissa, _exponent = ideal(tl.where(some, amax, 1.0), FORMAT)
        found = tl.where(some, mantissa, found)
    return found


@triton.jit
def exponent_of(amax, shared, FORMAT: tl.constexpr):
    """The exponents of blocks, -128 of those that have no scale."""
    counts = (amax > 0.0) & (amax < float("inf"))
    mantissa, exponent = ideal(tl.where(counts, amax, 1.0), FORMAT)
    exponent = tl.minimum(exponent - tl.where(shared > mantissa, 1, 0), 127)
    return tl.where(counts, exponent, -128)


@triton.jit
def join(mantissa, exponent):
    """Scales from the patterns of mantissas, and exponents."""
    fraction = mantissa & 0x7FFFFF
    bits = ((exponent + 127) << 23) | fraction
    # A subnormal number.
    bits = tl.where(exponent == -127, (fraction | 0x800000) >> 1, bits)
    return tl.where(exponent == -128, 0x3F800000, bits).to(tl.float32, bitcast=True)


@triton.jit
def shared_of(
    amax,
    groups,
    block,
    across,
    group_rows,
    group_columns,
    groups_across,
    FORMAT: tl.constexpr,
    SCALING: tl.constexpr,
):
    """The mantissas that blocks share with their groups."""
    of_group = amax
    if SCALING == "gam":
        group = group_of(block, across, group_rows, group_columns, groups_across)
        of_group = tl.load(groups + group).to(tl.float32, bitcast=True)
    elif SCALING == "amax":
        of_group = tl.where(amax < float("inf"), amax, 0.0)
    return mantissa_of(of_group, FORMAT, SCALING)

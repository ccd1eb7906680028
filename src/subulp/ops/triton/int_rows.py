# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rows of integers in Triton, with a scale and a bias: see :mod:`subulp.numerics.int_rows`.

A program has a whole row: ``element`` are its places, ``inside`` says which of them there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.int_rows import PARAMETER_BYTES
from . import codec


@triton.constexpr_function
def parameter_bytes():
    """Bytes of a row's scale and bias, which come before its integers."""
    return PARAMETER_BYTES


@triton.jit
def decode(at, element, inside, BITS: tl.constexpr):
    """The FP32 row that is stored at a pointer to bytes."""
    byte = tl.load(at + parameter_bytes() + element * BITS // 8, mask=inside, other=0)
    q = (byte.to(tl.int32) >> ((element * BITS) % 8)) & ((1 << BITS) - 1)
    x = q.to(tl.float32) * unaligned(at) + unaligned(at + 4)
    return tl.where(inside, x, 0.0)


@triton.jit
def unaligned(at):
    """FP32 number at any byte."""
    byte = tl.arange(0, 4)
    word = tl.sum(tl.load(at + byte).to(tl.uint32) << (byte * 8).to(tl.uint32), axis=0)
    return word.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def decode_each(at, there, element, inside, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """The FP32 rows that are stored at pointers to bytes, (rows, 1), and zeros where there is none.

    ``element`` are places of each row, (1, places). ``ALIGNED``: rows begin at multiples of four.
    """
    if ALIGNED:
        scale = tl.load(at.to(tl.pointer_type(tl.float32)), mask=there, other=0.0)
        bias = tl.load(at.to(tl.pointer_type(tl.float32)) + 1, mask=there, other=0.0)
    else:
        scale = unaligned_each(at, there)
        bias = unaligned_each(at + 4, there)
    per_byte: tl.constexpr = 8 // BITS
    byte = tl.load(at + parameter_bytes() + element // per_byte, mask=there & inside, other=0)
    q = (byte.to(tl.int32) >> ((element % per_byte) * BITS)) & ((1 << BITS) - 1)
    return tl.where(there & inside, q.to(tl.float32) * scale + bias, 0.0)


@triton.jit
def unaligned_each(at, there):
    """FP32 numbers at any bytes, (rows, 1)."""
    byte = tl.arange(0, 4)[None, :]
    part = tl.load(at + byte, mask=there, other=0).to(tl.uint32) << (byte * 8).to(tl.uint32)
    word = tl.sum(part, axis=1, keep_dims=True)
    return word.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def quantise(x, bits, inside, BITS: tl.constexpr, RANDOM: tl.constexpr):
    """Integers, scale and bias of an FP32 row; both are NaN where the row has no finite span.

    ``RANDOM``: rounded by ``bits`` (uint32), instead of to nearest.
    """
    top: tl.constexpr = (1 << BITS) - 1
    magnitude = tl.where(inside, codec.magnitude_of(x), 0)
    bias = tl.min(tl.where(inside, x, float("inf")), axis=0) + 0.0
    span = tl.max(tl.where(inside, x, float("-inf")), axis=0) - bias
    valid = (tl.max(magnitude, axis=0) < 0x7F800000) & (span < float("inf"))
    scale = tl.div_rn(span, top * 1.0)
    used = valid & (scale > 0.0)
    scale = tl.where(used, scale, 0.0)
    t = tl.div_rn(x - bias, tl.where(used, scale, 1.0))
    t = tl.where(inside & used & (t > 0.0), t, 0.0)
    # Adding 1.5 * 2^23 leaves no fraction bits: rounded to nearest even, the integer lowest.
    shifted = t + 12582912.0
    q = (shifted.to(tl.uint32, bitcast=True) - 0x4B400000).to(tl.int32)
    if RANDOM:
        whole = shifted - 12582912.0
        above = whole > t
        below = tl.where(above, whole - 1.0, whole)
        u = (bits >> 8).to(tl.float32) * 5.9604644775390625e-8
        q = q - above.to(tl.int32) + (t - below > u).to(tl.int32)
    q = tl.where(inside, tl.minimum(q, top), 0)
    nan = tl.where(valid, 0, 0x7FC00000).to(tl.uint32)
    scale_bits = tl.where(valid, scale.to(tl.uint32, bitcast=True), nan)
    bias_bits = tl.where(valid, bias.to(tl.uint32, bitcast=True), nan)
    return q, scale_bits.to(tl.float32, bitcast=True), bias_bits.to(tl.float32, bitcast=True)


@triton.jit
def store(at, q, scale, bias, inside, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write what :func:`quantise` gives at a pointer to bytes."""
    per_byte: tl.constexpr = 8 // BITS
    shift = (tl.arange(0, BLOCK) % per_byte) * BITS
    packed = tl.sum(tl.reshape(q << shift, (BLOCK // per_byte, per_byte)), axis=1)
    # A byte exists where its first number does.
    some = tl.max(tl.reshape(inside.to(tl.int32), (BLOCK // per_byte, per_byte)), axis=1) > 0
    byte = tl.arange(0, BLOCK // per_byte)
    tl.store(at + parameter_bytes() + byte, packed.to(tl.uint8), mask=some)
    which = tl.arange(0, 8)
    words = tl.where(which < 4, scale.to(tl.uint32, bitcast=True), bias.to(tl.uint32, bitcast=True))
    word = words >> ((which % 4) * 8).to(tl.uint32)
    tl.store(at + which, (word & 255).to(tl.uint8))

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Random bits in Triton, addressed as in :mod:`subulp.numerics.random_bits`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(counter, key, step, slot):
    """The four Philox words of each counter (int64), uint32."""
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox(key, low, high, zero + step, zero + slot)


@triton.jit
def draw_at(index, key, step, slot, width: tl.constexpr):
    """Bits of scattered elements, see :func:`subulp.numerics.random_bits.draw_at`.

    Args:
        index: int64 tensor, any shape.
        key: uint64 scalar, ``seed | stream << 32``.
        step: uint32 scalar.
        slot: uint32 scalar or constant.
        width: 32, or 16 for bits in the upper half of the word, zeros below.

    Returns:
        uint32 tensor of the shape of ``index``.
    """
    per_counter: tl.constexpr = 128 // width
    w0, w1, w2, w3 = philox(index // per_counter, key, step, slot)
    place = index % per_counter
    word = place * width // 32
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    if width == 16:
        bits = tl.where(place % 2 == 0, bits << 16, bits & 0xFFFF0000)
    return bits


@triton.jit
def of_counters(counter, key, step, width: tl.constexpr):
    """All bits of consecutive counters, in new last dimensions: reshape them into elements."""
    w0, w1, w2, w3 = philox(counter, key, step, 0)
    # Joined along new last dimensions, a word's index is (counter, high bit, low bit).
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    if width == 16:
        words = tl.join(words << 16, words & 0xFFFF0000)
    return words


@triton.jit
def draw(
    first,
    key,
    step,
    width: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
):
    """Bits of the elements ``[first, first + block)`` of a whole tensor.

    Args:
        first: int64 scalar.
        key: uint64 scalar, as for :func:`draw_at`.
        step: uint32 scalar.
        width: 32 or 16.
        aligned: ``first`` is a multiple of 8, so that whole counters serve whole runs of elements.
            Otherwise each element computes its own: the same bits for 4 or 8 times the work.
        block: Number of elements, a power of two.

    Returns:
        uint32 tensor (block,).
    """
    if aligned:
        per_counter: tl.constexpr = 128 // width
        counter = first // per_counter + tl.arange(0, block // per_counter)
        bits = tl.reshape(of_counters(counter, key, step, width), (block,))
    else:
        bits = draw_at(first + tl.arange(0, block), key, step, 0, width)
    return bits


@triton.jit
def swap_halves(bits, width: tl.constexpr):
    """A second set of bits from a first: see :func:`subulp.numerics.random_bits.swap_halves`."""
    if width == 32:
        return (bits << 16) | (bits >> 16)
    # A product: LLVM makes a byte swap of two words of shifts, which sm_100 does not have.
    return ((bits >> 16) * 0x01000100) & 0xFFFF0000

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Random bits in Triton, addressed as in :mod:`subulp.numerics.random_bits`."""

from __future__ import annotations

import triton
import triton.language as tl


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
        key: uint64 scalar, ``seed | stream << 32``.
        step: uint32 scalar.
        width: 32, or 16 for bits in the upper half of the word, zeros below.
        aligned: ``first`` is a multiple of 8, so that whole counters serve whole runs of elements.
            Otherwise each element computes its own: the same bits for 4 or 8 times the work.
        block: Number of elements, a power of two.

    Returns:
        uint32 tensor (block,).
    """
    per_counter: tl.constexpr = 128 // width
    if aligned:
        w0, w1, w2, w3 = _words(
            first // per_counter + tl.arange(0, block // per_counter), key, step
        )
        # Joined along new last dimensions, a word's index is (counter, high bit, low bit).
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        if width == 16:
            words = tl.join(words << 16, words & 0xFFFF0000)
        bits = tl.reshape(words, (block,))
    else:
        index = first + tl.arange(0, block)
        w0, w1, w2, w3 = _words(index // per_counter, key, step)
        place = index % per_counter
        word = place * width // 32
        bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
        if width == 16:
            bits = tl.where(place % 2 == 0, bits << 16, bits & 0xFFFF0000)
    return bits


@triton.jit
def swap_halves(bits, width: tl.constexpr):
    """A second set of bits from a first: see :func:`subulp.numerics.random_bits.swap_halves`."""
    if width == 32:
        swapped = (bits << 16) | (bits >> 16)
    else:
        swapped = ((bits << 8) & 0xFF000000) | ((bits >> 8) & 0x00FF0000)
    return swapped


@triton.jit
def _words(counter, key, step):
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox(key, low, high, zero + step, zero)

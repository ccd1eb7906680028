"""Philox4x32-10 in plain integers (Salmon et al., "Parallel random numbers", SC 2011)."""

from __future__ import annotations

from functools import lru_cache

Words = tuple[int, int, int, int]


@lru_cache(maxsize=4096)
def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds; the key is bumped by the Weyl constants between them."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(x0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(x2 * 0xCD9E8D57, 2**32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0 = (k0 + 0x9E3779B9) % 2**32
        k1 = (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def draw(
    index: int, *, seed: int, stream: int = 0, step: int = 0, slot: int = 0, width: int = 32
) -> int:
    """The bits of one element: its place in the stream of words, or of half-words, low first."""
    block, place = divmod(index, 128 // width)
    words = philox4x32((block % 2**32, block // 2**32, step, slot), (seed, stream))
    if width == 32:
        return words[place]
    word, high = divmod(place, 2)
    return (words[word] >> 16 if high else words[word] % 2**16) << 16

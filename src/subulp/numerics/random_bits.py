"""Random bits as data: Philox4x32-10, addressed by (seed, stream, step, element).

A draw is a pure function of its address. It does not depend on chunking, threads, device or
sharding, and a resumed run draws what an uninterrupted one would have drawn.

Address of element ``i`` (its index in the whole, unsharded tensor):

* key ``(seed, stream)``: one stream per parameter tensor;
* counter ``(block low, block high, step, slot)``: a slot per independent use (the optimizer steps
  use slot 0);
* 32-bit draws: ``block = i // 4``, word ``i % 4``; 16-bit draws: ``block = i // 8``, half-word
  ``i % 8``, low half first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
"""Shifts and factors of :func:`mix`."""
MIX_LAST = 16
"""Its last shift."""


def fold_seed(seed: int) -> int:
    """A 64-bit seed, such as ``torch.initial_seed()``, folded into one word of Philox's key."""
    return (seed ^ (seed >> 32)) & _WORD


def mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3: every bit of the result depends on all bits of ``x``.

    With 32-bit words that wrap::

        h = x ^ x >> 16;  h *= 0x85EBCA6B;  h ^= h >> 13;  h *= 0xC2B2AE35;  h ^= h >> 16

    Args:
        x: int64 tensor; its low 32 bits count.

    Returns:
        int64 tensor of words in ``[0, 2**32)``.
    """
    h = x & _WORD
    for shift, factor in MIX:
        h = ((h ^ (h >> shift)) * factor) & _WORD
    return h ^ (h >> MIX_LAST)


def philox4x32(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 (Salmon et al., SC 2011).

    Args:
        counter: int64 tensor (..., 4) of words in ``[0, 2**32)``.
        key: Two words in ``[0, 2**32)``.

    Returns:
        int64 tensor (..., 4) of words in ``[0, 2**32)``.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap, yet keep the right low 64 bits; the masks cut sign extension.
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        h0, l0 = (p0 >> 32) & _WORD, p0 & _WORD
        h1, l1 = (p1 >> 32) & _WORD, p1 & _WORD
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def draw(
    shape: tuple[int, ...] | torch.Size,
    *,
    seed: int,
    stream: int = 0,
    step: int = 0,
    slot: int = 0,
    offset: int = 0,
    width: int = 32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniform random bits for a run of elements, ready for ``round_to(..., bits=)``.

    Args:
        shape: Shape of the result, filled in row-major order.
        seed: In ``[0, 2**32)``.
        stream: In ``[0, 2**32)``.
        step: In ``[0, 2**32)``.
        slot: In ``[0, 2**32)``.
        offset: Index of the first element in the whole tensor (default: 0).
        width: 32, or 16 for bits in the upper half of the word, zeros below (default: 32).
        device: Where the result lies (default: the CPU).

    Returns:
        int64 tensor of ``shape`` with values in ``[0, 2**32)``.

    Raises:
        ValueError: An argument is out of range.
    """
    for name, value in (("seed", seed), ("stream", stream), ("step", step), ("slot", slot)):
        if not 0 <= value <= _WORD:
            raise ValueError(f"{name}={value} is out of range: it is one 32-bit word of Philox")
    if width not in (16, 32):
        raise ValueError(f"width={width} is not available: draw 16 or 32 bits an element")
    if offset < 0:
        raise ValueError(f"offset={offset} is negative: it counts elements from the tensor's start")
    count = torch.Size(shape).numel()
    per_block = 128 // width
    index = torch.arange(offset, offset + count, dtype=torch.int64, device=device)
    first = offset // per_block
    last = (offset + count - 1) // per_block if count else first
    block = torch.arange(first, last + 1, dtype=torch.int64, device=device)
    counter = torch.stack(
        (block & _WORD, block >> 32, torch.full_like(block, step), torch.full_like(block, slot)), -1
    )
    words = philox4x32(counter, (seed, stream))
    if width == 16:
        words = torch.stack((words & 0xFFFF, words >> 16), dim=-1) << 16
    return words.flatten()[index - first * per_block].view(shape)


def draw_at(
    index: Tensor, *, seed: int, stream: int = 0, step: int = 0, slot: int = 0, width: int = 32
) -> Tensor:
    """The bits of scattered elements, the same as :func:`draw` gives them.

    Args:
        index: int64 tensor of indices in the whole tensor, any shape.
        seed: In ``[0, 2**32)``, as for :func:`draw`.
        stream: In ``[0, 2**32)``.
        step: In ``[0, 2**32)``.
        slot: In ``[0, 2**32)``.
        width: 32 or 16 (default: 32).

    Returns:
        int64 tensor of the shape of ``index``.
    """
    per_block = 128 // width
    block, place = index // per_block, index % per_block
    counter = torch.stack(
        (block & _WORD, block >> 32, torch.full_like(block, step), torch.full_like(block, slot)), -1
    )
    words = philox4x32(counter, (seed, stream))
    word = words.gather(-1, (place * width // 32).unsqueeze(-1)).squeeze(-1)
    if width == 16:
        return torch.where(place % 2 == 0, word & 0xFFFF, word >> 16) << 16
    return word


@dataclass(frozen=True)
class Region:
    """Which elements of a whole tensor a part of it holds, in the part's own order.

    Element ``i`` of the part is element ``offset + i`` of the whole, or, if ``run`` is not 0::

        offset + i % run + j % counts[0] * strides[0] + j // counts[0] % counts[1] * strides[1]
            + j // counts[0] // counts[1] * strides[2]         with j = i // run

    That is any rectangular part of a tensor of four dimensions.

    Attributes:
        offset: The first element.
        run: Elements that follow each other in the whole, too; 0 if all do.
        counts: Runs of the two inner levels.
        strides: From one run to the next of each level, in elements of the whole.
    """

    offset: int = 0
    run: int = 0
    counts: tuple[int, int] = (1, 1)
    strides: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], offset: int) -> Self:
        """The part of a shape that begins at element ``offset`` of a whole.

        Args:
            shape: Shape of the part, its dimensions in the order of its memory.
            strides: From each index of a dimension to the next, in elements of the whole.
            offset: The first element.

        Raises:
            ValueError: More than four dimensions remain where those that follow each other without
                a gap are one.
        """
        levels: list[tuple[int, int]] = []  # from the outermost: count and stride
        for count, stride in zip(shape, strides, strict=True):
            if count == 1:
                continue
            if levels and levels[-1][1] == count * stride:
                levels[-1] = levels[-1][0] * count, stride
            else:
                levels.append((count, stride))
        if 0 in shape or not levels or (len(levels) == 1 and levels[0][1] == 1):
            return cls(offset)
        run = levels.pop()[0] if levels[-1][1] == 1 else 1
        if len(levels) > 3:
            raise ValueError(
                f"a part of shape {tuple(shape)} with strides {tuple(strides)} is scattered over "
                "more than four dimensions of the whole: random bits are counted over four"
            )
        outermost, *inner = levels
        first, second, *_ = (*reversed(inner), (1, 0), (1, 0))
        counts, steps = zip(first, second, strict=True)
        return cls(offset, run, counts, (*steps, outermost[1]))

    @property
    def runs(self) -> tuple[int, int, int, int, int, int]:
        """All numbers but the offset: ``run``, ``counts`` and ``strides``."""
        return (self.run, *self.counts, *self.strides)

    def indices(self, count: int, device: torch.device | None = None) -> Tensor:
        """The elements of the whole that the first ``count`` of the part are, int64."""
        i = torch.arange(count, dtype=torch.int64, device=device)
        if self.run == 0:
            return i + self.offset
        (first, second), (inner, middle, outer) = self.counts, self.strides
        j = i // self.run
        return (
            self.offset
            + i % self.run
            + j % first * inner
            + j // first % second * middle
            + j // first // second * outer
        )


WHOLE = Region()
"""A tensor that is no part of another."""


def draw_part(
    shape: tuple[int, ...] | torch.Size,
    region: Region,
    *,
    seed: int,
    stream: int = 0,
    step: int = 0,
    width: int = 32,
    device: torch.device | None = None,
) -> Tensor:
    """The bits of a part of a tensor, see :func:`draw`; of the whole, they are those elements'."""
    if region.run == 0:
        return draw(
            shape,
            seed=seed,
            stream=stream,
            step=step,
            offset=region.offset,
            width=width,
            device=device,
        )
    index = region.indices(torch.Size(shape).numel(), device)
    return draw_at(index, seed=seed, stream=stream, step=step, width=width).view(shape)


def swap_halves(bits: Tensor, width: int = 32) -> Tensor:
    """The same random bits with the upper and lower half of each number exchanged.

    Two roundings of one step share a draw this way. Each alone sees uniform bits and is exactly
    unbiased; what decides one of them (its leading bits) hardly enters the other, where those bits
    come last and are worth 2**-(width / 2).

    Args:
        bits: int64 tensor as ``draw(..., width=width)`` returns it.
        width: 16 or 32.

    Returns:
        int64 tensor in the same form.
    """
    half = width // 2
    number = bits >> (32 - width)
    swapped = (number << half | number >> half) & ((1 << width) - 1)
    return swapped << (32 - width)


@dataclass(frozen=True)
class RandomAddress:
    """Where in the stream of random bits the elements of a part of a tensor lie.

    Attributes:
        seed: Philox key word.
        stream: Philox key word of the tensor.
        step: Philox counter word.
        offset: Index of the part's first element in the whole tensor.
    """

    seed: int
    stream: int
    step: int
    offset: int

    def after(self, elements: int) -> RandomAddress:
        """The address of what lies ``elements`` further on."""
        return replace(self, offset=self.offset + elements)

    def draw(
        self,
        shape: torch.Size | tuple[int, ...],
        device: torch.device,
        *,
        slot: int = 0,
        width: int = 32,
    ) -> Tensor:
        """The bits of a run of elements, see :func:`draw`."""
        return draw(
            shape,
            seed=self.seed,
            stream=self.stream,
            step=self.step,
            slot=slot,
            offset=self.offset,
            width=width,
            device=device,
        )

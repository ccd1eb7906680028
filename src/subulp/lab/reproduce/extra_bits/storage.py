"""How extra bits lie in memory: groups of 32 numbers in as many words as a number has bits."""

from __future__ import annotations

import torch

from .... import optim
from ....numerics import extra_bits
from ..found import Found, Observation


def packing(widths: list[int], groups: int) -> Found:
    """Words of 32 numbers, and what packing and unpacking them changes.

    Every width is compared with one long integer, in which each number stands after the one before.

    Args:
        widths: Bits of a number.
        groups: Groups of 32 random numbers.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for width in widths:
        tails = torch.randint(1 << width, (groups * extra_bits.GROUP,), generator=generator)
        words = extra_bits.pack(tails, width)
        read = extra_bits.unpack(words, tails.numel(), width)
        case = f"{width} bits"
        found += [
            Observation(case, "words for 32 numbers", words.numel() / groups),
            Observation(case, "numbers changed", int((read != tails).sum())),
            Observation(
                case,
                "words that are not the long integer's",
                _differing(tails.view(groups, -1).tolist(), words.view(groups, -1).tolist(), width),
            ),
        ]
    return Found(tuple(found))


def _differing(tails: list[list[int]], words: list[list[int]], width: int) -> int:
    """Words of groups that another reading of the layout does not have."""
    differing = 0
    for numbers, own in zip(tails, words, strict=True):
        long = sum(number << width * i for i, number in enumerate(numbers))
        expected = [long >> 32 * i & 0xFFFFFFFF for i in range(width)]
        differing += sum(w & 0xFFFFFFFF != e for w, e in zip(own, expected, strict=True))
    return differing


def kept_words(strategies: list[str], elements: int) -> Found:
    """int32 words that an optimizer keeps for the extra bits of 32 parameters.

    Args:
        strategies: Of SGD, with extra bits.
        elements: FP16 parameters, a multiple of 32.
    """
    found = []
    for strategy in strategies:
        p = torch.nn.Parameter(torch.ones(elements, dtype=torch.float16))
        optimizer = optim.SGD([p], lr=0.1, precision=strategy)
        p.grad = torch.ones_like(p)
        optimizer.step()
        words = [t for t in optimizer.state[p].values() if getattr(t, "dtype", 0) == torch.int32]
        count = sum(t.numel() for t in words if t.numel() > 1)
        found.append(Observation(strategy, "words for 32 numbers", 32 * count / elements))
    return Found(tuple(found))

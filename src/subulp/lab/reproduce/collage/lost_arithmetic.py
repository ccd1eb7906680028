"""Collage's remark on lost arithmetic: additions of at most half an ulp, all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ....numerics import expansion as mcf
from ....numerics.formats import BF16
from ..found import Found, Observation
from .rational_adamw import bf16, fractions

CHANGED = "share of the sums that are not a"
WRONG = "sums that are not the nearest number"

# Of b below half an ulp of a, or half of it; from a power of two it leads toward zero.
BELOW = "below, away from zero"
INSIDE = "below, toward zero"
EDGE = "below, from a power of two"
EVEN = "half, the last bit is 0"
ODD = "half, the last bit is 1"
EDGE_HALF = "half, from a power of two"


def additions(compared: int) -> Found:
    """Sums ``a + b`` in BF16 with ``|b| <= ulp(a) / 2``.

    Of ``a`` from 1 to 2 with every such ``b``; other binades scale. Of every other positive ``a``,
    subnormal ones as well, with half an ulp, a quarter, and the number below half an ulp.

    Args:
        compared: Sums, drawn from all, that are compared with rationals.
    """
    a, b = map(torch.cat, zip(_of_one_binade(), _of_all_binades(), strict=True))
    sums = mcf.add(a, b, BF16)
    half = b.abs() == _ulp(a) / 2
    power = (_codes(a) & 0x7F) == 0
    odd = (_codes(a) & 1) == 1
    # A power of two has closer numbers below; what is added to it there is no tie of half an ulp.
    edge = power & (b < 0) & (_codes(a) >= 0x100)
    cases = {
        BELOW: ~half & (b > 0),
        INSIDE: ~half & (b < 0) & ~edge,
        EDGE: ~half & edge,
        EVEN: half & ~odd & ~edge,
        ODD: half & odd,
        EDGE_HALF: half & edge,
    }
    assert bool(torch.stack(list(cases.values())).sum(0).eq(1).all())
    found = [
        observation
        for case, chosen in cases.items()
        for observation in (
            Observation(case, "sums", int(chosen.sum())),
            Observation(case, CHANGED, float((sums != a)[chosen].double().mean())),
        )
    ]
    drawn = torch.randperm(len(a), generator=torch.Generator().manual_seed(0))[:compared]
    rows = zip(*(fractions(t[drawn]) for t in (a, b, sums)), strict=True)
    wrong = sum(bf16(x + y) != total for x, y, total in rows)
    found.append(Observation("drawn", WRONG, wrong))
    return Found((*found, *_example()))


def _example() -> tuple[Observation, ...]:
    """The paper's: 200 and 0.1."""
    number, added = torch.tensor([200.0]), torch.tensor([0.1]).bfloat16().float()
    return (
        Observation("0.1", "in BF16", float(added)),
        Observation("200", "ulp", float(_ulp(number))),
        Observation("200 + 0.1", "in BF16", float(mcf.add(number, added, BF16))),
    )


def _of_one_binade() -> tuple[Tensor, Tensor]:
    """Every pair of a number from 1 to 2 and one of at most half its ulp, zero left out."""
    a = _values(torch.arange(0x3F80, 0x4000))
    b = _values(torch.arange(1, 0x7F80))
    b = b[b <= 2.0**-8]
    b = torch.cat([b, -b])
    return a.repeat_interleave(len(b)), b.repeat(len(a))


def _of_all_binades() -> tuple[Tensor, Tensor]:
    """Every other positive number that has a half of its ulp, and numbers up to that half."""
    # The largest number has no next one.
    a = _values(torch.arange(1, 0x7F7F))
    a = a[(a < 1) | (a >= 2)]
    half = _ulp(a) / 2
    # Half an ulp below 2^-125 is no BF16 number.
    a, half = (t[half >= 2.0**-133] for t in (a, half))
    below = _values(_codes(half) - 1)
    added = [half, below, half / 2]
    chosen = [b for b in added for b in (b, -b)]
    pairs = [(a[b != 0], b[b != 0]) for b in chosen]
    # A quarter may be none either; what is rounded to another number is left out.
    pairs = [(x[b == b.bfloat16()], b[b == b.bfloat16()]) for x, b in pairs]
    a, b = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return a, b


def _ulp(x: Tensor) -> Tensor:
    """Definition 3.1: the distance from a positive number to the next one."""
    return (_values(_codes(x) + 1).double() - x.double()).float()


def _codes(x: Tensor) -> Tensor:
    return x.bfloat16().view(torch.int16).to(torch.int64)


def _values(codes: Tensor) -> Tensor:
    return codes.to(torch.int16).view(torch.bfloat16).float()

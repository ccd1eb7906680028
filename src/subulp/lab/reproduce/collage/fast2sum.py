"""Collage's Theorem 4.1 over all significands: Fast2Sum's error, and how large it becomes."""

from __future__ import annotations

import torch
from torch import Tensor

from ....numerics import expansion as mcf
from ....numerics.formats import BF16
from ..found import Found, Observation

INEXACT = "pairs whose components do not add up"
WRONG = "first components that are not the nearest number"
ABOVE = "errors above half an ulp"
REACHED = "errors of half an ulp or more"

ORDERED, REVERSED = "|a| >= |b|", "|a| <= |b|"
_BITS = BF16.precision


def pairs(binades: int) -> Found:
    """Fast2Sum of every significand with every other one, of both signs.

    The larger operand is from 1 to 2; others scale.

    Args:
        binades: Of the smaller operand, from that of the larger one down.
    """
    found = []
    for case, ordered in ((ORDERED, True), (REVERSED, False)):
        large, small = _operands(binades)
        a, b = (large, small) if ordered else (small, large)
        x, y = mcf.fast2sum(a.float(), b.float(), BF16)
        # Sums of so many binades have fewer bits than FP64.
        exact = _whole(a, binades) + _whole(b, binades)
        first, second = _whole(x.double(), binades), _whole(y.double(), binades)
        nearest, unit = _rounded(exact)
        found += [
            Observation(case, "pairs", len(a)),
            Observation(case, INEXACT, int((first + second != exact).sum())),
            Observation(case, WRONG, int((first != nearest).sum())),
            Observation(case, ABOVE, int((2 * second.abs() > unit).sum())),
            Observation(case, REACHED, int((2 * second.abs() >= unit).sum())),
        ]
    return Found(tuple(found))


def _operands(binades: int) -> tuple[Tensor, Tensor]:
    """Larger and smaller numbers, all pairs, FP64."""
    significands = 1 + torch.arange(2 ** (_BITS - 1), dtype=torch.float64) / 2 ** (_BITS - 1)
    scales = torch.exp2(-torch.arange(binades, dtype=torch.float64))
    small = (significands[:, None] * scales).flatten()
    small = torch.cat([small, -small])
    a, b = (t.flatten() for t in torch.meshgrid(significands, small, indexing="ij"))
    ordered = a >= b.abs()
    return a[ordered], b[ordered]


def _whole(x: Tensor, binades: int) -> Tensor:
    """Numbers in units of the last bit of all operands, int64."""
    units = x * 2.0 ** (binades + _BITS)
    assert bool((units == units.round()).all())
    return units.to(torch.int64)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers rounded to the significand's bits, of two the even one, and the result's ulp."""
    magnitude = x.abs()
    length = torch.frexp(magnitude.double()).exponent.to(torch.int64)
    drop = (length - _BITS).clamp(min=0)
    kept = magnitude >> drop
    rest = magnitude - (kept << drop)
    half = torch.where(drop > 0, torch.ones_like(x) << (drop - 1).clamp(min=0), 1)
    up = (rest > half) | ((rest == half) & (kept % 2 == 1) & (drop > 0))
    kept = kept + (up & (drop > 0)).to(torch.int64)
    # A carry doubles the ulp.
    carried = kept >> _BITS > 0
    unit = torch.ones_like(x) << (drop + carried.to(torch.int64))
    return torch.sign(x) * (kept << drop), unit

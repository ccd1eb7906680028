"""Collage's equations 2 and 3 from the numbers that a step finds and leaves, in rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from .... import diagnostics, optim
from ..found import Found, Observation
from .rational_adamw import fractions

ERROR = "relative error of the descent quality"
SHARE = "descent quality over the update's norm"
LOST = "lost elements more or fewer"


def steps(strategies: list[str], elements: int, steps: int, seeds: list[int]) -> Found:
    """What ``diagnostics.watch`` measures of steps of SGD, against equation 3.

    Updates are gradients of BF16 times a power of two, so that the intended one is a rational.

    Args:
        strategies: Of SGD.
        elements: Parameters, of some binades.
        steps: Steps with gradients of some binades.
        seeds: Of the numbers.
    """
    found = []
    for strategy in strategies:
        for seed in seeds:
            error, share, lost = _run(strategy, elements, steps, seed)
            found += [
                Observation(strategy, ERROR, error, seed),
                Observation(strategy, SHARE, share, seed),
                Observation(strategy, LOST, lost, seed),
            ]
    return Found(tuple(found))


_RATE = 2.0**-9


def _run(strategy: str, elements: int, steps: int, seed: int) -> tuple[float, float, int]:
    """The largest relative error over the steps, the mean share, and elements that are counted
    otherwise.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> Tensor:
        exponents = torch.randint(low, high + 1, (elements,), generator=generator)
        normal = torch.randn(elements, generator=generator)
        return torch.ldexp(normal, exponents).to(torch.bfloat16)

    wide = strategy == "fp32"
    p = torch.nn.Parameter(draw(-4, 0).float() if wide else draw(-4, 0))
    optimizer = optim.SGD([p], lr=_RATE, precision=strategy)
    worst, shares, differing = 0.0, [], 0
    for _ in range(steps):
        gradient = draw(-6, 0)
        p.grad = gradient.float() if wide else gradient
        before = _stored(optimizer, p)
        with diagnostics.watch(optimizer) as watch:
            optimizer.step()
        assert watch.total is not None
        after = _stored(optimizer, p)
        intended = [-Fraction(_RATE) * g for g in fractions(gradient)]
        moved = [b - a for a, b in zip(before, after, strict=True)]
        square = sum(u * u for u in intended)
        # Their quotient is exact but for one root and one division in FP64.
        norm = math.sqrt(square)
        quality = float(sum(u * m for u, m in zip(intended, moved, strict=True))) / norm
        worst = max(worst, abs(watch.effective_descent_quality / quality - 1))
        shares.append(watch.effective_descent_quality / norm)
        moves = [m for u, m in zip(intended, moved, strict=True) if u]
        lost = sum(not m for m in moves)
        differing += abs(round(watch.lost_arithmetic * len(moves)) - lost)
    return worst, math.fsum(shares) / len(shares), differing


def _stored(optimizer: optim.SGD, p: Tensor) -> list[Fraction]:
    """What the components of a parameter stand for."""
    low = optimizer.state[p].get("parameter_low") if optimizer.state[p] else None
    numbers = list(fractions(p.detach()))
    if low is None:
        return numbers
    return [a + b for a, b in zip(numbers, fractions(low), strict=True)]

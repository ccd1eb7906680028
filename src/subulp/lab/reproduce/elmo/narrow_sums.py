"""Sums of many small numbers in a narrow format, and the rounding that keeps them."""

from __future__ import annotations

import torch

from .... import optim
from ....numerics import BF16, E4M3, E5M2
from ....numerics.rounding import round_to
from ..found import Found, Observation


def unbiased(count: int) -> Found:
    """Stochastic rounding of numbers between two neighbours, with all random bits that there are.

    Args:
        count: Numbers of each format.
    """
    found = []
    generator = torch.Generator().manual_seed(0)
    for fmt in (BF16, E4M3, E5M2):
        dropped = 23 - fmt.mantissa_bits
        # A pattern for each value of the dropped bits; whatever is below them adds nothing.
        patterns = torch.arange(1 << dropped, dtype=torch.int64) << (32 - dropped)
        worst, strangers = 0.0, 0
        for value in 1 + torch.rand(count, generator=generator):
            rounded = round_to(value.expand(len(patterns)), fmt, "stochastic", bits=patterns)
            mean = rounded.double().mean()
            worst = max(worst, abs(float(mean - value.double())))
            ulp = 2.0**-fmt.mantissa_bits
            strangers += int(((rounded - value).abs() >= ulp).sum())
        found.append(Observation(fmt.name, "error of the mean over all random bits", worst))
        found.append(Observation(fmt.name, "results that are no neighbour", strangers))
    return Found(tuple(found))


def sums(steps: int, addend: float, precisions: list[str]) -> Found:
    """How much of a sum is lost that BF16 parameters make, one small update after the other.

    Args:
        steps: Updates.
        addend: Each of them; the parameters begin at 1.
        precisions: Strategies of SGD.
    """
    found = []
    for precision in precisions:
        parameter = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = optim.SGD([parameter], lr=1.0, precision=precision, seed=0)
        parameter.grad = torch.full_like(parameter, -addend)
        added = float(-parameter.grad[0]) * steps
        for _ in range(steps):
            optimizer.step()
        kept = float(parameter.detach().double().mean()) - 1
        found.append(Observation(precision, "share of the sum that is lost", 1 - kept / added))
    return Found(tuple(found))

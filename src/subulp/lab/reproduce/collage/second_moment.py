"""Collage, section 4.2: what BF16 makes of β2, and of the second moment with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .... import optim
from ....numerics import expansion as mcf
from ....numerics.formats import BF16
from ..found import Found, Observation

ROUNDED = "β2 in BF16"
FELL = "share of the second moments that fell"
BESIDE = "second moment over the exact one"
UPDATE = "update over that of the exact moment"


def decays(betas: list[float]) -> Found:
    """Decays as one BF16 number, and as two.

    Args:
        betas: Decays.
    """
    wide = torch.tensor(betas, dtype=torch.float64)
    first, second = mcf.encode(wide, BF16)
    off = (first.double() + second.double() - wide).abs() / wide
    found = []
    for beta, one, error in zip(betas, first.tolist(), off.tolist(), strict=True):
        case = f"β2 {beta:.10g}"
        found.append(Observation(case, ROUNDED, one))
        found.append(Observation(case, "relative error of two components", error))
    return Found(tuple(found))


def moments(
    strategies: list[str], betas: list[float], elements: int, steps: int, seeds: list[int]
) -> Found:
    """Second moments of AdamW in strict arithmetic, when gradients become 16 times as small.

    Beside them the recurrence in FP64. The first half of the steps has large gradients.

    Args:
        strategies: Of AdamW.
        betas: Decays of the second moment.
        elements: Parameters.
        steps: Steps.
        seeds: Of the gradients.
    """
    found = []
    for strategy in strategies:
        for beta in betas:
            case = f"{strategy}, β2 {beta:g}"
            for seed in seeds:
                fell, beside, update = _run(strategy, beta, elements, steps, seed)
                found += [
                    Observation(case, FELL, fell, seed),
                    Observation(case, BESIDE, beside, seed),
                    Observation(case, UPDATE, update, seed),
                ]
    return Found(tuple(found))


def _run(
    strategy: str, beta: float, elements: int, steps: int, seed: int
) -> tuple[float, float, float]:
    """Share that fell from the change of the gradients on, and, at the end, the moments and the
    updates that follow from them over exact ones, in the geometric mean.
    """
    generator = torch.Generator().manual_seed(seed)
    p = torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16))
    optimizer = optim.AdamW(
        [p], lr=2.0**-10, betas=(0.9, beta), precision=strategy, arithmetic="strict"
    )
    exact = torch.zeros(elements, dtype=torch.float64)
    middle = exact
    for step in range(steps):
        size = 1.0 if step < steps // 2 else 2.0**-4
        # Of one size, so that the moment has reached theirs when they change.
        signs = 1 - 2 * torch.randint(2, (elements,), generator=generator)
        magnitude = 1 + torch.rand(elements, generator=generator) / 4
        p.grad = (signs * magnitude * size).to(torch.bfloat16)
        exact = beta * exact + (1 - beta) * p.grad.double().square()
        optimizer.step()
        if step == steps // 2 - 1:
            middle = _second(optimizer, p)
    end = _second(optimizer, p)
    ratio = (end / exact).log().mean().exp()
    return float((end < middle).double().mean()), float(ratio), 1 / math.sqrt(float(ratio))


def _second(optimizer: optim.AdamW, p: Tensor) -> Tensor:
    """The second moment, of both components where there are two."""
    kept = optimizer.state[p]
    low = kept.get("exp_avg_sq_low")
    value: Tensor = kept["exp_avg_sq"].double()
    return value if low is None else value + low.double()

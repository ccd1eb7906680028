"""Parameters move as far as with master weights, whatever the scale of their gradients."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from subulp import optim

from .support import BF16, E4M3, FP16

STEPS, COUNT = 400, 256
SCALES = (1e-7, 1e-5, 3e-3, 1.0, 1e3)
# What is stored loses nothing but rounding errors that cancel.
KEEPING = ("collage-plus", "stochastic", "fp32-states", "master", "extra-bits-8", "extra-bits-13")
CASES = [
    (dtype, precision)
    for dtype in (BF16, FP16)
    for precision in KEEPING
    # The weight itself is rounded to nearest.
    if precision != "fp32-states"
] + [(E4M3, "collage-plus")]


@cache
def movements(dtype: torch.dtype, precision: str, noise: float, make: type) -> list[float]:
    """Mean movements of weights of one in ``STEPS`` steps, one for each mean of the gradients."""
    generator = torch.Generator().manual_seed(5)
    weights = [nn.Parameter(torch.ones(COUNT, dtype=dtype)) for _ in SCALES]
    for p in weights:
        p.grad_dtype = torch.float32
    if make is optim.SGD:
        groups = [{"params": [p], "lr": 1e-4 / x} for p, x in zip(weights, SCALES, strict=True)]
        optimizer = optim.SGD(groups, momentum=0.9, precision=precision, seed=1)
    else:
        optimizer = make(weights, lr=1e-3, weight_decay=0.0, precision=precision, seed=1)
    for _ in range(STEPS):
        factors = 1 + noise * torch.randn(COUNT, generator=generator)
        for p, scale in zip(weights, SCALES, strict=True):
            p.grad = scale * factors
        optimizer.step()
    return [(1 - optimizer.wide_value(p)).mean().item() for p in weights]


@pytest.mark.parametrize("noise", [0.0, 1.0], ids=["constant", "noisy"])
@pytest.mark.parametrize(("dtype", "precision"), CASES)
@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD])
def test_total_movement(make: type, dtype: torch.dtype, precision: str, noise: float) -> None:
    expected = movements(torch.float32, "fp32", noise, make)
    found = movements(dtype, precision, noise, make)
    assert found == pytest.approx(expected, rel=0.05 if dtype == E4M3 else 0.02)


def test_gradients_that_fp16_holds_itself() -> None:
    """Gradients of the parameter's dtype, down to its smallest numbers: their squares underflow."""
    p = nn.Parameter(torch.ones(COUNT, dtype=FP16))
    optimizer = optim.AdamW([p], lr=1e-3, weight_decay=0.0)
    for _ in range(STEPS):
        p.grad = torch.full_like(p, 2.0**-24)
        optimizer.step()
    # Adam divides by eps = 1e-8 too: 2**-24 / (2**-24 + 1e-8).
    assert (1 - optimizer.wide_value(p)).mean().item() == pytest.approx(0.4 * 0.856, rel=0.02)

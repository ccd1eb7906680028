"""FP32 and FP32 master weights follow torch.optim over a thousand steps."""

from __future__ import annotations

import pytest
import torch

from subulp import optim

from .support import BF16, same_bits

STEPS = 1000
TOLERANCE = 1e-6
ADAMW = (optim.AdamW, torch.optim.AdamW)
ADAM = (optim.Adam, torch.optim.Adam)
SGD = (optim.SGD, torch.optim.SGD)
VARIANTS = {
    "adamw": (*ADAMW, {"weight_decay": 0.0}),
    "adamw-maximize": (*ADAMW, {"weight_decay": 0.0, "maximize": True}),
    "adam-l2": (*ADAM, {"weight_decay": 0.01, "betas": (0.8, 0.99), "eps": 1e-6}),
    "sgd-l2": (*SGD, {"weight_decay": 0.01}),
    "sgd-momentum": (*SGD, {"momentum": 0.9}),
    "sgd-nesterov": (*SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd-dampening": (*SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
}


def run_all(ours: type, theirs: type, options: dict, widths: tuple[torch.dtype, ...]) -> tuple:
    """Our FP32 and master runs and torch's in each width, on the same BF16 gradients."""
    torch.manual_seed(0)
    start = torch.randn(200).to(BF16)
    options = {"lr": 1e-3} | options
    wide = torch.nn.Parameter(start.float())
    narrow = torch.nn.Parameter(start.clone())
    wide_run = ours([wide], precision="fp32", **options)
    narrow_run = ours([narrow], precision="master", **options)
    expected = [torch.nn.Parameter(start.to(width)) for width in widths]
    torch_runs = [theirs([p], foreach=False, **options) for p in expected]
    gradients = torch.randn(STEPS, 200).to(BF16)
    for t in range(STEPS):
        narrow.grad, wide.grad = gradients[t], gradients[t].float()
        narrow_run.step()
        wide_run.step()
        for p, run in zip(expected, torch_runs, strict=True):
            p.grad = gradients[t].to(p.dtype)
            run.step()
        if t % 100 == 99:
            master = narrow_run.state[narrow]["master"]
            assert same_bits(master, wide.detach()), f"step {t + 1}"
            assert same_bits(narrow.detach(), master.to(BF16)), f"step {t + 1}"
    moved = (wide.detach() - start.float()).abs().max()
    assert moved > 1e-2
    return wide.detach(), *(p.detach() for p in expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_within_rounding(variant):
    ours, expected = run_all(*VARIANTS[variant], widths=(torch.float32,))
    assert (ours - expected).abs().max() <= TOLERANCE


def test_decoupled_decay_no_worse_than_torch():
    """torch rounds ``1 - lr * weight_decay`` to FP32 and drifts; the bound is three-way."""
    options = {"weight_decay": 0.1}
    ours, theirs, exact = run_all(*ADAMW, options, widths=(torch.float32, torch.float64))
    error = (ours.double() - exact).abs().max()
    assert error <= (theirs.double() - exact).abs().max() + TOLERANCE

"""Updates below half an ulp arrive: tiny weights, tiny decay, and strict arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from subulp import optim
from tests.oracles import expansion
from tests.oracles.arithmetic import Strict
from tests.oracles.grid import Grid
from tests.oracles.rounding import round_float

from .support import BF16, same_bits

EXPANSIONS = ("collage-light", "collage-plus")
GRIDS = {BF16: Grid(8, 7)}


# --------------------------------------------------------------------------- weights near zero


@pytest.mark.parametrize("arithmetic", ["wide", "strict"])
@pytest.mark.parametrize("precision", EXPANSIONS)
def test_update_larger_than_the_weight(precision, arithmetic):
    """Fast2Sum needs the larger operand first, and loses these weights' low bits otherwise."""
    generator = torch.Generator().manual_seed(0)
    weights = (1e-3 * torch.randn(500, generator=generator)).to(BF16)
    updates = torch.randn(500, generator=generator).to(BF16)
    p = nn.Parameter(weights.clone())
    opt = optim.SGD([p], lr=0.125, precision=precision, arithmetic=arithmetic)
    p.grad = updates
    opt.step()
    exact = weights.double() - 0.125 * updates.double()
    # Two components have 17 bits together.
    assert ((opt.wide_value(p) - exact) / exact).abs().max() <= 2.0**-17

    # The paper's Grow as printed would not have reached this.
    f = Strict(GRIDS[BF16])
    ordered = [
        sum(expansion.grow(f, w, 0.0, -0.125 * u))
        for w, u in zip(weights.tolist(), updates.tolist(), strict=True)
    ]
    assert ((torch.tensor(ordered) - exact) / exact).abs().max() > 2.0**-12


@pytest.mark.parametrize("arithmetic", ["wide", "strict"])
@pytest.mark.parametrize("precision", EXPANSIONS)
def test_zero_initialised_weights_follow_fp32(precision, arithmetic):
    steps, lr = 200, 2.0**-7
    generator = torch.Generator().manual_seed(1)
    narrow, wide = nn.Parameter(torch.zeros(300, dtype=BF16)), nn.Parameter(torch.zeros(300))
    opt = optim.SGD([narrow], lr=lr, precision=precision, arithmetic=arithmetic)
    expected = optim.SGD([wide], lr=lr, precision="fp32")
    for _ in range(steps):
        narrow.grad = torch.randn(300, generator=generator).to(BF16)
        wide.grad = narrow.grad.float()
        opt.step()
        expected.step()
    # Weights stay below 1/2, where one rounding of the second component errs by 2**-19 at most.
    assert wide.abs().max() < 0.5
    assert (opt.wide_value(narrow) - wide).abs().max() <= steps * 2.0**-19
    assert wide.abs().mean() > 100 * steps * 2.0**-19


# ----------------------------------------------------------------------------- weight decay alone

DECAY_STEPS, LR, DECAY = 500, 1e-3, 1e-2
# How far one step may round the wide value of a weight in [1, 2): half an ulp of the second
# component, or all of the last extra bit, cut.
STEP_ERROR = {
    "kahan": 2.0**-17,
    "collage-light": 2.0**-17,
    "collage-plus": 2.0**-17,
    "master": 2.0**-24,
    "extra-bits-12": 2.0**-19,
    "extra-bits-12-deterministic": 2.0**-20,
    "extra-bits-12-truncate": 2.0**-19,
    "extra-bits-16": 2.0**-24,
}


def decayed(precision: str, dtype: torch.dtype, count: int = 4096) -> torch.Tensor:
    """What zero gradients and decoupled decay of 1e-5 a step take off weights in [1, 2)."""
    start = (1 + torch.arange(count) % 128 / 128).to(dtype)
    p = nn.Parameter(start.clone())
    opt = optim.AdamW([p], lr=LR, weight_decay=DECAY, precision=precision, seed=2)
    p.grad = torch.zeros_like(p)
    for _ in range(DECAY_STEPS):
        opt.step()
    return start.float() - opt.wide_value(p)


def decayed_in_fp32() -> torch.Tensor:
    return decayed("fp32", torch.float32)


def test_decay_in_fp32_is_what_it_should_be():
    start = 1 + torch.arange(4096) % 128 / 128
    expected = start.double() * (1 - (1 - LR * DECAY) ** DECAY_STEPS)
    assert (decayed_in_fp32() - expected).abs().max() <= DECAY_STEPS * 2.0**-24


def test_nearest_loses_all_decay():
    assert decayed("nearest", BF16).eq(0).all()
    assert decayed("fp32-states", BF16).eq(0).all()


@pytest.mark.parametrize("precision", STEP_ERROR)
def test_decay_is_kept(precision):
    """The bound is below what decay takes off, so a lost update would break it."""
    expected = decayed_in_fp32()
    bound = DECAY_STEPS * STEP_ERROR[precision]
    assert (decayed(precision, BF16) - expected).abs().max() <= bound < expected.min()


@pytest.mark.parametrize("precision", ["stochastic", "extra-bits-8", "extra-bits-8-stochastic"])
def test_decay_is_kept_in_the_mean(precision):
    """Unbiased: each element errs by an ulp at times, 4096 of them together hardly."""
    lost = decayed(precision, BF16) - decayed_in_fp32()
    ulp = 2.0**-7 if precision == "stochastic" else 2.0**-15
    # A step of d rounded to multiples of an ulp has variance d * ulp at most.
    deviation = math.sqrt(DECAY_STEPS * 2 * LR * DECAY * ulp / lost.numel())
    assert lost.mean().abs() <= 4 * deviation
    assert deviation < 0.02 * decayed_in_fp32().mean()


# ------------------------------------------------------------------------------ Algorithm 2 by hand


def hand_computed(start, gradients, precision, grid, *, lr, betas, eps, decay):
    """Collage, Algorithm 2, one weight, every operation of lines 8 to 13 rounded.

    Two departures. The bias of the second moment leaves its root, not itself, where it cannot
    underflow, and eps is added to the root, as AdamW has it. Grow begins with TwoSum.
    """
    f = Strict(grid)

    def c(x):
        return round_float(x, grid)

    beta1, beta2 = betas
    theta, low, m, v, v_low = start, 0.0, 0.0, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        m = f.add(f.mult(c(beta1), m), f.mult(c(1 - beta1), g))
        square = f.mult(c(1 - beta2), f.mult(g, g))
        if precision == "collage-plus":
            v, v_low = expansion.mul(f, *expansion.encode(f, beta2), v, v_low)
            v, v_low = expansion.grow(f, v, v_low, square, ordered=False)
        else:
            v = f.add(f.mult(c(beta2), v), square)
        m_hat = f.div(m, c(1 - beta1**t))
        root = f.div(f.sqrt(v), c(math.sqrt(1 - beta2**t)))
        update = f.div(m_hat, f.add(root, c(eps)))
        update = f.add(update, f.mult(c(decay), theta))
        update = f.mult(c(-lr), update)
        if precision == "nearest":
            theta = f.add(theta, update)
        else:
            theta, low = expansion.grow(f, theta, low, update, ordered=False)
    return theta, low, m, v, v_low


@pytest.mark.parametrize("precision", ["nearest", *EXPANSIONS])
def test_algorithm_2(precision):
    dtype = BF16
    steps, count = 4, 24
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6}
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(count, generator=generator).to(dtype)
    start[:3] = 0.0
    gradients = torch.randn(steps, count, generator=generator).to(dtype)
    p = nn.Parameter(start.clone())
    opt = optim.AdamW([p], weight_decay=0.125, precision=precision, arithmetic="strict", **options)
    for g in gradients:
        p.grad = g
        opt.step()
    names = ["parameter_low", "exp_avg", "exp_avg_sq", "exp_avg_sq_low"]
    found = [p.detach(), *(opt.state[p].get(name, torch.zeros_like(p)) for name in names)]
    expected = [
        hand_computed(w, g, precision, GRIDS[dtype], decay=0.125, **options)
        for w, g in zip(start.tolist(), gradients.T.tolist(), strict=True)
    ]
    for i, name in enumerate(["parameter", *names]):
        want = torch.tensor([row[i] for row in expected]).to(dtype)
        assert same_bits(found[i], want), name


# ----------------------------------------------------------------------------- wide against strict


@pytest.mark.parametrize(
    ("precision", "beta2"), [("kahan", 0.95), ("collage-light", 0.999), ("collage-plus", 0.999)]
)
def test_wide_is_better_than_strict(precision, beta2):
    """A noisy quadratic, 150 steps; both against AdamW in FP64 on the same BF16 gradients.

    Without noise a BF16 second moment stops short of gradients that shrink slowly, and the extra
    roundings of strict arithmetic can shake it loose. Gradients along own iterates would compare
    limit cycles: a BF16 weight near its target jumps around it, whatever the arithmetic.
    """
    generator = torch.Generator().manual_seed(6)
    start = torch.randn(400, generator=generator).to(BF16)
    target, curvature = torch.randn(2, 400, generator=generator).double()
    curvature = 2.0**curvature
    options = {"lr": 3e-3, "betas": (0.9, beta2), "weight_decay": 0.1}

    exact = nn.Parameter(start.double())
    reference = torch.optim.AdamW([exact], **options)
    runs = {}
    for arithmetic in ("wide", "strict"):
        p = nn.Parameter(start.clone())
        opt = optim.AdamW([p], precision=precision, arithmetic=arithmetic, **options)
        runs[arithmetic] = (p, opt)
    for _ in range(150):
        noise = 0.5 * torch.randn(400, generator=generator)
        gradient = (curvature * (exact.detach() - target) + noise).to(BF16)
        exact.grad = gradient.double()
        reference.step()
        for p, opt in runs.values():
            p.grad = gradient
            opt.step()
    wide, strict = ((opt.wide_value(p) - exact).norm() for p, opt in runs.values())
    assert wide <= strict / 2

"""Accumulation into Adam's moments: what it is, exactly, and how far from the sum's moments."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subulp import diagnostics, optim
from subulp.ops.strategy import parse_strategy
from subulp.optim.backward.handle import WAITING_BYTES

from ..support import BF16, E4M3, FP16, PRECISIONS, same_bits
from .twins import MAKERS, assert_same, batches, loss_of, twins

BETA1, BETA2, LR, EPS = 0.9, 0.95, 0.01, 1e-8


def module_of(value: Tensor) -> nn.Module:
    module = nn.Module()
    module.p = nn.Parameter(value.clone())
    return module


def micro_gradients(shape: Sequence[int], steps: int, passes: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(shape, generator=generator) for _ in range(passes)] for _ in range(steps)]


def train(module: nn.Module, optimizer: Any, gradients: list[list[Tensor]], **options: Any) -> None:
    with optim.fuse_backward(
        module, optimizer, accumulate=len(gradients[0]), accumulate_in="adam-moments", **options
    ):
        for of_step in gradients:
            for g in of_step:
                # The gradient of this product is g.
                (module.p * g.to(module.p.dtype)).sum().backward()


def oracle(
    p: Tensor, gradients: list[list[Tensor]], *, decay: float, decoupled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Decay once a step, every gradient and every square into the moments, one update: in FP64."""
    p = p.double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, of_step in enumerate(gradients, start=1):
        m, v = m * BETA1, v * BETA2
        parts = [g.double() for g in of_step]
        if not decoupled:
            parts[-1] = parts[-1] + decay * p
        for g in parts:
            m, v = m + (1 - BETA1) * g, v + (1 - BETA2) * g.square()
        update = (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + EPS)
        if decoupled:
            update = update + decay * p
        p = p - LR * update
    return p, m, v


@pytest.mark.parametrize("passes", [1, 2, 5])
@pytest.mark.parametrize("make", [optim.AdamW, optim.Adam])
def test_against_its_definition(make: type[optim.Adam], passes: int) -> None:
    initial = torch.randn(50, generator=torch.Generator().manual_seed(1))
    module, gradients = module_of(initial), micro_gradients((50,), 4, passes)
    optimizer = make(module.parameters(), LR, (BETA1, BETA2), EPS, weight_decay=0.1)
    train(module, optimizer, gradients)
    decoupled = make is optim.AdamW
    expected = oracle(initial, gradients, decay=0.1, decoupled=decoupled)
    state = optimizer.state[module.p]
    for got, want in zip((module.p, state["exp_avg"], state["exp_avg_sq"]), expected, strict=True):
        torch.testing.assert_close(got.detach().double(), want, rtol=1e-5, atol=1e-7)
    # Whatever the number of passes.
    assert state["step"] == len(gradients)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_narrow_moments_round_each_time(dtype: torch.dtype) -> None:
    module = module_of(torch.ones(64, dtype=dtype))
    gradients = micro_gradients((64,), 2, 3)
    optimizer = optim.AdamW(module.parameters(), LR, (BETA1, BETA2), precision="nearest")
    train(module, optimizer, gradients)

    def fp32(x: float) -> Tensor:
        return torch.tensor(x, dtype=torch.float64).float()

    # FP16 has BF16 moments.
    kept = BF16 if dtype == FP16 else dtype
    m = v = torch.zeros(64, dtype=kept)
    for of_step in gradients:
        for i, g in enumerate(g.to(dtype).float() for g in of_step):
            m = (m.float() * (fp32(BETA1) if i == 0 else 1) + g * fp32(1 - BETA1)).to(kept)
            v = (v.float() * (fp32(BETA2) if i == 0 else 1) + g * fp32(1 - BETA2) * g).to(kept)
    assert same_bits(optimizer.state[module.p]["exp_avg"], m)
    assert same_bits(optimizer.state[module.p]["exp_avg_sq"], v)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(dtype, name) for name in PRECISIONS for dtype in parse_strategy(name).dtypes],
)
def test_every_strategy(dtype: torch.dtype, precision: str) -> None:
    """The update is as long as the definition's, within what the stored moments can hold."""
    initial = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    module = module_of(initial)
    gradients = [[g.to(dtype).float() for g in of] for of in micro_gradients((4096,), 3, 3)]
    optimizer = optim.AdamW(
        module.parameters(), LR, (BETA1, BETA2), EPS, weight_decay=0.1, precision=precision, seed=4
    )
    with (
        diagnostics.watch(optimizer) as w,
        optim.fuse_backward(module, optimizer, accumulate=3, accumulate_in="adam-moments"),
    ):
        for i, g in enumerate(g for of_step in gradients for g in of_step):
            before = module.p.detach().clone(), optimizer.wide_value(module.p).clone()
            (module.p.float() * g).sum().backward()
            assert module.p.grad is None
            if i % 3 < 2:
                # The parameter waits for the last pass.
                assert same_bits(module.p.detach(), before[0])
                assert torch.equal(optimizer.wide_value(module.p), before[1])
    path = [initial.double()] + [
        oracle(initial.float(), gradients[:t], decay=0.1, decoupled=True)[0] for t in (1, 2, 3)
    ]
    tolerance = 0.01 if dtype != E4M3 else 0.1
    for t in (1, 2, 3):
        length = (path[t] - path[t - 1]).norm().item()
        assert w.history[t - 1]["update_norm"] == pytest.approx(length, rel=tolerance)
    assert optimizer.state[module.p]["step"] == 3


def test_one_pass_has_the_bits_of_a_plain_step() -> None:
    plain, fused = twins(MAKERS["adamw"]("collage-plus"), BF16)
    with optim.fuse_backward(*fused, accumulate_in="adam-moments"):
        for batch in batches(3, BF16):
            loss_of(plain[0], batch).backward()
            plain[1].step()
            plain[1].zero_grad()
            loss_of(fused[0], batch).backward()
    assert_same(plain, fused)


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adam])
def test_a_parameter_that_the_last_pass_misses_still_steps(make: type[optim.Adam]) -> None:
    initial = torch.ones(8)
    module = module_of(initial)
    module.other = nn.Parameter(torch.ones(3))
    optimizer = make(module.parameters(), LR, (BETA1, BETA2), EPS, weight_decay=0.1)
    g = torch.linspace(-1, 1, 8)
    with optim.fuse_backward(module, optimizer, accumulate=2, accumulate_in="adam-moments"):
        (module.p * g).sum().backward()
        module.other.sum().backward()
    assert [int(optimizer.state[p]["step"]) for p in module.parameters()] == [1, 1]
    decoupled = make is optim.AdamW
    for p, of_step in ((module.p, [g, g * 0]), (module.other, [torch.ones(3)])):
        start = torch.ones(p.shape)
        expected, m, v = oracle(start, [of_step], decay=0.1, decoupled=decoupled)
        state = optimizer.state[p]
        for got, want in ((p, expected), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
            torch.testing.assert_close(got.detach().double(), want, rtol=1e-5, atol=1e-7)


def test_random_bits_are_fresh_for_every_gradient() -> None:
    """Many increments far below an ulp of the second moment add up on average."""
    module = module_of(torch.zeros(20000, dtype=BF16))
    optimizer = optim.AdamW(module.parameters(), betas=(0.9, 0.5), precision="stochastic", seed=1)
    (module.p.float() * 1.0).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    passes, small = 16, 2.0**-5
    # Half of it after the decay, 0.25, whose ulp is 2**-9; each increment is a quarter of that.
    train(module, optimizer, [[torch.full((20000,), small)] * passes])
    v = optimizer.state[module.p]["exp_avg_sq"].double()
    expected = 0.25 + passes * 0.5 * small**2
    ulp = 2.0**-9
    deviation = (v - expected).std().item()
    # Independent roundings: sqrt(16 * 1/4 * 3/4) = 1.7 ulps; the same bits 16 times: 6.9.
    assert 1.5 * ulp < deviation < 2.0 * ulp
    assert abs(v.mean().item() - expected) < 4 * deviation / 20000**0.5


def test_how_far_it_is_from_the_moments_of_the_sum() -> None:
    """Equal gradients: the second moment is n times too small, the update sqrt(n) too large."""
    updates = {}
    for form in ("fp32", "adam-moments"):
        module = module_of(torch.zeros(10))
        optimizer = optim.AdamW(module.parameters(), LR, eps=0.0, weight_decay=0.0)
        with optim.fuse_backward(module, optimizer, accumulate=4, accumulate_in=form):
            for _ in range(4):
                module.p.sum().backward()
        updates[form] = -module.p.detach()
    torch.testing.assert_close(updates["fp32"], torch.full((10,), LR))
    torch.testing.assert_close(updates["adam-moments"], 2 * updates["fp32"])


def test_no_gradient_and_no_buffer_stays_alive() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(384, 384) for _ in range(12)])
    optimizer = optim.AdamW(model.parameters())
    x = torch.randn(4, 384)
    with optim.fuse_backward(model, optimizer, accumulate=2, accumulate_in="adam-moments"):
        for _ in range(2):
            model(x).sum().backward()
        with diagnostics.track_memory(model, optimizer) as memory:
            for _ in range(2):
                model(x).sum().backward()
        after = memory.category_peak_bytes
    largest = 384 * 384 * 4
    assert after["gradients"] <= largest + WAITING_BYTES
    assert after["gradients"] < 12 * largest / 2


def test_maximize_and_groups() -> None:
    ascent, descent = module_of(torch.zeros(6)), module_of(torch.zeros(6))
    gradients = micro_gradients((6,), 2, 3)
    for module, sign in ((ascent, -1), (descent, 1)):
        optimizer = optim.AdamW(
            [{"params": [module.p], "lr": 0.1}], maximize=sign < 0, weight_decay=0.0
        )
        train(module, optimizer, [[sign * g for g in of_step] for of_step in gradients])
    assert torch.equal(ascent.p, descent.p)


def test_watched() -> None:
    """The intended update is that of the whole step, not of its last gradient."""
    module = module_of(torch.full((64,), 1.0))
    optimizer = optim.AdamW(module.parameters(), LR, weight_decay=0.0)
    before = module.p.detach().clone()
    with diagnostics.watch(optimizer) as w:
        train(module, optimizer, micro_gradients((64,), 1, 3))
    moved = (module.p.detach().double() - before.double()).norm().item()
    assert w.total is not None
    assert w.total.update_norm == pytest.approx(moved, rel=1e-5)


def test_remove_leaves_what_is_folded_in_the_moments() -> None:
    module = module_of(torch.zeros(4))
    optimizer = optim.AdamW(module.parameters(), LR, (BETA1, BETA2))
    handle = optim.fuse_backward(module, optimizer, accumulate=2, accumulate_in="adam-moments")
    module.p.sum().backward()
    handle.remove()
    assert module.p.grad is None
    assert optimizer.state[module.p]["step"] == 0
    torch.testing.assert_close(optimizer.state[module.p]["exp_avg"], torch.full((4,), 1 - BETA1))
    assert torch.equal(module.p, torch.zeros(4))


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 1.0}, "clipping is not available with accumulate_in='adam-moments'"),
        ({"clip_parameter_norm": 1.0}, "clipping is not available"),
        ({"clip_value": 1.0}, "clipping is not available"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler= is not available"),
        ({"reduce": lambda g: g}, "reduce= is not available"),
    ],
)
def test_what_needs_the_sum_is_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=message):
        optim.fuse_backward(model, optimizer, accumulate=2, accumulate_in="adam-moments", **options)
    optim.fuse_backward(model, optimizer).remove()


def test_sgd_is_refused() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="'adam-moments' is not available for SGD: it has no such"):
        optim.fuse_backward(
            model, optim.SGD(model.parameters(), momentum=0.9), accumulate_in="adam-moments"
        )


def test_strict_arithmetic_is_refused() -> None:
    model = nn.Linear(3, 1).to(BF16)
    optimizer = optim.AdamW(model.parameters(), arithmetic="strict", eps=1e-6)
    with pytest.raises(ValueError, match="not available with arithmetic='strict'"):
        optim.fuse_backward(model, optimizer, accumulate_in="adam-moments")


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_policies_are_refused_also_when_they_come_later(policy: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.AdamW(model.parameters(), nonfinite=policy)
    with pytest.raises(ValueError, match="cannot give a gradient back"):
        optim.fuse_backward(model, optimizer, accumulate=2, accumulate_in="adam-moments")
    optimizer.param_groups[0]["nonfinite"] = "propagate"
    before = copy.deepcopy(model.state_dict())
    with optim.fuse_backward(
        model, optimizer, accumulate=2, accumulate_in="adam-moments"
    ) as handle:
        optimizer.param_groups[0]["nonfinite"] = policy
        with pytest.raises(ValueError, match="cannot give a gradient back"):
            handle.backward(model(torch.ones(2, 3)).sum())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state

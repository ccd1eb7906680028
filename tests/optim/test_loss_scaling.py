"""Gradients of scaled losses: unscaled in FP32, steps with overflows left out whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subulp import optim
from subulp.optim import loss_scaling

from .backward.twins import MAKERS, Model, assert_same, batches, loss_of, twins
from .support import BF16, E4M3, FP16, HALVES, Case, Run, gradient, unchanged
from .support import assert_same as assert_same_runs
from .support import cases as all_cases


def new_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 3} | options)


def scaled_loss(run: Run, t: int) -> Tensor:
    """A loss whose gradients are those of a run, in FP32 for the scale's sake."""
    return sum(((p * gradient(p, t, i)).float().sum() for i, p in enumerate(run.params)))


# ------------------------------------------------------------------------- step() of a scaler


@pytest.mark.parametrize("case", all_cases(["adamw", "sgd-momentum"], dtypes=(FP16, BF16)))
def test_a_scaled_step_is_a_step_with_unscaled_fp32_gradients(case: Case) -> None:
    scaled, plain = case.fresh(), case.fresh()
    scaler = new_scaler()
    for t in (1, 2, 3):
        for run in (scaled, plain):
            run.optimizer.zero_grad()
            scaler.scale(scaled_loss(run, t)).backward()
        for p in plain.params:
            p.grad_dtype = None
            p.grad = p.grad.float() / scaler.get_scale()
        scaler.step(scaled.optimizer)
        plain.optimizer.step()
        scaler.update()
    assert_same_runs(scaled, plain)


def test_what_fp16_cannot_hold_is_kept() -> None:
    """2**-26 is below half of FP16's smallest number; under a scale it is not."""
    p = nn.Parameter(torch.zeros(4, dtype=FP16))
    optimizer = optim.SGD([p], lr=1.0, precision="master")
    scaler = new_scaler(init_scale=2.0**16)
    scaler.scale((p.float() * 2.0**-26).sum()).backward()
    scaler.step(optimizer)
    assert optimizer.wide_value(p).tolist() == [-(2.0**-26)] * 4


def test_a_scale_that_is_no_power_of_two_rounds_once() -> None:
    p = nn.Parameter(torch.zeros(4, dtype=FP16))
    optimizer = optim.SGD([p], lr=1.0, precision="master")
    scaler = new_scaler(init_scale=3.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    third = torch.tensor(3.0, dtype=torch.float64).reciprocal().float()
    assert torch.equal(optimizer.wide_value(p), -(third * 3.0).expand(4))


def test_unscaled_gradients_are_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scaling, "_UNSCALED_BYTES", 299)
    scaled, plain = (Case("adamw", "collage-plus", FP16).fresh() for _ in range(2))
    sizes, update = [], optim.AdamW.update

    def count(self: optim.AdamW, bucket: Any, pending: Any) -> None:
        sizes.append(bucket.nbytes)
        update(self, bucket, pending)

    scaler = new_scaler()
    scaler.scale(scaled_loss(scaled, 1)).backward()
    with monkeypatch.context() as patch:
        patch.setattr(optim.AdamW, "update", count)
        scaler.step(scaled.optimizer)
    # (6, 7); (33,), () and (0, 3).
    assert sizes == [4 * 42, 4 * (33 + 1)]
    assert_same_runs(scaled, plain.train(1))


@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_an_overflow_leaves_the_step_out_whatever_the_policy(policy: str) -> None:
    run = Case("adamw", "kahan", FP16).fresh(nonfinite=policy).train(1)
    scaler = new_scaler()
    scaler.scale(scaled_loss(run, 2)).backward()
    run.params[1].grad[3] = torch.inf
    before = run.bits()
    scaler.step(run.optimizer)
    assert_same_runs(run, before)
    assert run.optimizer.skipped_steps == 1
    scaler.update()
    assert scaler.get_scale() == 2.0**9


def test_no_state_comes_to_be_in_a_step_left_out() -> None:
    run = Case("adamw", "collage-plus", FP16).fresh()
    scaler = new_scaler()
    scaler.scale(scaled_loss(run, 1)).backward()
    run.params[0].grad[0, 0] = torch.nan
    scaler.step(run.optimizer)
    assert not any(p in run.optimizer.state for p in run.params)


def test_gradients_unscaled_before_the_step_are_not_unscaled_again() -> None:
    run, plain = (Case("adamw", "auto", BF16).fresh() for _ in range(2))
    scaler = new_scaler()
    scaler.scale(scaled_loss(run, 1)).backward()
    scaler.unscale_(run.optimizer)
    scaler.step(run.optimizer)
    assert_same_runs(run, plain.train(1))


def test_a_step_after_the_scalers_is_not_scaled() -> None:
    run, plain = (Case("adamw", "auto", FP16).fresh() for _ in range(2))
    scaler = new_scaler()
    scaler.scale(scaled_loss(run, 1)).backward()
    scaler.step(run.optimizer)
    run.t = 1
    assert_same_runs(run.train(2), plain.train(3))


@pytest.mark.parametrize("maker", [torch.optim.SGD, optim.SGD])
def test_momentum_that_joins_under_a_scaler(maker: Callable) -> None:
    """The buffer begins with the gradient, as torch's does, and not with zero."""
    found = []
    for enabled in (False, True):
        w = nn.Parameter(torch.ones(1))
        optimizer = maker([w], lr=0.125, dampening=0.5)
        scaler = new_scaler(enabled=enabled)
        for t in range(3):
            if t == 1:
                optimizer.param_groups[0]["momentum"] = 0.5
            optimizer.zero_grad()
            scaler.scale((w * (t + 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((w.item(), optimizer.state[w]["momentum_buffer"].item()))
    # 2, then a half of that and of 3.
    assert found == [(1 - 0.125 * (1 + 2 + 2.5), 2.5)] * 2


@pytest.mark.parametrize("fault", ["an option", "a fused step"])
def test_a_scaled_step_that_is_refused_leaves_no_scale(fault: str) -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scaler = new_scaler()
    handle = optim.fuse_backward(model, optimizer) if fault == "a fused step" else None
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if handle is None:
        optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises((RuntimeError, ValueError)):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    if handle is not None:
        handle.remove()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.zero_grad()
    with torch.no_grad():
        model.weight.zero_()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[-2.0] * 4]


def test_a_disabled_scaler_scales_nothing() -> None:
    run, plain = (Case("adamw", "auto", FP16).fresh() for _ in range(2))
    scaler = new_scaler(enabled=False)
    scaler.scale(scaled_loss(run, 1)).backward()
    scaler.step(run.optimizer)
    scaler.update()
    assert_same_runs(run, plain.train(1))


# ---------------------------------------------------------------------- inside the backward pass


def spoil(model: Model, steps: set[int]) -> Callable[[], None]:
    """Make one element of one gradient infinite in some steps; returns what counts them."""
    now = [0]

    def hook(grad: Tensor) -> Tensor:
        grad = grad.clone()
        if now[0] in steps:
            grad.view(-1)[3] = torch.inf
        return grad

    model.segment[0].weight.register_hook(hook)

    def count() -> None:
        now[0] += 1

    return count


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize(("maker", "accumulate"), [("adamw", 2), ("sgd", 1)])
def test_fused_equals_unfused(maker: str, precision: str, accumulate: int) -> None:
    """Two overflows on the way, one at the first step; the scale falls and grows the same way."""
    plain, fused = twins(MAKERS[maker](precision), FP16)
    scalers = new_scaler(), new_scaler()
    counts = [spoil(model, {0, 4 * accumulate}) for model, _ in (plain, fused)]
    scales = []
    with optim.fuse_backward(*fused, scaler=scalers[1], accumulate=accumulate) as handle:
        for i, batch in enumerate(batches(9 * accumulate, FP16)):
            scalers[0].scale(loss_of(plain[0], batch)).backward()
            handle.backward(scalers[1].scale(loss_of(fused[0], batch)))
            for count in counts:
                count()
            if (i + 1) % accumulate:
                continue
            scalers[0].step(plain[1])
            plain[1].zero_grad()
            # As in any training loop; harmless.
            scalers[1].step(fused[1])
            for scaler in scalers:
                scaler.update()
            scales.append(scalers[0].get_scale())
            assert scalers[0].state_dict() == scalers[1].state_dict()
            assert plain[1].skipped_steps == fused[1].skipped_steps
    assert scales == [2.0**k for k in (9, 9, 9, 10, 9, 9, 9, 10, 10)]
    assert_same(plain, fused)


@pytest.mark.parametrize("options", [{"max_norm": 0.05}, {"clip_parameter_norm": 0.01}])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_clipping_sees_unscaled_gradients(dtype: torch.dtype, options: dict[str, float]) -> None:
    plain, fused = twins(MAKERS["sgd"]("collage-plus"), dtype)
    scalers = new_scaler(), new_scaler()
    counts = [spoil(model, {1}) for model, _ in (plain, fused)]
    with optim.fuse_backward(*fused, scaler=scalers[1], **options) as handle:
        for batch in batches(4, dtype):
            scalers[0].scale(loss_of(plain[0], batch)).backward()
            trained = [p for p in plain[0].parameters() if p.grad is not None]
            for p in trained:
                # Torch unscales where gradients lie, which it refuses to do in FP16.
                p.grad_dtype = None
                p.grad = p.grad.float()
            scalers[0].unscale_(plain[1])
            if "max_norm" in options:
                nn.utils.clip_grad_norm_(trained, options["max_norm"])
            else:
                for p in trained:
                    nn.utils.clip_grad_norm_([p], options["clip_parameter_norm"])
            scalers[0].step(plain[1])
            plain[1].zero_grad()
            for p in trained:
                p.grad_dtype = dtype
            handle.backward(scalers[1].scale(loss_of(fused[0], batch)))
            for step in (*counts, *(scaler.update for scaler in scalers)):
                step()
    assert fused[1].skipped_steps == 1
    assert_same(plain, fused)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_fused_overflow_leaves_the_step_out_whatever_the_policy(policy: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.AdamW(model.parameters(), nonfinite=policy)
    scaler = new_scaler()
    before = copy.deepcopy(model.state_dict())
    with optim.fuse_backward(model, optimizer, scaler=scaler) as handle:
        handle.backward(scaler.scale(model(torch.full((2, 3), torch.inf)).sum()))
    scaler.update()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert optimizer.skipped_steps == 1
    assert scaler.get_scale() == 2.0**9


def test_an_overflow_of_an_earlier_pass_counts() -> None:
    """Accumulated as two components, an infinity is still none that a step may take."""
    _, (model, optimizer) = twins(MAKERS["adamw"]("nearest"), FP16)
    scaler = new_scaler()
    count = spoil(model, {0})
    before = copy.deepcopy(model.state_dict())
    with optim.fuse_backward(
        model, optimizer, scaler=scaler, accumulate=2, accumulate_in="expansion"
    ) as handle:
        for batch in batches(2, FP16):
            handle.backward(scaler.scale(loss_of(model, batch)))
            count()
        scaler.update()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert scaler.get_scale() == 2.0**9


def test_fp8_parameters() -> None:
    module = nn.Module()
    module.p = nn.Parameter(torch.linspace(-1, 1, 16).to(E4M3))
    other = copy.deepcopy(module)
    scaler = new_scaler(init_scale=2.0**4)
    optimizer, plain = (
        optim.SGD(m.parameters(), lr=0.5, precision="collage-light") for m in (module, other)
    )
    gradient_ = torch.linspace(-1, 1, 16).to(E4M3).float()
    with optim.fuse_backward(module, optimizer, scaler=scaler) as handle:
        handle.backward(scaler.scale(module.p.float() @ gradient_))
        scaler.update()
    other.p.grad_dtype = None
    other.p.grad = gradient_
    plain.step()
    assert torch.equal(optimizer.wide_value(module.p), plain.wide_value(other.p))


def test_a_disabled_scaler_needs_no_second_pass() -> None:
    plain, fused = twins(MAKERS["adamw"]("kahan"), FP16)
    scaler = new_scaler(enabled=False)
    with optim.fuse_backward(*fused, scaler=scaler):
        for batch in batches(2, FP16):
            loss_of(plain[0], batch).backward()
            plain[1].step()
            plain[1].zero_grad()
            scaler.scale(loss_of(fused[0], batch)).backward()
            scaler.step(fused[1])
            scaler.update()
    assert_same(plain, fused)


# ---------------------------------------------------------------------------------------- refused


def linear() -> tuple[nn.Linear, optim.SGD]:
    model = nn.Linear(3, 1)
    return model, optim.SGD(model.parameters(), lr=0.1)


def test_a_plain_backward_is_refused() -> None:
    model, optimizer = linear()
    scaler = new_scaler()
    run = Run(list(model.parameters()), optimizer)
    with (
        optim.fuse_backward(model, optimizer, scaler=scaler),
        unchanged(run),
        pytest.raises(RuntimeError, match=r"\(max_norm, scaler.*call handle\.backward"),
    ):
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()


def test_a_second_step_without_update_is_refused() -> None:
    model, optimizer = linear()
    scaler = new_scaler()
    with optim.fuse_backward(model, optimizer, scaler=scaler) as handle:
        handle.backward(scaler.scale(model(torch.ones(2, 3)).sum()))
        with (
            unchanged(Run(list(model.parameters()), optimizer)),
            pytest.raises(RuntimeError, match=r"nothing was updated. Call scaler\.update"),
        ):
            handle.backward(scaler.scale(model(torch.ones(2, 3)).sum()))
        scaler.update()
        handle.backward(scaler.scale(model(torch.ones(2, 3)).sum()))
    assert optimizer.state[model.weight]["step"] == 2


def test_a_loss_that_was_never_scaled_is_refused() -> None:
    model, optimizer = linear()
    with (
        optim.fuse_backward(model, optimizer, scaler=new_scaler()) as handle,
        unchanged(Run(list(model.parameters()), optimizer)),
        pytest.raises(AssertionError, match=r"did not use scaler\.scale\(loss"),
    ):
        handle.backward(model(torch.ones(2, 3)).sum())


def test_a_scaler_that_the_handle_does_not_know_is_refused() -> None:
    model, optimizer = linear()
    scaler = new_scaler()
    with optim.fuse_backward(model, optimizer):
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        with pytest.raises(RuntimeError, match="Pass scaler= to fuse_backward"):
            scaler.step(optimizer)


def test_bad_scaler() -> None:
    with pytest.raises(ValueError, match=r"scaler is float: pass a torch\.amp\.GradScaler"):
        optim.fuse_backward(*linear(), scaler=1024.0)


def test_a_step_that_a_hook_refuses_leaves_no_scale():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([p], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    refusing = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    scaler.scale(p.sum()).backward()
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    refusing.remove()
    p.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(p.detach(), torch.zeros(3))

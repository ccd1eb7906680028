"""Fused equals unfused, bit for bit, with at most one large gradient alive."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from subulp import diagnostics, optim
from subulp.optim.backward.handle import WAITING_BYTES

from ..support import HALVES
from .twins import MAKERS, assert_same, batches, loss_of, twins


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("maker", MAKERS)
def test_fused_equals_unfused(maker: str, precision: str) -> None:
    plain, fused = twins(MAKERS[maker](precision), torch.bfloat16)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for _, o in (plain, fused)]
    with optim.fuse_backward(*fused):
        for batch in batches(5, torch.bfloat16):
            loss_of(plain[0], batch).backward()
            plain[1].step()
            plain[1].zero_grad()
            loss_of(fused[0], batch).backward()
            assert all(p.grad is None for p in fused[0].parameters())
            # Harmless while fused.
            fused[1].step()
            fused[1].zero_grad()
            for scheduler in schedulers:
                scheduler.step()
    assert_same(plain, fused)


@pytest.mark.parametrize("norm", [0.05, 100.0])
@pytest.mark.parametrize("precision", ["collage-plus", "stochastic", "master"])
def test_global_norm_clipping(precision: str, norm: float) -> None:
    plain, fused = twins(MAKERS["adamw"](precision), torch.bfloat16)
    # SGD on the same gradients would show a wrong factor even where Adam divides it out.
    plain_sgd, fused_sgd = twins(MAKERS["sgd"](precision), torch.bfloat16)
    for a, b in ((plain, fused), (plain_sgd, fused_sgd)):
        with optim.fuse_backward(*b, max_norm=norm) as handle:
            for batch in batches(4, torch.bfloat16):
                loss_of(a[0], batch).backward()
                total = nn.utils.clip_grad_norm_(a[0].parameters(), norm)
                a[1].step()
                a[1].zero_grad()
                handle.backward(loss_of(b[0], batch))
                assert handle.total_norm is not None
                assert torch.equal(handle.total_norm, total)
        assert_same(a, b)


def test_clip_value() -> None:
    plain, fused = twins(MAKERS["sgd"]("collage-light"), torch.bfloat16)
    with optim.fuse_backward(*fused, clip_value=1e-3):
        for batch in batches(3, torch.bfloat16):
            loss_of(plain[0], batch).backward()
            nn.utils.clip_grad_value_(plain[0].parameters(), 1e-3)
            plain[1].step()
            plain[1].zero_grad()
            loss_of(fused[0], batch).backward()
    assert_same(plain, fused)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_accumulation_in_the_parameters_dtype(max_norm: float | None) -> None:
    plain, fused = twins(MAKERS["adamw"]("collage-plus"), torch.bfloat16)
    with optim.fuse_backward(*fused, accumulate=3, max_norm=max_norm) as handle:
        for i, batch in enumerate(batches(6, torch.bfloat16)):
            loss_of(plain[0], batch).backward()
            handle.backward(loss_of(fused[0], batch))
            if i % 3 == 2:
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(plain[0].parameters(), max_norm)
                plain[1].step()
                plain[1].zero_grad()
    assert_same(plain, fused)


@pytest.mark.parametrize("form", ["fp32", "expansion"])
def test_accumulation_in_wider_formats(form: str) -> None:
    """The step sees the FP32 sum: within an expansion's 16 bits for BF16 components."""
    count = 8
    sums = {}
    for accumulate_in in (form, "param"):
        p = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
        optimizer = optim.SGD([p], lr=1.0, precision="collage-light")
        module = nn.Module()
        module.p = p
        generator = torch.Generator().manual_seed(0)
        gradients = [
            torch.randn(1000, generator=generator).to(torch.bfloat16) for _ in range(count)
        ]
        handle = optim.fuse_backward(
            module, optimizer, accumulate=count, accumulate_in=accumulate_in
        )
        for g in gradients:
            (p * g).sum().backward()
        sums[accumulate_in] = -optimizer.wide_value(p)
        handle.remove()
    exact = torch.stack([g.double() for g in gradients]).sum(0)
    scale = torch.stack([g.double().abs() for g in gradients]).sum(0)
    error = {k: ((v - exact).abs() / scale).max().item() for k, v in sums.items()}
    assert error[form] < 2**-14 < 2**-10 < error["param"]


def test_a_parameter_that_the_last_pass_misses_still_steps() -> None:
    plain, fused = twins(MAKERS["adamw"]("nearest"), torch.bfloat16)
    first, second = batches(2, torch.bfloat16)
    with optim.fuse_backward(*fused, accumulate=2):
        for model in (plain[0], fused[0]):
            loss_of(model, first).backward()
            model.repeated(second[0] @ torch.ones(12, 16).bfloat16()).sum().backward()
        plain[1].step()
    assert_same(plain, fused)


def test_at_most_one_large_gradient_is_alive() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(384, 384) for _ in range(12)]
    peaks = {}
    for fused in (False, True):
        model = nn.Sequential(*copy.deepcopy(layers))
        optimizer = optim.AdamW(model.parameters())
        x = torch.randn(4, 384)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        handle = optim.fuse_backward(model, optimizer) if fused else None
        with diagnostics.track_memory(model, optimizer) as memory:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        peaks[fused] = memory.category_peak_bytes["gradients"]
    largest = 384 * 384 * 4
    assert peaks[False] == 12 * (largest + 384 * 4)
    # The largest, and small ones that wait.
    assert peaks[True] <= largest + WAITING_BYTES
    assert peaks[True] < peaks[False] / 2


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"clip_value": 1e-3}])
def test_fp8_parameters(options: dict[str, float]) -> None:
    """FP8 gradients are widened where torch cannot compute with them."""
    weight = (torch.randn(64, generator=torch.Generator().manual_seed(0)) * 0.1).to(torch.float32)
    gradient = torch.linspace(-1, 1, 64).to(torch.float8_e4m3fn)
    results = []
    for fused in (False, True):
        p = nn.Parameter(weight.to(torch.float8_e4m3fn))
        module = nn.Module()
        module.p = p
        optimizer = optim.SGD([p], lr=0.5, precision="collage-light")
        if fused:
            with optim.fuse_backward(module, optimizer, **options) as handle:
                handle.backward(p.float() @ gradient.float())
        else:
            clipped = gradient.float()
            if "max_norm" in options:
                clipped = clipped * torch.clamp(
                    options["max_norm"] / (clipped.norm() + 1e-6), max=1
                )
            if "clip_value" in options:
                clipped = clipped.clamp(-options["clip_value"], options["clip_value"])
            p.grad_dtype = None
            p.grad = clipped if options else gradient
            optimizer.step()
        results.append(optimizer.wide_value(p))
    assert torch.equal(*results)
    assert not torch.equal(results[0], weight.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_nonfinite_gradient_leaves_the_whole_step_out(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optim.AdamW(model.parameters(), nonfinite=policy)
    before = copy.deepcopy(model.state_dict())
    with optim.fuse_backward(model, optimizer) as handle:
        bad = model(torch.full((2, 4), float("inf"))).sum()
        if policy == "raise":
            with pytest.raises(FloatingPointError, match=r"parameter . of group 0.*was updated"):
                handle.backward(bad)
        else:
            handle.backward(bad)
            assert optimizer.skipped_steps == 1
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        handle.backward(model(torch.ones(2, 4)).sum())
        assert not torch.equal(model[0].weight, before["0.weight"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_goes_on_after_a_step_that_was_refused(accumulate: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    optimizer = optim.SGD(model.parameters(), lr=0.1, nonfinite="raise")
    refused = 0
    with optim.fuse_backward(model, optimizer, accumulate=accumulate) as handle:
        for step in range(4):
            try:
                for part in range(accumulate):
                    bad = step == 0 and part == accumulate - 1
                    x = torch.full((2, 4), math.nan if bad else 1.0)
                    handle.backward(model(x).square().mean())
                optimizer.step()
            except FloatingPointError:
                refused += 1
                for name, value in model.state_dict().items():
                    assert torch.equal(value, before[name])
    assert refused == 1
    assert not torch.equal(model.weight, before["weight"])


def test_the_policy_of_the_group_with_the_bad_gradient_decides() -> None:
    layers = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    policies = ("skip", "raise")
    optimizer = optim.SGD(
        [
            {"params": layer.parameters(), "nonfinite": policy}
            for layer, policy in zip(layers, policies, strict=True)
        ],
        lr=0.1,
    )
    good, bad = torch.ones(1, 2), torch.full((1, 2), float("nan"))
    with optim.fuse_backward(layers, optimizer) as handle:
        handle.backward((layers[0](bad) + layers[1](good)).sum())
        assert optimizer.skipped_steps == 1
        with pytest.raises(FloatingPointError, match="parameter 0 of group 1"):
            handle.backward((layers[0](good) + layers[1](bad)).sum())


def test_remove_restores_everything() -> None:
    plain, fused = twins(MAKERS["adamw"]("collage-plus"), torch.bfloat16)
    first, second, third = batches(3, torch.bfloat16)
    handle = optim.fuse_backward(*fused)
    loss_of(fused[0], first).backward()
    handle.remove()
    loss_of(fused[0], second).backward()
    assert fused[0].embed.weight.grad is not None
    fused[1].step()
    fused[1].zero_grad()
    assert fused[0].embed.weight.grad is None
    for batch in (first, second):
        loss_of(plain[0], batch).backward()
        plain[1].step()
        plain[1].zero_grad()
    assert_same(plain, fused)
    # And it can be fused again.
    with optim.fuse_backward(*fused):
        loss_of(fused[0], third).backward()


def test_pickled_and_copied_optimizers_are_not_fused() -> None:
    _, (model, optimizer) = twins(MAKERS["adamw"]("nearest"), torch.bfloat16)
    with optim.fuse_backward(model, optimizer):
        other = copy.deepcopy((model, optimizer))
    loss_of(other[0], batches(1, torch.bfloat16)[0]).backward()
    before = other[0].head.weight.clone()
    other[1].step()
    assert not torch.equal(before, other[0].head.weight)


def test_double_backward_is_refused() -> None:
    model = nn.Linear(3, 1)
    with optim.fuse_backward(model, optim.SGD(model.parameters(), lr=0.1)):
        loss = model(torch.ones(2, 3)).square().sum()
        with pytest.raises(RuntimeError, match="create_graph=True"):
            loss.backward(create_graph=True)


def test_a_plain_backward_is_refused_where_two_are_needed() -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    refused = pytest.raises(RuntimeError, match=r"call handle\.backward\(loss\)")
    with optim.fuse_backward(model, optimizer, max_norm=1.0), refused:
        model(torch.ones(2, 3)).sum().backward()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 0.0}, "max_norm=0.0"),
        ({"clip_value": -1.0}, "clip_value=-1.0"),
        ({"max_norm": 1.0, "clip_value": 1.0}, "clip one way"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"accumulate": 2.5}, "accumulate=2.5"),
        ({"accumulate": float("nan")}, "accumulate=nan"),
        ({"accumulate": True}, "accumulate=True"),
        ({"accumulate": "2"}, "accumulate='2'"),
        ({"max_norm": "1"}, "max_norm='1'"),
        ({"max_norm": 1.0, "norm_type": "two"}, "norm_type='two'"),
        ({"max_norm": 1.0, "norm_type": float("nan")}, "norm_type=nan"),
        ({"reduce": 3}, "reduce is int"),
        ({"accumulate_in": "bf16"}, "accumulate_in='bf16'"),
        ({"accumulate": 2, "accumulate_in": "expansion"}, "accumulate_in='expansion'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        optim.fuse_backward(model, optimizer, **options)
    optim.fuse_backward(model, optimizer).remove()


def test_fp8_gradients_do_not_accumulate_in_their_own_dtype() -> None:
    model = nn.Linear(3, 1).to(torch.float8_e4m3fn)
    optimizer = optim.SGD(model.parameters(), lr=0.1, precision="nearest")
    with pytest.raises(ValueError, match="accumulate_in='param'"):
        optim.fuse_backward(model, optimizer, accumulate=2)


def test_wrong_optimizers() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="optimizer is SGD"):
        optim.fuse_backward(model, torch.optim.SGD(model.parameters()))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="is not in the model: it would never step"):
        optim.fuse_backward(nn.Linear(2, 2), optimizer)
    with optim.fuse_backward(model, optimizer), pytest.raises(ValueError, match="fused already"):
        optim.fuse_backward(model, optimizer)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_models_are_refused() -> None:
    model = torch.jit.script(nn.Linear(3, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="ScriptModule"):
        optim.fuse_backward(model, optimizer)


def test_reentrant_checkpoints() -> None:
    """They run backward passes of their own; a shared parameter would step between its uses."""
    model = nn.Linear(3, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 3, requires_grad=True)
    with optim.fuse_backward(model, optimizer) as handle:
        h = checkpoint(model, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            h.sum().backward()
        handle.backward(checkpoint(model, x, use_reentrant=True).sum())
        y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
        with pytest.raises(RuntimeError, match="shared parameter"):
            handle.backward(y.sum())
    assert int(optimizer.state[model.weight]["step"]) == 1

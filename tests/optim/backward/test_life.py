"""What may happen around a fused optimizer: schedulers, groups, loading, closures, removal."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from subulp import optim
from subulp.optim.backward import handle as handle_module
from subulp.optim.backward.handle import WAITING_BYTES
from subulp.optim.backward.look_ahead import LookAhead
from subulp.optim.parameters import Bucket
from subulp.optim.pending import Pending

from ..support import BF16, FP32, same_bits
from .twins import MAKERS, assert_same, batches, loss_of, twins


def linear() -> tuple[nn.Linear, optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, optim.AdamW(model.parameters(), lr=0.1)


def test_schedulers_count_steps_that_no_one_called() -> None:
    """torch warns of schedulers that step before their optimizer: here it has."""
    model, optimizer = linear()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with optim.fuse_backward(model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.5},
        {"lr": torch.tensor(0.5)},
        {"betas": (0.5, 0.6)},
        {"weight_decay": 0.3},
        {"maximize": True},
        {"eps": 1e-2},
    ],
    ids=str,
)
def test_changed_options_count_from_the_next_pass(change: dict) -> None:
    plain, fused = twins(MAKERS["adamw"]("collage-plus"), BF16)
    with optim.fuse_backward(*fused):
        for i, batch in enumerate(batches(4, BF16)):
            if i == 2:
                for _, optimizer in (plain, fused):
                    optimizer.param_groups[0].update(change)
            loss_of(plain[0], batch).backward()
            plain[1].step()
            plain[1].zero_grad()
            loss_of(fused[0], batch).backward()
    assert_same(plain, fused)


def test_momentum_that_joins_later() -> None:
    plain, fused = twins(lambda p: optim.SGD(p, lr=1e-2, precision="collage-plus", seed=1), BF16)
    with optim.fuse_backward(*fused):
        for i, batch in enumerate(batches(4, BF16)):
            for _, optimizer in (plain, fused):
                optimizer.param_groups[0]["momentum"] = 0.9 if i >= 2 else 0.0
            loss_of(plain[0], batch).backward()
            plain[1].step()
            plain[1].zero_grad()
            loss_of(fused[0], batch).backward()
    assert_same(plain, fused)


def test_a_loaded_state_dict_continues() -> None:
    plain, fused = twins(MAKERS["adamw"]("collage-plus"), BF16)
    with optim.fuse_backward(*fused):
        for i, batch in enumerate(batches(4, BF16)):
            loss_of(plain[0], batch).backward()
            plain[1].step()
            plain[1].zero_grad()
            loss_of(fused[0], batch).backward()
            if i == 1:
                fused[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
                plain[1].load_state_dict(copy.deepcopy(fused[1].state_dict()))
    assert_same(plain, fused)


def test_memory_format_changed_while_fused() -> None:
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 2).to(BF16)
        optimizer = optim.AdamW(model.parameters(), precision="extra-bits-5")
        handle = optim.fuse_backward(model, optimizer) if fused else None
        for i in range(4):
            if i == 2:
                model.to(memory_format=torch.channels_last)
            model(torch.ones(1, 3, 4, 4, dtype=BF16)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        results.append(optimizer.wide_value(model.weight))
    assert same_bits(*results)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_parameters_that_begin_to_train(max_norm: float | None) -> None:
    """Frozen when the handle was made, thawed later, frozen again."""
    plain, fused = twins(MAKERS["adamw"]("collage-plus"), BF16)
    with optim.fuse_backward(*fused, max_norm=max_norm) as handle:
        for i, batch in enumerate(batches(6, BF16)):
            for model, _ in (plain, fused):
                model.frozen.requires_grad_(1 < i < 4)
            loss_of(plain[0], batch).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(plain[0].parameters(), max_norm)
            plain[1].step()
            plain[1].zero_grad()
            if max_norm is None:
                loss_of(fused[0], batch).backward()
            else:
                handle.backward(loss_of(fused[0], batch))
            assert all(p.grad is None for p in fused[0].parameters())
    assert_same(plain, fused)
    assert fused[1].state[fused[0].frozen.weight]["step"] == 2


def test_only_parameters_that_were_frozen_train() -> None:
    model, optimizer = linear()
    model.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with optim.fuse_backward(model, optimizer):
        assert not model.weight.requires_grad
        model.requires_grad_(True)
        model(torch.ones(1, 3)).sum().backward()
    assert not torch.equal(model.weight, before["weight"])


def test_gradients_of_before_are_refused() -> None:
    """Loops that begin with zero_grad() leave them, and it does nothing while fused."""
    model, optimizer = linear()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"shape \(2, 3\) has a gradient.*zero_grad\(\)"):
        optim.fuse_backward(model, optimizer)
    optimizer.zero_grad()
    optim.fuse_backward(model, optimizer).remove()


def test_new_groups_are_refused_while_fused() -> None:
    model, optimizer = linear()
    other = nn.Linear(2, 2)
    with (
        optim.fuse_backward(model, optimizer),
        pytest.raises(RuntimeError, match="add_param_group while the step is fused"),
    ):
        optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": other.parameters()})


def test_the_backward_pass_of_a_closure_is_the_step() -> None:
    plain, fused = twins(MAKERS["adamw"]("kahan"), BF16)
    with optim.fuse_backward(*fused):
        for batch in batches(2, BF16):
            for model, optimizer in (plain, fused):

                def closure(model=model, optimizer=optimizer, batch=batch) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model, batch)
                    loss.backward()
                    return loss

                assert optimizer.step(closure) > 0
    assert fused[1].state[fused[0].embed.weight]["step"] == 2
    assert_same(plain, fused)


def test_other_parameters_keep_their_gradients() -> None:
    model, optimizer = linear()
    other = nn.Linear(2, 2)
    with optim.fuse_backward(nn.Sequential(model, other), optimizer):
        other(model(torch.ones(1, 3))).sum().backward()
    assert model.weight.grad is None
    assert other.weight.grad is not None


def test_removal_is_once_and_for_all() -> None:
    model, optimizer = linear()
    first = optim.fuse_backward(model, optimizer)
    first.remove()
    second = optim.fuse_backward(model, optimizer)
    # Not the second one's.
    first.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is None
    with pytest.raises(RuntimeError, match="the handle was removed: fuse again"):
        first.backward(model(torch.ones(1, 3)).sum())
    second.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("form", ["param", "fp32"])
def test_half_an_accumulation_stays_in_the_gradients(form: str) -> None:
    model, optimizer = linear()
    with optim.fuse_backward(model, optimizer, accumulate=3, accumulate_in=form):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == FP32
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0))


def test_linear_losses_are_refused_with_create_graph() -> None:
    """Their gradients need no graph, but the pass was asked to make one."""
    model, optimizer = linear()
    with (
        optim.fuse_backward(model, optimizer),
        pytest.raises(RuntimeError, match="create_graph=True"),
    ):
        model(torch.ones(1, 3)).sum().backward(create_graph=True)


def test_a_pass_that_failed_leaves_no_gradient_behind() -> None:
    """What waited is forgotten, and the next pass steps with its own gradients alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    other = copy.deepcopy(model)
    optimizer, plain = (optim.AdamW(m.parameters(), lr=0.1) for m in (model, other))

    def fail(grad: Tensor) -> Tensor:
        raise KeyError("a hook of the user's")

    x = torch.ones(1, 3)
    with optim.fuse_backward(model, optimizer) as handle:
        h = model[0](x)
        h.register_hook(fail)
        with pytest.raises(KeyError):
            # The gradients of the second layer are complete by then.
            handle.backward(model[1](h).sum())
        assert not optimizer.state
        handle.backward(model[0](x).square().sum())
    other[0](x).square().sum().backward()
    plain.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach())


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with groups that wait apart, of which only the largest is stepped at the limit."""
    limit = 2000
    monkeypatch.setattr(handle_module, "WAITING_BYTES", limit)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(60)])
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = optim.SGD([{"params": matrices}, {"params": vectors}], lr=0.1)
    flushed, waiting = [], []

    class Observer:
        def begin_step(self) -> None: ...

        def begin_update(self, pending: Pending) -> None:
            flushed.append(pending.bucket)
            waiting.append(pending.bucket.nbytes + sum(b.nbytes for b in handle._waiting))

        def end_update(self, bucket: Bucket) -> None: ...

        def end_step(self) -> None: ...

    optimizer.observers = (Observer(),)
    with optim.fuse_backward(model, optimizer) as handle:
        model(torch.ones(1, 6)).sum().backward()
    largest = 6 * 6 * 4
    assert max(waiting) <= limit + largest
    assert len(flushed) < 15
    assert sum(len(bucket.params) for bucket in flushed) == 120


class Twice(nn.Module):
    """Layers of several dtypes and sizes, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
        self.narrow = nn.Linear(8, 8).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.layers[2](x))
        return self.narrow(x.to(torch.bfloat16))


@pytest.mark.parametrize("limit", [0, 300, WAITING_BYTES])
@pytest.mark.parametrize(
    "options", [{}, {"clip_value": 1e-3}, {"clip_parameter_norm": 1e-3}], ids=str
)
@pytest.mark.parametrize("own", [False, True], ids=["loss.backward", "handle.backward"])
def test_gradients_looked_at_together_step_as_alone(
    monkeypatch: pytest.MonkeyPatch, own: bool, options: dict[str, float], limit: int
) -> None:
    monkeypatch.setattr(handle_module, "WAITING_BYTES", limit)
    results = []
    for together in (False, True):
        model = Twice()
        optimizer = optim.AdamW(model.parameters(), lr=0.1, precision="auto", seed=1)
        with optim.fuse_backward(model, optimizer, **options) as handle:
            # As with parameters that are sharded, whose gradients are taken one by one.
            handle._has_sharded = not together
            for t in range(3):
                loss = model(torch.randn(4, 8, generator=seeded(t))).square().sum()
                handle.backward(loss) if own else loss.backward()
                assert all(p.grad is None for p in model.parameters())
        results.append([*model.parameters(), *(s["exp_avg_sq"] for s in optimizer.state.values())])
    for mine, theirs in zip(*results, strict=True):
        assert same_bits(mine.detach(), theirs.detach())


@pytest.mark.parametrize("limit", [0, 300, WAITING_BYTES])
@pytest.mark.parametrize("keep_bytes", [0, 400, 1 << 20])
@pytest.mark.parametrize("nonfinite", ["propagate", "raise"])
def test_two_passes_that_look_at_gradients_together_are_those_that_look_at_each(
    monkeypatch: pytest.MonkeyPatch, nonfinite: Any, keep_bytes: int, limit: int
) -> None:
    monkeypatch.setattr(handle_module, "WAITING_BYTES", limit)
    seen: list[int] = []
    see = LookAhead.see
    monkeypatch.setattr(LookAhead, "see", lambda *a: (seen.append(1), see(*a))[1])
    results, norms = [], []
    for together in (False, True):
        seen.clear()
        model = Twice()
        optimizer = optim.AdamW(
            model.parameters(), lr=0.1, precision="auto", nonfinite=nonfinite, seed=1
        )
        options = {"max_norm": 0.01, "keep_bytes": keep_bytes}
        with optim.fuse_backward(model, optimizer, **options) as handle:  # type: ignore[arg-type]
            handle._has_sharded = not together
            for t in range(3):
                handle.backward(model(torch.randn(4, 8, generator=seeded(t))).square().sum())
                assert all(p.grad is None for p in model.parameters())
                norms.append(handle.total_norm)
        assert bool(seen) != together
        results.append([*model.parameters(), *(s["exp_avg_sq"] for s in optimizer.state.values())])
    for mine, theirs in zip(*results, strict=True):
        assert same_bits(mine.detach(), theirs.detach())
    for first, second in zip(norms[:3], norms[3:], strict=True):
        assert first is not None
        assert second is not None
        assert same_bits(first, second)


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize("own", [False, True], ids=["loss.backward", "handle.backward"])
def test_what_waits_when_a_pass_is_refused_is_dropped(own: bool) -> None:
    """A sparse gradient, behind others that wait to be looked at."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with optim.fuse_backward(model, optimizer) as handle:
        loss = model(torch.tensor([1, 2])).sum()
        with pytest.raises(ValueError, match=r"parameter 0.* has layout torch.sparse_coo"):
            handle.backward(loss) if own else loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))
    assert not optimizer.state
    assert not handle._arrived


# ------------------------------------------------------------------------------- pause, failure


def gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).to(torch.bfloat16)
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(torch.bfloat16)
    return generator, discriminator


def test_a_paused_discriminator_does_not_learn_from_the_generators_loss() -> None:
    """As without fusion, where the discriminator's gradients are zeroed before its own step."""
    results = []
    for fused in (False, True):
        g, d = gan()
        optimizers = [optim.AdamW(m.parameters(), lr=0.01, seed=1) for m in (g, d)]
        handles = [
            optim.fuse_backward(m, o) for m, o in zip((g, d), optimizers, strict=True) if fused
        ]
        data = torch.Generator().manual_seed(1)
        for _ in range(4):
            real = torch.randn(5, 6, generator=data).to(torch.bfloat16)
            noise = torch.randn(5, 4, generator=data).to(torch.bfloat16)
            optimizers[1].zero_grad()
            (nn.functional.softplus(-d(real)) + nn.functional.softplus(d(g(noise).detach()))).mean(
                0
            ).sum().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            with handles[1].paused() if fused else contextlib.nullcontext():
                nn.functional.softplus(-d(g(noise))).mean().backward()
            optimizers[0].step()
            if fused:
                assert all(p.grad is None for m in (g, d) for p in m.parameters())
        results.append([p.detach() for m in (g, d) for p in m.parameters()])
    for p, q in zip(*results, strict=True):
        assert same_bits(p, q)


def test_pauses_nest_and_refuse_backward() -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    handle = optim.fuse_backward(model, optimizer)
    before = model.weight.detach().clone()
    with handle.paused():
        with handle.paused():
            model(torch.ones(1, 3)).sum().backward()
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="while the handle is paused"):
            handle.backward(model(torch.ones(1, 3)).sum())
    assert torch.equal(model.weight, before)
    model(torch.ones(1, 3)).sum().backward()
    assert not torch.equal(model.weight, before)


def test_parameters_outside_the_model_are_refused() -> None:
    model, head = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 2 of group 0 .* is not in the model"):
        optim.fuse_backward(model, optimizer)
    assert optimizer.fused is None
    optim.fuse_backward(nn.Sequential(model, head), optimizer)


class Fails(torch.autograd.Function):
    """Passes on; its backward pass fails while ``Fails.now`` is set."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.now:
            raise ArithmeticError("in the backward pass")
        return grad


class Brittle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Fails.apply(self.first(x)))


@pytest.mark.parametrize("own", [False, True], ids=["loss.backward", "handle.backward"])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("form", ["param", "fp32", "expansion"])
@pytest.mark.parametrize("limit", [0, WAITING_BYTES])
def test_a_pass_that_failed_is_run_again(
    monkeypatch: pytest.MonkeyPatch, form: str, failing: int, own: bool, limit: int
) -> None:
    """What was accumulated survives, and no gradient is counted twice."""
    monkeypatch.setattr(handle_module, "WAITING_BYTES", limit)
    results = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = Brittle().to(torch.bfloat16)
        optimizer = optim.AdamW(model.parameters(), lr=0.01, seed=1)
        handle = optim.fuse_backward(model, optimizer, accumulate=3, accumulate_in=form)
        data = torch.Generator().manual_seed(2)
        for i in range(6):
            x = torch.randn(5, 4, generator=data).to(torch.bfloat16)

            backward = handle.backward if own else torch.Tensor.backward
            if fails and i == failing:
                Fails.now = True
                with pytest.raises(ArithmeticError):
                    backward(model(x).square().sum())
                Fails.now = False
            backward(model(x).square().sum())
        assert [int(s["step"]) for s in optimizer.state.values()] == [2] * 4
        results.append([p.detach() for p in model.parameters()])
    if (failing, limit) != (2, 0):
        # There the pass that is run again goes through weights that have stepped already.
        for p, q in zip(*results, strict=True):
            assert same_bits(p, q)


def test_a_plain_pass_that_failed_is_forgotten() -> None:
    torch.manual_seed(0)
    model = Brittle()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optim.fuse_backward(model, optimizer)
    Fails.now = True
    with pytest.raises(ArithmeticError):
        model(torch.ones(1, 4)).sum().backward()
    Fails.now = False
    model(torch.ones(1, 4)).sum().backward()
    assert int(optimizer.state[model.first.weight]["step"]) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.0),
        ({"accumulate": 2}, 2.0),
        ({"accumulate": 2, "accumulate_in": "fp32"}, 4.0),
        ({"accumulate": 2, "accumulate_in": "expansion"}, 4.0),
        ({"accumulate": 2, "accumulate_in": "adam-moments"}, 0.0),
    ],
    ids=str,
)
def test_gradients_count_as_long_as_they_live(options: dict, expected: float) -> None:
    model = nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters())
    assert optimizer.bytes_per_parameter()["gradient"] == 2.0
    with optim.fuse_backward(model, optimizer, **options):
        assert optimizer.bytes_per_parameter()["gradient"] == expected
    assert optimizer.bytes_per_parameter()["gradient"] == 2.0


def test_hooks_that_would_be_called_too_late_are_refused():
    model = torch.nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    seen = []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    message = "a hook of register_step_pre_hook, and a step fused into the backward pass"
    with pytest.raises(RuntimeError, match=message):
        optim.fuse_backward(model, optimizer)
    before.remove()
    with optim.fuse_backward(model, optimizer):
        with pytest.raises(RuntimeError, match=message):
            optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert seen == ["after"]
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert seen == ["after", "before", "after"]


def test_hooks_of_all_optimizers_are_refused_too():
    model = torch.nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    message = "a hook of register_step_pre_hook, and a step fused into the backward pass"
    hook = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match=message):
            optim.fuse_backward(model, optimizer)
    finally:
        hook.remove()
    with optim.fuse_backward(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        hook = register_optimizer_step_pre_hook(lambda *_: None)
        try:
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(RuntimeError, match=message):
                optimizer.step()
        finally:
            hook.remove()

"""Backward passes that fail, or run others inside them: nothing of one enters another's step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subulp import nn as subulp_nn
from subulp import optim

from ..support import same_bits

X = torch.ones(2, 4)


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def fail(_: Tensor) -> Tensor:
    raise ArithmeticError("a hook of the user's")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_pass_called_from_here_forgets_a_plain_one_that_failed(accumulate: int) -> None:
    runs = []
    for fails in (False, True):
        model = pair()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with optim.fuse_backward(model, optimizer, accumulate=accumulate) as handle:
            for t in range(accumulate):
                if fails and t == accumulate - 1:
                    h = model[0](X)
                    h.register_hook(fail)
                    with pytest.raises(ArithmeticError):
                        model[1](h).square().sum().backward()
                handle.backward(model(X).square().sum())
        assert [int(s["step"]) for s in optimizer.state.values()] == [1] * 4
        runs.append([p.detach() for p in model.parameters()])
    for p, q in zip(*runs, strict=True):
        assert same_bits(p, q)


@pytest.mark.parametrize(
    "fault",
    ["a plain pass", "an option"],
)
def test_a_refused_pass_leaves_no_gradient(fault: str) -> None:
    options = {"max_norm": 1.0} if fault == "a plain pass" else {}
    runs = []
    for fails in (False, True):
        model = pair()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with optim.fuse_backward(model, optimizer, **options) as handle:
            if fails:
                optimizer.param_groups[0]["lr"] = 0.1 if options else -1.0
                with pytest.raises((RuntimeError, ValueError)):
                    model(X).square().sum().backward()
                assert all(p.grad is None for p in model.parameters())
            optimizer.param_groups[0]["lr"] = 0.1
            handle.backward(model(X).square().sum())
            runs.append([p.detach() for p in model.parameters()])
    for p, q in zip(*runs, strict=True):
        assert same_bits(p, q)


def test_a_gradient_that_no_step_will_take_is_refused() -> None:
    """Left by somebody's hook that failed before ours was called; or given by hand."""
    model = pair()
    model[1].bias.register_post_accumulate_grad_hook(fail)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with optim.fuse_backward(model, optimizer) as handle:
        with pytest.raises(ArithmeticError):
            model(X).square().sum().backward()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match="has a gradient that no fused step has taken"):
            handle.backward(model(X).square().sum())
        assert all(same_bits(v, before[k]) for k, v in model.state_dict().items())


def test_swapped_parameters_are_noticed() -> None:
    """torch can swap what tensors are, which takes hooks away with the old ones."""
    model = pair()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with optim.fuse_backward(model, optimizer) as handle:
            handle.backward(model(X).square().sum())
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
            handle.backward(model(X).square().sum())
            with pytest.raises(RuntimeError, match="changed by model"):
                handle.backward(model(X).square().sum())
            for p in model.parameters():
                p.grad = None
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# ---------------------------------------------------------------------- passes inside of a pass


class Again(torch.autograd.Function):
    """A segment that is computed again in a backward pass of its own, as some libraries do it."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def three() -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    first, body, last = (nn.Linear(4, 4) for _ in range(3))
    return first, body, last


@pytest.mark.parametrize("called", ["loss.backward()", "handle.backward(loss)"])
def test_a_pass_inside_of_a_pass_is_a_part_of_it(called: str) -> None:
    runs = []
    for fused in (False, True):
        first, body, last = three()
        model = nn.ModuleList([first, body, last])
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        handle = optim.fuse_backward(model, optimizer) if fused else None
        for _ in range(3):
            loss = last(Again.apply(body, first(X))).square().sum()
            if handle is not None and called == "handle.backward(loss)":
                handle.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [int(s["step"]) for s in optimizer.state.values()] == [3] * 6
        runs.append([p.detach() for p in model.parameters()])
    for p, q in zip(*runs, strict=True):
        assert same_bits(p, q)


def test_a_pass_that_begins_inside_of_another_is_refused() -> None:
    """Its end is not the end of the pass, and whatever comes later would step on its own."""
    first, body, last = three()
    model = nn.ModuleList([first, body])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with (
        optim.fuse_backward(model, optimizer),
        pytest.raises(RuntimeError, match="a backward pass inside the backward pass"),
    ):
        last(Again.apply(body, first(X))).square().sum().backward()


def test_leaves_of_others_have_their_gradients_once() -> None:
    found = []
    for fused in (False, True):
        first, body, last = three()
        ours = optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
        loss = last(Again.apply(body, first(X))).square().sum()
        if fused:
            model = nn.ModuleList([first, body, last])
            with optim.fuse_backward(model, ours, max_norm=1.0) as handle:
                handle.backward(loss)
        else:
            loss.backward()
        found.append([p.grad for p in body.parameters()])
    for p, q in zip(*found, strict=True):
        assert same_bits(p, q)


def step(
    loss: Tensor, handle: Any, dense: nn.Module, optimizer: Any, max_norm: float | None
) -> None:
    """A step, fused if there is a handle."""
    if handle is not None:
        handle.backward(loss)
        return
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(dense.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


class Segment:
    def __init__(self, layer: nn.Module, rows: nn.Module, *arguments: Tensor) -> None:
        self.layer, self.rows, self.arguments = layer, rows, arguments

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(self.rows(*self.arguments) + x)


class HeadSegment(Segment):
    def __call__(self, x: Tensor) -> Tensor:
        return self.rows(self.layer(x), *self.arguments)


@pytest.mark.parametrize("what", ["before", "inside"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_tables_step_once_beside_reentrant_checkpoints(what: str, max_norm: float | None) -> None:
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        bag = subulp_nn.CachedEmbeddingBag(100, 8, storage="int8", seed=0)
        optim.RowSGD(bag, lr=0.1)
        dense = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 1)])
        optimizer = optim.SGD(dense.parameters(), lr=0.1)
        values, offsets = torch.arange(16), torch.arange(0, 16, 4)
        handle = optim.fuse_backward(dense, optimizer, max_norm=max_norm) if fused else None
        segment = Segment(dense[0], bag, values, offsets)
        for _ in range(2):
            if what == "before":
                h = checkpoint(dense[0], bag(values, offsets), use_reentrant=True)
            else:
                h = checkpoint(segment, torch.zeros(4, 8, requires_grad=True), use_reentrant=True)
            loss = dense[1](h).square().sum()
            step(loss, handle, dense, optimizer, max_norm)
        assert bag.steps == 2
        runs.append([bag.weight_fp32(), *(p.detach() for p in dense.parameters())])
    for p, q in zip(*runs, strict=True):
        assert same_bits(p, q)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_heads_step_once_inside_of_reentrant_checkpoints(max_norm: float | None) -> None:
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        head = subulp_nn.ExtremeClassifier(8, 20, seed=0, reduction="sum")
        optim.RowSGD(head, lr=0.1)
        dense = nn.Linear(4, 8)
        optimizer = optim.SGD(dense.parameters(), lr=0.1)
        rows, columns = torch.tensor([0, 1]), torch.tensor([3, 7])
        handle = optim.fuse_backward(dense, optimizer, max_norm=max_norm) if fused else None
        segment = HeadSegment(dense, head, rows, columns)
        for _ in range(2):
            loss = checkpoint(segment, X.clone().requires_grad_(), use_reentrant=True)
            step(loss, handle, dense, optimizer, max_norm)
        assert head.steps == 2
        runs.append([head.weight(torch.arange(20)), *(p.detach() for p in dense.parameters())])
    for p, q in zip(*runs, strict=True):
        assert same_bits(p, q)


@pytest.mark.parametrize("reentrant", [False, True])
def test_batch_statistics_count_a_batch_as_often_as_without(reentrant: bool) -> None:
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        handle = optim.fuse_backward(model, optimizer, max_norm=1.0) if fused else None
        for _ in range(2):
            x = torch.randn(8, 4, requires_grad=True)
            loss = checkpoint(model, x, use_reentrant=reentrant).square().sum()
            step(loss, handle, model, optimizer, 1.0)
        runs.append(list(model.state_dict().values()))
    for p, q in zip(*runs, strict=True):
        assert same_bits(p, q)


# ------------------------------------------------------------------------ Adam's moments, groups


def test_moments_that_are_loaded_hold_no_part_of_a_step() -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    options = {"accumulate": 2, "accumulate_in": "adam-moments"}
    with optim.fuse_backward(model, optimizer, **options) as handle:
        for _ in range(2):
            handle.backward(model(torch.eye(4)).sum())
        saved = copy.deepcopy(optimizer.state_dict())
        handle.backward(model(torch.eye(4)).sum())
        with pytest.raises(RuntimeError, match="1 of accumulate=2 backward passes"):
            optimizer.state_dict()
        optimizer.load_state_dict(saved)
        again = copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            handle.backward(model(torch.eye(4)).sum())
    other = nn.Linear(4, 1, bias=False)
    theirs = optim.AdamW(other.parameters(), lr=0.01)
    theirs.load_state_dict(again)
    with optim.fuse_backward(other, theirs, **options) as handle:
        for _ in range(2):
            handle.backward(other(torch.eye(4)).sum())
    mine, its = (o.state_dict()["state"][0] for o in (optimizer, theirs))
    assert all(same_bits(mine[name], its[name]) for name in mine)


@pytest.mark.parametrize("form", ["param", "adam-moments"])
def test_groups_in_another_order(form: str) -> None:
    """Each parameter steps with the options of its group, wherever that stands."""
    runs = []
    for late in (False, True):
        model = pair()
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
        optimizer = optim.AdamW(groups, lr=0.1)
        if not late:
            optimizer.param_groups.reverse()
        with optim.fuse_backward(model, optimizer, accumulate=2, accumulate_in=form) as handle:
            if late:
                optimizer.param_groups.reverse()
            for _ in range(2):
                handle.backward(model(X).sum())
        runs.append([p.detach() for p in model.parameters()])
    for p, q in zip(*runs, strict=True):
        assert same_bits(p, q)


def test_parameters_taken_away_while_fused_are_noticed() -> None:
    model = pair()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with optim.fuse_backward(model, optimizer) as handle:
        optimizer.param_groups[0]["params"].pop()
        with pytest.raises(RuntimeError, match="added to the optimizer's groups, or taken away"):
            handle.backward(model(X).sum())


def test_two_fused_optimizers_of_one_parameter_are_refused() -> None:
    model = pair()
    whole = optim.SGD(model.parameters(), lr=0.1)
    part = optim.SGD(model[1].parameters(), lr=0.1)
    with optim.fuse_backward(model, whole), pytest.raises(ValueError, match="by another optimizer"):
        optim.fuse_backward(model, part)
    optim.fuse_backward(model, part).remove()

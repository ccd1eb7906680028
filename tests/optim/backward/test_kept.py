"""Gradients that the first of two backward passes keeps, and what the second then leaves out."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from subulp import diagnostics, optim

from ..support import BF16, FP32
from .twins import MAKERS, Model, assert_same, batches, loss_of, twins

ALL = 1 << 30


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


class Stack(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
            x = torch.tanh(x)
        return x


@pytest.mark.parametrize("keep", [0, 40, 700, 3000, ALL])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_same_bits_whatever_is_kept(dtype: torch.dtype, accumulate: int, keep: int) -> None:
    """Tied, repeated, frozen, unused and checkpointed parameters."""
    plain, fused = twins(MAKERS["adamw"]("auto"), dtype)
    options: dict[str, Any] = {"max_norm": 0.1, "keep_bytes": keep, "accumulate": accumulate}
    with optim.fuse_backward(*fused, **options) as handle:
        for i, batch in enumerate(batches(4, dtype)):
            loss_of(plain[0], batch).backward()
            handle.backward(loss_of(fused[0], batch))
            if (i + 1) % accumulate:
                continue
            total = nn.utils.clip_grad_norm_(plain[0].parameters(), 0.1)
            plain[1].step()
            plain[1].zero_grad()
            assert handle.total_norm is not None
            assert torch.equal(handle.total_norm, total)
    assert_same(plain, fused)
    assert all(p.grad is None for p in fused[0].parameters())


@pytest.mark.parametrize("reduced", [False, True])
def test_same_bits_with_a_scaler_and_a_reduction(reduced: bool) -> None:
    results = []
    for keep in (0, 900, ALL):
        _, (model, optimizer) = twins(MAKERS["sgd"]("auto"), FP32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        reduce = (lambda grad: grad * 0.5) if reduced else None
        with optim.fuse_backward(
            model, optimizer, max_norm=0.1, scaler=scaler, reduce=reduce, keep_bytes=keep
        ) as handle:
            for i, batch in enumerate(batches(4, FP32)):
                loss = scaler.scale(loss_of(model, batch))
                handle.backward(loss * torch.inf if i == 2 else loss)
                scaler.update()
        assert optimizer.skipped_steps == 1
        results.append((model, optimizer))
    for result in results[1:]:
        assert_same(results[0], result)


def test_several_losses_and_a_graph_that_is_retained() -> None:
    plain, fused = twins(MAKERS["adamw"]("auto"), FP32)
    with optim.fuse_backward(*fused, max_norm=0.1, keep_bytes=800) as handle:
        for batch in batches(3, FP32):
            losses = [(model(batch[0]) - batch[1]).square().mean(1) for model, _ in (plain, fused)]
            start = torch.ones(8)
            for again in (True, False):
                # The weights have changed in between, which products of them must not notice.
                torch.autograd.backward((losses[0].sum(), losses[0].mean()), retain_graph=again)
                nn.utils.clip_grad_norm_(plain[0].parameters(), 0.1)
                if not again:
                    break
                plain[1].zero_grad()
            handle.backward([losses[1] @ start, losses[1].mean()])
            plain[1].step()
            plain[1].zero_grad()
    assert_same(plain, fused)


@pytest.mark.parametrize(("keep", "products"), [(0, 14), (2200, 11), (ALL, 7)])
def test_the_second_pass_computes_no_gradient_that_was_kept(keep: int, products: int) -> None:
    """A layer has 1,088 bytes of gradients and two products, the first one product.

    Where kept layers begin, the gradient that goes down to them is computed in vain.
    """
    torch.manual_seed(0)
    model = Stack()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with optim.fuse_backward(model, optimizer, max_norm=1.0, keep_bytes=keep) as handle:
        loss = model(torch.randn(3, 16)).square().sum()
        with Products() as found:
            handle.backward(loss)
    assert found.count == products


def test_a_function_of_others_runs_whatever_is_kept() -> None:
    """It may run a backward pass of its own, which reaches parameters that no graph shows."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
            ctx.x, ctx.layer = x, layer
            return layer(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            x = ctx.x.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.layer(x)
            y.backward(grad)
            return x.grad, None

    results = []
    for keep in (0, 100, 200, ALL):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with optim.fuse_backward(model, optimizer, max_norm=1.0, keep_bytes=keep) as handle:
            handle.backward(model[2](Hidden.apply(model[0](torch.ones(2, 4)), model[1])).sum())
        results.append([p.detach() for p in model.parameters()])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("keep", [0, 3 * 1024, ALL])
def test_the_graph_is_freed(keep: int) -> None:
    """The user may hold on to the loss until the next one is computed."""
    model = Stack()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with optim.fuse_backward(model, optimizer, max_norm=1.0, keep_bytes=keep) as handle:
        x = torch.randn(3, 16, requires_grad=True)
        weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), x)}
        activations = []

        def note(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                activations.append(weakref.ref(tensor.untyped_storage()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(x).square().sum()
        handle.backward(loss)
        gc.collect()
        assert activations
        assert [a() for a in activations if a() is not None] == []
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("keep", [0, 2048, 8192])
def test_peak_memory_grows_by_no_more_than_the_budget(keep: int) -> None:
    peaks = []
    for options in ({}, {"max_norm": 1.0, "keep_bytes": keep}):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(256, 32)
        with optim.fuse_backward(model, optimizer, **options) as handle:
            for _ in range(2):
                with diagnostics.track_memory(model, optimizer) as memory:
                    loss = model(x).square().sum()
                    handle.backward(loss)
        peaks.append(memory.peak_bytes["total"])
    # Besides: a norm of each gradient, and the factor.
    assert peaks[1] <= peaks[0] + keep + 12 * 4 + 1024


@pytest.mark.parametrize("reentrant", [False, True])
def test_leaves_of_others_have_their_gradient_once(reentrant: bool) -> None:
    """A parameter that the optimizer does not step, and an input."""
    for keep in (0, 1500, ALL):
        torch.manual_seed(0)
        model = Stack(reentrant)
        optimizer = optim.SGD(model.layers[2:].parameters(), lr=0.1)
        other = copy.deepcopy(model)
        x, y = (torch.ones(3, 16, requires_grad=True) for _ in range(2))
        for leaf in (x, y, model.layers[0].weight, other.layers[0].weight):
            leaf.grad = torch.ones_like(leaf)
        before = model.layers[2].weight.detach().clone()
        with optim.fuse_backward(model, optimizer, max_norm=1.0, keep_bytes=keep) as handle:
            handle.backward(model(x).square().sum())
        other(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        for p, q in zip(model.layers[:2].parameters(), other.layers[:2].parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        assert not torch.equal(model.layers[2].weight, before)


def test_a_function_that_gives_no_gradient_reaches_nothing() -> None:
    class Ignores(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    for options in ({}, {"max_norm": 1.0}, {"max_norm": 1.0, "keep_bytes": ALL}):
        model = nn.Linear(4, 4)
        optimizer = optim.AdamW(model.parameters(), weight_decay=0.1)
        before = model.weight.detach().clone()
        with optim.fuse_backward(model, optimizer, **options) as handle:
            handle.backward(Ignores.apply(model.bias * 2, model.weight).sum())
        # As without fusion: no gradient, no step, no decay.
        assert torch.equal(model.weight, before)
        assert model.weight not in optimizer.state


def test_errors() -> None:
    model = Model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for wrong in (-1, 0.5, True, None):
        with pytest.raises(ValueError, match="keep_bytes"):
            optim.fuse_backward(model, optimizer, max_norm=1.0, keep_bytes=wrong)
    with pytest.raises(ValueError, match=r"keep_bytes=10 .* one pass"):
        optim.fuse_backward(model, optimizer, keep_bytes=10)
    assert optimizer.fused is None

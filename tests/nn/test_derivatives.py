"""What is differentiated in ways that a module's own backward pass does not serve, is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from subulp import nn as subulp_nn
from subulp import optim

BF16 = torch.bfloat16


def image(x: Tensor) -> Tensor:
    return x.view(8, 1, 4, 4)


class Image(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return image(x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = subulp_nn.ExtremeClassifier(16, 20, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head.eval()(x, torch.tensor([0, 1]), torch.tensor([3, 7]))


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = subulp_nn.CachedEmbeddingBag(30, 4, seed=0)
        self.rule = optim.RowSGD(self.bag, lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        values = torch.arange(x.numel()) % 30
        return self.bag(values, torch.arange(0, x.numel(), 16), x.reshape(-1))


LAYERS = {
    "Linear": lambda: subulp_nn.Linear(16, 1).to(BF16),
    "Linear, fp8": lambda: subulp_nn.Linear(16, 1, products="fp8"),
    "MoRLinear": lambda: subulp_nn.MoRLinear(16, 1),
    "Conv2d": lambda: nn.Sequential(Image(), subulp_nn.Conv2d(1, 2, 3).to(BF16)),
    "ExtremeClassifier": Head,
    "CachedEmbeddingBag": Weights,
    "CachedEmbeddingBag, frozen": lambda: Weights().requires_grad_(False),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("reduce", [Tensor.sum, lambda out: out.square().sum()])
def test_a_penalty_on_a_gradient_is_refused(name: str, reduce: Callable) -> None:
    """As WGAN-GP has it. The gradient of a sum requires none: torch's decorator says nothing."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    y = torch.randn(8, 16, requires_grad=True)
    h = torch.tanh(y)
    out = layer(h)
    loss = reduce(out)
    (gradient,) = torch.autograd.grad(loss, y, create_graph=True)
    assert gradient.requires_grad
    (plain,) = torch.autograd.grad(reduce(layer(torch.tanh(y))), y)
    assert torch.equal(gradient.detach(), plain)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    with pytest.raises(RuntimeError, match="is differentiated, and has no derivative"):
        penalty.backward()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["ExtremeClassifier", "MoRLinear", "CachedEmbeddingBag, frozen"])
def test_tangents_are_refused(name: str, grad: bool) -> None:
    """Forward-mode differentiation; without a word the derivative would be lost."""
    layer = LAYERS[name]().eval()
    x, t = torch.randn(8, 16), torch.randn(8, 16)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        dual = forward_ad.make_dual(x, t)
        with pytest.raises((NotImplementedError, RuntimeError), match=r"tangent|forward mode|jvp"):
            layer(dual)


def test_a_refused_tangent_steps_nothing() -> None:
    head = subulp_nn.ExtremeClassifier(8, 20, storage="fp32", seed=0)
    optim.RowSGD(head, lr=0.1)
    before = head.weight(torch.arange(20))
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(4, 8), torch.randn(4, 8))
        with pytest.raises(NotImplementedError, match="embeddings has a tangent"):
            head(x, torch.tensor([0]), torch.tensor([3]))
        with pytest.raises(NotImplementedError, match="embeddings has a tangent"):
            head.topk(x)
    assert head.steps == 0
    assert torch.equal(before, head.weight(torch.arange(20)))


def test_tables_train_after_a_transform_was_refused() -> None:
    """What is made inside of torch.func's transforms is of no use outside."""
    values, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])

    def bag() -> subulp_nn.CachedEmbeddingBag:
        made = subulp_nn.CachedEmbeddingBag(30, 4, "fp32", seed=0)
        optim.RowSGD(made, lr=0.1)
        return made

    first = bag()
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with pytest.raises(RuntimeError):
            transform(lambda t: first(values, offsets).sum() * t)(torch.tensor(1.0))
    second = bag()
    out = second(values, offsets)
    assert out.requires_grad
    out.sum().backward()
    assert second.steps == 1


class TopK(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.topk(x)


def test_traces_are_refused() -> None:
    bag = subulp_nn.CachedEmbeddingBag(30, 4, "fp32", seed=0).eval()
    head = subulp_nn.ExtremeClassifier(8, 20, seed=0).eval()
    with pytest.raises(RuntimeError, match=r"use torch\.export"):
        torch.jit.trace(bag, (torch.tensor([1, 2]), torch.tensor([0])))
    with pytest.raises(RuntimeError, match=r"use torch\.export"):
        torch.jit.trace(TopK(head), (torch.randn(4, 8),))

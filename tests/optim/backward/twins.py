"""One model twice, to be trained with the step inside the backward pass and after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subulp import optim

from ..support import same_bits


class Model(nn.Module):
    """Tied, repeated, frozen, unused and checkpointed parameters in one."""

    def __init__(self, use_checkpoint: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16, bias=False)
        self.repeated = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.segment = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().t().clone())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.use_checkpoint = use_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = self.repeated(torch.tanh(self.repeated(h))) + self.frozen(h)
        if self.use_checkpoint:
            h = h + checkpoint(self.segment, h, use_reentrant=False)
        else:
            h = h + self.segment(h)
        # The embedding's weight again, transposed: a tied use.
        return self.head(h) + h @ self.embed.weight * self.scale


def batches(count: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(8, 12, generator=generator).to(dtype),
            torch.randn(8, 12, generator=generator).to(dtype),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def twins(
    make: Callable[[Any], optim.AdamW], dtype: torch.dtype
) -> list[tuple[Model, optim.AdamW]]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    other = copy.deepcopy(model)
    return [(m, make(m.parameters())) for m in (model, other)]


def assert_same(a: tuple[Model, Any], b: tuple[Model, Any]) -> None:
    for (name, p), q in zip(a[0].named_parameters(), b[0].parameters(), strict=True):
        assert same_bits(p, q), name
    mine, theirs = a[1].state_dict(), b[1].state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for key, state in mine["state"].items():
        for name, value in state.items():
            assert same_bits(value, theirs["state"][key][name]), name


MAKERS = {
    "adamw": lambda precision: lambda p: optim.AdamW(p, lr=1e-2, precision=precision, seed=1),
    "adam": lambda precision: (
        lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1, precision=precision, seed=1)
    ),
    "sgd": lambda precision: (
        lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, precision=precision, seed=1)
    ),
}

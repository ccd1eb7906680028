"""What a GPU saves a CPU goes on with, to the same bits, and the other way round."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from subulp import nn, optim
from tests.ops.support import environment

from .places import kernels_of, on_every_device, same_bits, tensors_of
from .test_heads import one_hot
from .test_tables import CONFIGS, batch

BF16 = torch.bfloat16
CPU = torch.device("cpu")


class Bags:
    """Tables of every kind, with Adagrad's sums."""

    def __init__(self, place: torch.device) -> None:
        self.module = nn.CachedEmbeddingBags(CONFIGS, narrow_above=0, seed=3, device=place)
        self.optimizer = optim.RowAdagrad(self.module, lr=0.1, rowwise=True)
        self.place = place

    def step(self, number: int) -> None:
        values, lengths, grad = batch(number, self.place)
        self.module(values, lengths).backward(grad)


class Head:
    """Rows that step with their inputs' products, which round nothing but their result."""

    def __init__(self, place: torch.device) -> None:
        self.module = nn.ExtremeClassifier(
            *(32, 70), storage="e4m3", chunks=3, seed=1, products="fp32", device=place
        )
        self.optimizer = optim.RowSGD(self.module, lr=0.5)
        self.place = place

    def step(self, number: int) -> None:
        positives = torch.tensor([number, 40, 69], device=self.place)
        self.module(one_hot(self.place, 32), torch.zeros_like(positives), positives).backward()


class Mixture:
    """A layer whose gradient is of numbers that any order of sums adds up exactly."""

    def __init__(self, place: torch.device) -> None:
        torch.manual_seed(0)
        layer = nn.MoRLinear(64, 32, mor=nn.MoR("subtensor-3way", "block-128x128"))
        self.module = layer.to(BF16).to(place)
        options: dict[str, Any] = {"precision": "collage-plus", "seed": 0}
        self.optimizer = optim.AdamW(self.module.parameters(), lr=0.01, **options)
        self.place = place

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        x = torch.zeros(1, 64, dtype=BF16, device=self.place)
        x[0, number], x[0, number + 7] = 1.0, -0.5
        self.module(x).sum().backward()
        self.optimizer.step()


def saved(training: Any) -> tuple[Any, ...]:
    """Both state dicts, as a file holds them that is read on a CPU."""
    file = io.BytesIO()
    torch.save([training.module.state_dict(), training.optimizer.state_dict()], file)
    file.seek(0)
    return tuple(torch.load(file, map_location="cpu", weights_only=True))


def resumed(kind: Callable[[torch.device], Any], place: torch.device, states: Any) -> Any:
    training = kind(place)
    training.module.load_state_dict(states[0])
    training.optimizer.load_state_dict(states[1])
    return training


def same_states(a: Any, b: Any) -> bool:
    pairs = zip(*(tensors_of(saved(training)) for training in (a, b)), strict=True)
    return all(same_bits(x, y) for x, y in pairs)


@on_every_device
@pytest.mark.parametrize("kind", [Bags, Head, Mixture])
@pytest.mark.parametrize("to_cpu", [True, False], ids=["to the CPU", "from the CPU"])
def test_a_training_goes_on_elsewhere(device, kind, to_cpu):
    with environment(SUBULP_BACKEND="cpu"):
        whole = kind(CPU)
        for number in (1, 2):
            whole.step(number)
        first_half = saved(whole)
        whole.step(3)
    if to_cpu:
        with kernels_of(device) as place:
            begun = kind(place)
            for number in (1, 2):
                begun.step(number)
            states = saved(begun)
        with environment(SUBULP_BACKEND="cpu"):
            rest = resumed(kind, CPU, states)
            rest.step(3)
    else:
        with kernels_of(device) as place:
            rest = resumed(kind, place, first_half)
            rest.step(3)
    assert same_states(whole, rest)


@on_every_device
def test_another_mixtures_state_is_refused(device):
    with kernels_of(device) as place:
        states = saved(Mixture(place))
    other = nn.MoRLinear(64, 32, mor=nn.MoR("tensor", "tensor")).to(BF16)
    with pytest.raises(ValueError, match="this state dict is of a layer with"):
        other.load_state_dict(states[0])

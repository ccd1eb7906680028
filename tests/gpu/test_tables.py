"""Embedding tables on a GPU: the CPU's bits, forward and backward, and what is wrong is told."""

from __future__ import annotations

import pytest
import torch

from subulp import nn, optim
from subulp.nn.cached_table import EmbeddingTable

from .places import kernels_of, on_both, on_every_device, same_bits, tensors_of

CONFIGS = [
    EmbeddingTable(40, 20, "int8", 0.2, "lfu", 4),
    EmbeddingTable(33, 5, "int4", 0.2, "lru", 2, hash="mixed"),
    EmbeddingTable(9, 16, "fp32"),
    EmbeddingTable(30, 8, "e4m3", 0.0),
    EmbeddingTable(30, 8, "bf16", 0.1, "lru", 1, rounding="nearest"),
]
BAGS = 3


def batch(step: int, place: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 6, (len(CONFIGS) * BAGS,), generator=generator)
    rows = torch.tensor([config.num_embeddings for config in CONFIGS])
    limits = rows.repeat_interleave(BAGS).repeat_interleave(lengths)
    values = (torch.rand(len(limits), generator=generator) ** 2 * limits).long()
    grad = torch.randn(BAGS, sum(c.embedding_dim for c in CONFIGS), generator=generator)
    return values.to(place), lengths.to(place), grad.to(place)


def made(place: torch.device, rule: str) -> torch.nn.Module:
    bags = nn.CachedEmbeddingBags(CONFIGS, narrow_above=0, seed=3, device=place)
    if rule == "sgd":
        optim.RowSGD(bags, lr=0.1, weight_decay=0.01)
    else:
        optim.RowAdagrad(bags, lr=0.1, rowwise=rule == "rowwise")
    return bags


def twice(call) -> None:
    """A GPU tells what is wrong to a later call."""
    for _ in range(2):
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@on_every_device
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise"])
def test_training(device, rule):
    def train(place):
        bags, seen = made(place, rule), []
        for step in range(1, 4):
            values, lengths, grad = batch(step, place)
            out = bags(values, lengths)
            out.backward(grad)
            seen.append(out.detach())
        return [*seen, *tensors_of(bags.state_dict()), bags.statistics, bags.evicted]

    for a, b in zip(*on_both(device, train), strict=True):
        assert same_bits(a, b)


FEW = {
    "no bags": ([], []),
    "empty bags": ([], [0] * 4),
    "one bag": ([3, 3], [0, 2, 0, 0]),
    "one table": ([0, 0, 0], [0, 0, 0, 3]),
    "one row": ([5] * 130 + [0], [130, 0, 0, 1]),
}


@on_every_device
@pytest.mark.parametrize("lookups", FEW)
def test_few_lookups(device, lookups):
    values, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in FEW[lookups])

    def train(place):
        configs = [EmbeddingTable(6, 3, "int8", 0.5), EmbeddingTable(1, 1, "fp32")]
        bags = nn.CachedEmbeddingBags(configs, narrow_above=0, seed=0, device=place)
        optim.RowAdagrad(bags, lr=0.1)
        out = bags(values.to(place), lengths.to(place))
        out.sum().backward()
        return [out.detach(), *tensors_of(bags.state_dict())]

    for a, b in zip(*on_both(device, train), strict=True):
        assert same_bits(a, b)


@on_every_device
def test_gradients_of_weights(device):
    def compute(place):
        bags = made(place, "sgd").eval()
        values, lengths, grad = batch(1, place)
        weights = torch.linspace(-1, 1, len(values), device=place).requires_grad_()
        bags(values, lengths, per_sample_weights=weights).backward(grad)
        return weights.grad

    assert same_bits(*on_both(device, compute))


@on_every_device
def test_a_row_number_that_does_not_exist(device):
    with kernels_of(device) as place:
        bags = made(place, "sgd")
        before = [t.clone() for t in tensors_of(bags.state_dict())]
        values, lengths, _ = batch(1, place)
        values[0] = 40
        with pytest.raises(IndexError, match="row number 40 at position 0"):
            twice(lambda: bags(values, lengths))
        assert all(map(same_bits, before, tensors_of(bags.state_dict())))
        values, lengths, grad = batch(1, place)
        bags(values, lengths).backward(grad)


@on_every_device
def test_a_gradient_that_is_not_finite(device):
    with kernels_of(device) as place:
        bags = made(place, "rowwise")
        values, lengths, grad = batch(1, place)
        before = [t.clone() for t in tensors_of(bags.tables.state_dict())]
        grad[0, 0] = torch.nan
        with pytest.raises(FloatingPointError, match="gradient"):
            twice(lambda: bags(values, lengths).backward(grad))
        assert all(map(same_bits, before, tensors_of(bags.tables.state_dict())))

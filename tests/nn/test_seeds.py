"""Modules without a seed are all different, and torch's seed repeats them."""

from __future__ import annotations

import pytest
import torch

from subulp import nn, optim


def heads():
    return [nn.ExtremeClassifier(4, 30, storage="bf16") for _ in range(2)]


def bags():
    return [nn.CachedEmbeddingBag(30, 4, "int4") for _ in range(2)]


def rows(module):
    if isinstance(module, nn.ExtremeClassifier):
        return module.table.decode(0, 30)
    return module.weight_fp32()


@pytest.mark.parametrize("make", [heads, bags])
def test_two_modules_differ_and_are_repeated(make):
    torch.manual_seed(5)
    first = make()
    torch.manual_seed(5)
    again = make()
    assert first[0].seed != first[1].seed
    assert not torch.equal(rows(first[0]), rows(first[1]))
    for a, b in zip(first, again, strict=True):
        assert a.seed == b.seed
        assert torch.equal(rows(a), rows(b))


def test_rounding_differs_too():
    one, other = heads()
    other.table.stored.copy_(one.table.stored)
    x, index = torch.ones(2, 4), torch.tensor([0])
    for head in (one, other):
        optim.RowSGD(head, lr=1e-3)
        head(x, index, index)
    assert not torch.equal(rows(one), rows(other))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_are_words(seed):
    for make in (
        lambda: nn.ExtremeClassifier(4, 30, seed=seed),
        lambda: nn.CachedEmbeddingBag(30, 4, seed=seed),
    ):
        with pytest.raises(ValueError, match=f"seed={seed} is out of range"):
            make()

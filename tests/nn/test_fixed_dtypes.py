"""Casts of a model are for its dense layers: tables keep the dtypes that they store."""

from __future__ import annotations

import copy

import pytest
import torch

from subulp import nn, optim

CASTS = {
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.float8_e5m2),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.float64),
    "share_memory": lambda m: m.share_memory(),
}


def head(storage):
    module = nn.ExtremeClassifier(
        8, 40, storage=storage, seed=1, head_fraction=0.3, label_counts=torch.arange(40)
    )
    optim.RowSGD(module, lr=0.1)
    return module


def bag(storage, policy="lfu"):
    module = nn.CachedEmbeddingBag(100, 8, storage, 0.2, policy, 4, seed=1)
    optim.RowAdagrad(module, lr=0.1)
    return module


def train(module):
    generator = torch.Generator().manual_seed(3)
    if isinstance(module, nn.ExtremeClassifier):
        x = torch.randn(5, 8, generator=generator)
        for _ in range(2):
            module(x, torch.arange(5), torch.arange(5) * 7)
        return
    for _ in range(2):
        module(torch.randint(100, (9, 4), generator=generator)).square().sum().backward()


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    "make",
    [
        *(lambda s=s: head(s) for s in ("e4m3", "bf16", "fp16", "fp32", (4, 3), "int8")),
        *(lambda s=s: bag(s) for s in ("e4m3", "fp16", "fp32", "int4")),
        lambda: bag("int8", "lru"),
    ],
)
def test_casts_change_no_bit(make, cast):
    module = make()
    train(module)
    plain = copy.deepcopy(module)
    model = torch.nn.ModuleDict({"table": module, "dense": torch.nn.Linear(2, 2)})
    CASTS[cast](model)
    train(module)
    train(plain)
    for name, value in plain.state_dict().items():
        found = module.state_dict()[name]
        assert found.dtype == value.dtype, name
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)), name


def test_a_cast_takes_no_memory():
    module = nn.ExtremeClassifier(64, 5_000, storage="e4m3", seed=0)
    codes = module.table.codes.data_ptr()
    module.double()
    assert module.table.codes.data_ptr() == codes
    assert module.table.nbytes() == {"codes": 64 * 5_000}

"""Many tables in many steps: what is remembered of them changes no bit and hides no change."""

import copy

import pytest
import torch

from subulp import nn, optim
from subulp.nn import EmbeddingTable
from subulp.ops.kinds import FEWEST

CONFIGS = [
    EmbeddingTable(60, 8, "int8"),
    EmbeddingTable(300, 8, "int8", 0.1, "lfu", 4),
    EmbeddingTable(200, 12, "int4", 0.2, "lru", 8, "nearest", "mixed"),
    EmbeddingTable(150, 4, "e4m3", 0.0),
] * 2
ROWS = [config.num_embeddings for config in CONFIGS]
BAGS = 5
# Nothing is remembered in the first step, and made in the second: from the third on all is known.
STEPS = 4


def batch(step):
    generator = torch.Generator().manual_seed(step)
    limits = torch.tensor(ROWS).repeat_interleave(BAGS * 2)
    values = (torch.rand(len(limits), generator=generator) ** 2 * limits).long()
    return values, torch.full((len(ROWS) * BAGS,), 2)


def train(bags, optimizer, steps, backend=None, monkeypatch=None):
    for step in steps:
        if backend is not None:
            monkeypatch.setenv("SUBULP_BACKEND", backend)
        # Another rate in each step.
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        bags(*batch(step)).square().sum().backward()
    return bags


def made(rule="adagrad"):
    bags = nn.CachedEmbeddingBags(CONFIGS, 100, seed=5)
    make = optim.RowSGD if rule == "sgd" else optim.RowAdagrad
    return bags, make(bags, lr=0.1)


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_they_are_enough_to_be_remembered():
    assert 3 * len(CONFIGS) >= FEWEST


@pytest.mark.parametrize("rule", ["adagrad", "sgd"])
def test_known_tables_are_updated_as_the_reference_updates_them(rule, monkeypatch):
    found = [
        train(*made(rule), range(STEPS), backend, monkeypatch) for backend in ("cpu", "reference")
    ]
    assert same(*found)


def test_a_backend_may_change_between_steps(monkeypatch):
    bags, optimizer = made()
    for step in range(STEPS + 2):
        train(bags, optimizer, [step], ("cpu", "reference")[step % 2], monkeypatch)
    assert same(bags, train(*made(), range(STEPS + 2), "cpu", monkeypatch))


def test_tensors_that_were_replaced_are_those_that_are_updated():
    bags, optimizer = made()
    train(bags, optimizer, range(STEPS))
    copied = copy.deepcopy(bags)
    bags.load_state_dict(copied.state_dict(), assign=True)
    left = [table.cache.clone() for table in copied.tables]
    train(bags, optimizer, range(STEPS, STEPS + 2))
    assert same(bags, train(*made(), range(STEPS + 2)))
    assert any(not torch.equal(t.cache, c) for t, c in zip(bags.tables, left, strict=True))


@pytest.mark.parametrize("role", ["cache", "tags", "counts"])
def test_memory_that_was_freed_is_refused(role):
    bags, optimizer = made()
    train(bags, optimizer, range(STEPS))
    getattr(bags.table(5), role).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"without memory|beyond its storage"):
        train(bags, optimizer, [STEPS])


@pytest.mark.parametrize(
    ("role", "change", "message"),
    [
        ("tags", lambda t: t.long(), "table 5 has a cache .* expected FP32 and int32"),
        ("cache", lambda t: t.double(), "table 5 has a cache .* expected FP32 and int32"),
        ("cache", lambda t: t[:-1], "expected whole sets of 4"),
        ("counts", lambda t: t[:-1], "counts of table 5 has shape"),
    ],
)
def test_tensors_of_another_kind_are_refused(role, change, message):
    bags, optimizer = made()
    train(bags, optimizer, range(STEPS))
    tensor = getattr(bags.table(5), role)
    tensor.data = change(tensor)
    with pytest.raises(ValueError, match=message):
        train(bags, optimizer, [STEPS])


def test_strides_are_looked_at():
    bags, optimizer = made()
    train(bags, optimizer, range(STEPS))
    cache = bags.table(5).cache
    cache.data = cache.t().contiguous().t()
    with pytest.raises(ValueError, match="strides"):
        train(bags, optimizer, [STEPS])


def test_options_may_change_between_steps():
    bags, optimizer = made()
    train(bags, optimizer, range(STEPS))
    table = bags.table(5)
    frozen = copy.deepcopy(table.state_dict())
    table.requires_grad_(False)
    train(bags, optimizer, [STEPS])
    assert all(torch.equal(frozen[name], value) for name, value in table.state_dict().items())
    table.requires_grad_(True)
    train(bags, optimizer, [STEPS + 1])
    assert not torch.equal(frozen["cache"], table.cache)

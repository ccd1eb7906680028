"""Many tables in many steps: what is remembered of them changes no bit and hides no change."""

import copy

import pytest
import torch

from subulp import nn, optim
from subulp.nn import EmbeddingTable
from subulp.ops.embedding import repeat

CONFIGS = [
    EmbeddingTable(60, 8, "int8"),
    EmbeddingTable(300, 8, "int8", 0.1, "lfu", 4),
    EmbeddingTable(200, 12, "int4", 0.2, "lru", 8, "nearest", "mixed"),
    EmbeddingTable(150, 4, "e4m3", 0.0),
] * 2
ROWS = [config.num_embeddings for config in CONFIGS]
BAGS = 5
# Nothing is known in the first step: from the second on all is.
STEPS = 3


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


@pytest.fixture
def known(monkeypatch):
    """Whether the tables of each pass were known."""
    found, find = [], repeat.find

    def watched(*arguments):
        tables = find(*arguments)
        found.append(tables is not None)
        return tables

    monkeypatch.setattr(repeat, "find", watched)
    return found


def test_they_are_known_from_the_second_step_on(known):
    train(*made(), range(STEPS))
    assert known == [False] * 2 + [True] * 2 * (STEPS - 1)


@pytest.mark.parametrize(
    ("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)], ids=str
)
def test_batches_of_any_size_and_one_table(known, monkeypatch, mode, weighted):
    def run(backend):
        monkeypatch.setenv("SUBULP_BACKEND", backend)
        bag = nn.CachedEmbeddingBag(90, 8, "int4", 0.2, "lfu", 4, mode, seed=1)
        optim.RowAdagrad(bag, lr=0.1)
        sums = []
        for step, count in enumerate((12, 0, 31, 7)):
            generator = torch.Generator().manual_seed(step)
            values = torch.randint(90, (count,), generator=generator)
            weights = torch.rand(count, generator=generator) if weighted else None
            sums.append(bag(values, torch.arange(0, max(count, 1), 3), weights))
            sums[-1].square().sum().backward()
        return [*sums, *bag.state_dict().values()]

    expected = run("reference")
    known.clear()
    actual = run("cpu")
    assert all(map(torch.equal, expected, actual))
    assert known == [False] * 2 + [True] * 6


def test_rows_step_alike_whether_weights_have_a_gradient():
    found = []
    for requires_grad in (False, True):
        bag = nn.CachedEmbeddingBag(90, 8, "int8", 0.2, seed=1)
        optim.RowAdagrad(bag, lr=0.1)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            values = torch.randint(90, (30,), generator=generator)
            weights = torch.rand(30, generator=generator).requires_grad_(requires_grad)
            bag(values, torch.arange(0, 30, 3), weights).square().sum().backward()
            assert (weights.grad is not None) is requires_grad
        found.append(bag)
    assert same(*found)
    assert torch.equal(found[0].statistics, found[1].statistics)


@pytest.mark.parametrize("name", ["per_sample_weights", "gradient", "row number", "offsets"])
def test_what_does_not_fit_known_tables_is_refused(known, name):
    bag = nn.CachedEmbeddingBag(90, 8, "int8", 0.2, seed=1)
    optim.RowAdagrad(bag, lr=0.1)
    values, bounds, weights = torch.arange(30), torch.arange(0, 30, 3), torch.ones(30)
    for _ in range(STEPS):
        bag(values, bounds, weights).sum().backward()
    known.clear()
    before = copy.deepcopy(bag.state_dict())
    grad = torch.ones(10, 8)
    match name:
        case "per_sample_weights":
            weights[3] = torch.inf
        case "gradient":
            grad[4, 2] = torch.nan
        case "row number":
            values[5] = 90
        case _:
            bounds[2] = 31
    error = {"row number": IndexError, "offsets": ValueError}.get(name, FloatingPointError)
    with pytest.raises(error, match=name):
        bag(values, bounds, weights).backward(grad)
    assert known
    assert all(known)
    after = bag.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_optimizer_of_another_rule_takes_over(known):
    bags, _ = made()
    train(bags, bags.row_optimizer, range(STEPS))
    alone = copy.deepcopy(bags)
    for each in (bags, alone):
        each.row_optimizer = None
        sgd = optim.RowSGD(each, lr=0.1)
        known.clear()
        train(each, sgd, range(STEPS, STEPS + 2))
    # The copy has been met by nobody.
    assert known == [False, False, True, True]
    assert same(bags, alone)


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

"""Optimizers of rows: groups, what they refuse, and state dicts of today and before."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from subulp import nn, optim

D, L = 4, 30


def head(seed: int = 3) -> nn.ExtremeClassifier:
    return nn.ExtremeClassifier(D, L, storage="e4m3", dropout=0.1, seed=seed)


def train(module: nn.ExtremeClassifier, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, D, generator=generator)
        module(x, torch.arange(8), torch.randint(L, (8,), generator=generator))


def weights(module: nn.ExtremeClassifier) -> Tensor:
    return module.weight(torch.arange(L))


def test_groups_have_options_of_their_own() -> None:
    first, second = head(0), head(1)
    opt = optim.RowSGD([{"modules": [first], "lr": 0.0}, {"modules": [second]}], lr=0.5)
    before = weights(first), weights(second)
    for module in (first, second):
        train(module, range(1))
    assert torch.equal(weights(first), before[0])
    assert not torch.equal(weights(second), before[1])
    assert opt.step(lambda: 3.0) == 3.0
    assert opt.step() is None


@pytest.mark.parametrize("kind", ["RowSGD", "RowAdagrad"])
def test_groups_that_come_later(kind: str) -> None:
    first, second = (nn.CachedEmbeddingBag(64, D, seed=seed) for seed in (0, 1))
    make = getattr(optim, kind)
    opt = make(first, lr=0.5)
    for wrong in ({"params": torch.nn.Linear(2, 2).parameters()}, {"params": [torch.zeros(2)]}):
        with pytest.raises(ValueError, match=r"add \{\"modules\": \[...\]\}"):
            opt.add_param_group(wrong)
    with pytest.raises(ValueError, match="lr=-1"):
        opt.add_param_group({"modules": [second], "lr": -1.0})
    assert second.row_optimizer is None
    assert len(opt.param_groups) == 1
    opt.add_param_group({"modules": [second], "lr": 0.25})
    twin = nn.CachedEmbeddingBag(64, D, seed=1)
    make(twin, lr=0.25)
    for bag in (second, twin):
        for _ in range(2):
            bag(torch.tensor([1, 2, 2]), torch.tensor([0])).square().sum().backward()
    assert torch.equal(second.weight_fp32(), twin.weight_fp32())


def test_options_that_rows_have_not() -> None:
    bag = nn.CachedEmbeddingBag(64, D, seed=0)
    for options, message in (
        ({"momentum": 0.9}, "momentum=0.9 is not available for subulp's RowSGD"),
        ({"maximize": True}, "maximize=True is not available"),
        ({"lr": "x"}, "lr='x' is not a number"),
        ({"lr": None}, "lr=None is not a number"),
        ({"lr": 1e39}, r"lr=1e\+39 is out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            optim.RowSGD([{"modules": [bag], **options}])
    with pytest.raises(ValueError, match="rowwise='no' is unknown: use True or False"):
        optim.RowAdagrad(bag, rowwise="no")  # type: ignore[arg-type]


def test_sums_that_do_not_fit_the_option_or_are_gone() -> None:
    bag = nn.CachedEmbeddingBag(64, D, seed=0)
    opt = optim.RowAdagrad(bag)
    before = bag.weight_fp32()

    def step() -> None:
        bag(torch.tensor([1, 2, 2]), torch.tensor([0])).square().sum().backward()

    opt.param_groups[0]["rowwise"] = False
    with pytest.raises(ValueError, match="rowwise=False was set after the sums were made"):
        step()
    opt.param_groups[0]["rowwise"] = True
    opt.state.clear()
    with pytest.raises(RuntimeError, match="are gone from the state of this RowAdagrad"):
        step()
    assert torch.equal(bag.weight_fp32(), before)
    assert bag.steps == 0
    bag.row_optimizer = None
    optim.RowAdagrad(bag)
    step()
    assert bag.steps == 1


def test_options_are_looked_at_again_when_one_was_set() -> None:
    bag = nn.CachedEmbeddingBag(64, D, seed=0)
    opt = optim.RowAdagrad(bag)
    (group,) = opt.param_groups
    rate = torch.tensor(0.1)

    def step() -> None:
        bag(torch.tensor([1, 2, 2]), torch.tensor([0])).square().sum().backward()

    def edit_in_place() -> None:
        group["lr"] = rate
        step()
        step()
        rate.fill_(-1.0)

    (rows,) = group["params"]
    sums = opt.state[rows]["sum"]
    for edit, undo, message in (
        (lambda: group.update(lr=-1.0), lambda: group.update(lr=0.1), r"lr=-1\.0 is out of range"),
        (edit_in_place, lambda: group.update(lr=0.1), "is out of range"),
        (lambda: group.update(momentum=0.9), lambda: group.pop("momentum"), "momentum=0.9 is not"),
        (
            lambda: opt.state[rows].update(sum=torch.zeros(0)),
            lambda: opt.state[rows].update(sum=sums),
            r"the sums have shape \(0,\) for 64 rows: nothing was updated",
        ),
        (lambda: group.pop("lr"), lambda: group.update(lr=0.1), "a group of RowAdagrad has no lr"),
        (lambda: group.update(lr=10**400), lambda: group.update(lr=0.1), "is out of range"),
        (
            lambda: opt.state[rows].update(sum=torch.zeros(64, D)),
            lambda: opt.state[rows].update(sum=sums),
            "rowwise=True was set after the sums were made",
        ),
    ):
        step()
        step()
        edit()
        before, steps = bag.weight_fp32(), bag.steps
        with pytest.raises(ValueError, match=message):
            step()
        assert torch.equal(bag.weight_fp32(), before)
        assert bag.steps == steps
        undo()
    step()
    assert not torch.equal(bag.weight_fp32(), before)


def test_sums_of_each_table_are_compared_with_the_option() -> None:
    tables = [nn.EmbeddingTable(64, D), nn.EmbeddingTable(64, D)]
    bags = nn.CachedEmbeddingBags(tables, 0, seed=0)
    opt = optim.RowAdagrad(bags)

    def step() -> None:
        bags(torch.tensor([1, 2]), torch.tensor([1, 1])).square().sum().backward()

    step()
    step()
    second = opt.param_groups[0]["params"][1]
    opt.state[second]["sum"].data = torch.zeros(64, D)
    with pytest.raises(ValueError, match="rowwise=True was set after the sums were made"):
        step()
    assert bags.steps == 2


def test_a_tensor_for_an_option_of_torchs_is_looked_at_in_each_step() -> None:
    bag = nn.CachedEmbeddingBag(64, D, seed=0)
    (group,) = optim.RowSGD(bag, lr=0.1).param_groups
    group["momentum"] = momentum = torch.tensor(0.0)

    def step() -> None:
        bag(torch.tensor([1, 2, 2]), torch.tensor([0])).square().sum().backward()

    step()
    momentum.fill_(0.9)
    with pytest.raises(ValueError, match="momentum"):
        step()


def test_no_sums_of_before_are_kept_by_a_restored_optimizer() -> None:
    bag = nn.CachedEmbeddingBag(64, D, seed=0)
    opt = optim.RowAdagrad(bag)
    before = []
    for _ in range(4):
        bag(torch.tensor([1, 2, 2]), torch.tensor([0])).square().sum().backward()
        (rows,) = opt.param_groups[0]["params"]
        before.append(weakref.ref(opt.state[rows]["sum"]))
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    gc.collect()
    assert not any(sums() is not None for sums in before)


def test_sums_of_torchs_adagrad() -> None:
    bag = nn.CachedEmbeddingBag(64, D, "fp32", seed=0)
    torchs = torch.nn.EmbeddingBag(64, D, mode="sum", _weight=bag.weight_fp32())
    theirs = torch.optim.Adagrad(torchs.parameters(), lr=0.1)
    ours = optim.RowAdagrad(bag, lr=0.1, rowwise=False)

    def step(module: torch.nn.Module) -> None:
        module(torch.tensor([1, 2, 2]), torch.tensor([0])).square().sum().backward()

    step(torchs)
    theirs.step()
    bag.load_weights(torchs.weight.detach())
    ours.load_state_dict(theirs.state_dict())
    theirs.zero_grad()
    step(torchs)
    theirs.step()
    step(bag)
    torch.testing.assert_close(bag.weight_fp32(), torchs.weight.detach())


def test_a_bad_option_stops_the_modules_of_its_group_alone() -> None:
    first, second = head(0), head(1)
    opt = optim.RowSGD([{"modules": [first], "lr": 0.1}, {"modules": [second]}], lr=0.5)
    opt.param_groups[0]["lr"] = -0.1
    with pytest.raises(ValueError, match=r"lr=-0\.1 is out of range"):
        train(first, range(1))
    before = weights(second)
    train(second, range(1))
    assert not torch.equal(weights(second), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.RowSGD(head(), lr=-1.0), "lr=-1.0 is out of range: use a finite number"),
        (lambda: optim.RowSGD(head(), lr=float("nan")), "lr=nan is out of range"),
        (lambda: optim.RowAdagrad(nn.CachedEmbeddingBag(64, 4), eps=-1), "eps=-1"),
        (lambda: optim.RowSGD(torch.nn.Linear(2, 2)), "Linear has no rows that update themselves"),
        (lambda: optim.RowAdagrad(torch.nn.Linear(2, 2)), "no rows"),
        (lambda: optim.RowAdagrad(head()), "trained with RowSGD"),
        (lambda: [optim.RowSGD(m) for m in [head()] * 2], "a module has an optimizer already"),
        (lambda: optim.RowSGD([m := head(), m]), "some parameters appear in more than one"),
    ],
)
def test_what_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_sums_of_another_optimizer_are_refused() -> None:
    opt = optim.RowAdagrad(nn.CachedEmbeddingBag(64, 4))
    other = optim.RowAdagrad(nn.CachedEmbeddingBag(64, 4), rowwise=False)
    with pytest.raises(ValueError, match="shape"):
        opt.load_state_dict(other.state_dict())
    pair = optim.RowAdagrad([nn.CachedEmbeddingBag(64, 4), nn.CachedEmbeddingBag(64, 4)])
    with pytest.raises(ValueError, match="2 tables"):
        opt.load_state_dict(pair.state_dict())


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("value", [-1e-30, float("nan"), float("-inf")])
def test_sums_that_no_squares_have_are_refused(value: float, rowwise: bool) -> None:
    """Their roots are NaN, and a row that steps by one is lost."""
    opt = optim.RowAdagrad(nn.CachedEmbeddingBag(64, 4), rowwise=rowwise, lr=0.1)
    saved = copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    saved["state"][0]["sum"].view(-1)[3] = value
    with pytest.raises(ValueError, match="sums that are negative or NaN"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.1
    assert not opt.state_dict()["state"][0]["sum"].any()
    saved["state"][0]["sum"].view(-1)[3] = float("inf")
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.5
    assert torch.equal(opt.state_dict()["state"][0]["sum"], saved["state"][0]["sum"])


def test_a_new_optimizer_draws_no_random_bits_again() -> None:
    """The module counts its updates: the second optimizer goes on where the first one was."""
    straight, changed = head(), head()
    optim.RowSGD(straight, lr=0.1)
    optim.RowSGD(changed, lr=0.1)
    train(straight, range(4))
    train(changed, range(2))
    changed.row_optimizer = None
    optim.RowSGD(changed, lr=0.1)
    train(changed, range(2, 4))
    assert changed.steps == 4
    assert torch.equal(weights(changed), weights(straight))


@pytest.mark.parametrize("model_first", [True, False])
def test_a_state_dict_whose_optimizer_counts_is_resumed(model_first: bool) -> None:
    """Until the modules counted their updates, RowSGD did, and a head had no extra state."""
    straight, stopped, resumed = head(), head(), head()
    opts = [optim.RowSGD(m, lr=0.1) for m in (straight, stopped, resumed)]
    train(straight, range(4))
    train(stopped, range(2))
    saved = stopped.state_dict()
    del saved["_extra_state"]
    counted = {**opts[1].state_dict(), "state": {0: {"step": 2}}}
    loads = [lambda: resumed.load_state_dict(saved), lambda: opts[2].load_state_dict(counted)]
    for load in loads if model_first else loads[::-1]:
        load()
    assert not opts[2].state
    train(resumed, range(2, 4))
    assert torch.equal(weights(resumed), weights(straight))


def test_a_copy_without_modules_refuses_a_count() -> None:
    opt = optim.RowSGD(head(), lr=0.1)
    counted = {**opt.state_dict(), "state": {0: {"step": 2}}}
    with pytest.raises(ValueError, match="load it into the optimizer that was made for them"):
        copy.deepcopy(opt).load_state_dict(counted)


def test_head_and_optimizer_are_copied_together() -> None:
    module = head()
    opt = optim.RowSGD(module, lr=0.1)
    train(module, range(2))
    twin, _ = copy.deepcopy((module, opt))
    for each in (module, twin):
        train(each, range(2, 4))
    assert twin.steps == module.steps == 4
    assert torch.equal(weights(twin), weights(module))

"""Gradient scalers: rows step by gradients of the loss, whatever it was multiplied by."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from subulp import nn, optim

MAKE = {
    "sgd": lambda bag, scaler=None: optim.RowSGD(bag, lr=0.1, scaler=scaler),
    "adagrad": lambda bag, scaler=None: optim.RowAdagrad(bag, lr=0.1, scaler=scaler),
}


def scaler_of(**options):
    return torch.amp.GradScaler("cpu", **options)


def new_bag():
    return nn.CachedEmbeddingBag(30, 4, "fp32", 0.2, seed=1)


def look_up(bag, factor=1.0):
    return (bag(torch.tensor([[1, 2], [2, 5]])) * factor).square().sum()


@pytest.mark.parametrize("name", MAKE)
def test_scaled_steps_are_those_without_a_scaler(name):
    plain, scaled, scaler = new_bag(), new_bag(), scaler_of()
    MAKE[name](plain)
    rows = MAKE[name](scaled, scaler)
    for _ in range(3):
        look_up(plain).backward()
        scaler.scale(look_up(scaled)).backward()
        scaler.step(rows)
        scaler.update()
    assert torch.equal(plain.weight_fp32(), scaled.weight_fp32())
    assert scaler.get_scale() == 65536.0


def test_with_a_dense_optimizer():
    bag, dense, scaler = new_bag(), torch.nn.Linear(4, 1), scaler_of()
    other, twin = copy.deepcopy((bag, dense))
    pairs = [
        (bag, dense, optim.RowSGD(bag, scaler=scaler), torch.optim.SGD(dense.parameters(), 0.1)),
        (other, twin, optim.RowSGD(other), torch.optim.SGD(twin.parameters(), 0.1)),
    ]
    for _ in range(3):
        for (table, layer, rows, sgd), scale in zip(pairs, (scaler, None), strict=True):
            sgd.zero_grad()
            loss = layer(table(torch.tensor([[1, 2]]))).square().sum()
            (scale.scale(loss) if scale else loss).backward()
            for optimizer in (rows, sgd):
                scale.step(optimizer) if scale else optimizer.step()
            if scale:
                scale.update()
    torch.testing.assert_close(bag.weight_fp32(), other.weight_fp32())
    torch.testing.assert_close(dense.weight, twin.weight)


def test_an_overflow_steps_nothing_and_lowers_the_scale():
    bag, scaler = new_bag(), scaler_of()
    rows = optim.RowSGD(bag, lr=0.1, scaler=scaler)
    before = bag.weight_fp32()
    for _ in range(2):
        scaler.scale(look_up(bag, 1e25)).backward()
    scaler.step(rows)
    scaler.update()
    assert scaler.get_scale() == 32768.0
    assert bag.steps == 0
    assert torch.equal(bag.weight_fp32(), before)
    scaler.scale(look_up(bag)).backward()
    scaler.step(rows)
    scaler.update()
    assert bag.steps == 1


def test_a_scaler_that_the_rows_do_not_know_is_refused():
    bag, scaler = new_bag(), scaler_of()
    rows = optim.RowSGD(bag)
    scaler.scale(look_up(bag)).backward()
    with pytest.raises(RuntimeError, match=r"Pass RowSGD\(\.\.\., scaler=scaler\)"):
        scaler.step(rows)
    with pytest.raises(ValueError, match="scaler is int"):
        optim.RowSGD(new_bag(), scaler=1)


def test_a_copy_goes_on_with_the_same_scaler():
    bag, scaler = new_bag(), scaler_of()
    optimizer = optim.RowSGD(bag, lr=0.1, scaler=scaler)
    twin, _ = copy.deepcopy((bag, optimizer))
    for module in (bag, twin):
        scaler.scale(look_up(module)).backward()
    assert torch.equal(bag.weight_fp32(), twin.weight_fp32())
    pickle.loads(pickle.dumps(optimizer))


def test_a_disabled_scaler_changes_nothing():
    plain, other, scaler = new_bag(), new_bag(), scaler_of(enabled=False)
    optim.RowSGD(plain)
    rows = optim.RowSGD(other, scaler=scaler)
    look_up(plain).backward()
    scaler.scale(look_up(other)).backward()
    scaler.step(rows)
    scaler.update()
    assert torch.equal(plain.weight_fp32(), other.weight_fp32())


def test_heads_step_before_the_loss_is_scaled():
    heads = [nn.ExtremeClassifier(4, 20, storage="fp32", seed=1) for _ in range(2)]
    scaler = scaler_of()
    x, one = torch.ones(2, 4), torch.tensor([1])
    for head, scale in zip(heads, (scaler, None), strict=True):
        rows = optim.RowSGD(head, lr=0.1)
        dense = torch.nn.Linear(4, 4)
        sgd = torch.optim.SGD(dense.parameters(), 0.1)
        loss = head(dense(x), one, one) if scale is None else scale.scale(head(dense(x), one, one))
        loss.backward()
        if scale is None:
            continue
        scale.step(rows)
        scale.step(sgd)
        scale.update()
    assert heads[0].steps == heads[1].steps == 1


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_options_that_are_set_later_are_checked_at_the_step(value):
    bag, head = new_bag(), nn.ExtremeClassifier(4, 20, seed=1)
    one = torch.tensor([1])
    for module, run in (
        (bag, lambda: look_up(bag).backward()),
        (head, lambda: head(torch.ones(2, 4), one, one)),
    ):
        rows = optim.RowSGD(module)
        rows.param_groups[0]["lr"] = value
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(ValueError, match=f"lr={value} is out of range"):
            run()
        for name, kept in before.items():
            found = module.state_dict()[name]
            assert torch.equal(found.view(torch.uint8), kept.view(torch.uint8)), name

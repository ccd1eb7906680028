"""Stored rows: frozen, copied, saved and assigned; never averaged as the bytes that they are."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from subulp import nn, optim
from subulp.nn.row_parameter import RowParameter

ONE = torch.tensor([1])


def look_up(bag):
    return bag(torch.tensor([[1, 2, 2]]))


def bag(storage="int8", **options):
    made = nn.CachedEmbeddingBag(20, 4, storage, 0.0, seed=1, **options)
    optim.RowSGD(made, lr=0.5)
    return made


def head(storage="e4m3", **options):
    made = nn.ExtremeClassifier(4, 20, storage=storage, seed=1, **options)
    optim.RowSGD(made, lr=0.5)
    return made


def freeze_module(module, trains):
    module.requires_grad_(trains)


def freeze_parameters(module, trains):
    for p in module.parameters():
        p.requires_grad_(trains)


def freeze_by_attribute(module, trains):
    for p in module.parameters():
        p.requires_grad = trains


@pytest.mark.parametrize("freeze", [freeze_module, freeze_parameters, freeze_by_attribute])
@pytest.mark.parametrize("storage", ["int8", "e4m3", "fp32"])
def test_bags_freeze(storage, freeze):
    module = bag(storage)
    model = torch.nn.ModuleDict({"bag": module})
    before, steps = module.weight_fp32(), module.steps
    freeze(model, False)
    out = look_up(module)
    assert not out.requires_grad
    weights = torch.ones(1, 3, requires_grad=True)
    module(torch.tensor([[1, 2, 2]]), per_sample_weights=weights).sum().backward()
    torch.testing.assert_close(weights.grad[0], before[[1, 2, 2]].sum(1))
    assert torch.equal(module.weight_fp32(), before)
    assert module.steps == steps
    freeze(model, True)
    look_up(module).sum().backward()
    assert not torch.equal(module.weight_fp32(), before)


@pytest.mark.parametrize("freeze", [freeze_module, freeze_parameters, freeze_by_attribute])
@pytest.mark.parametrize("storage", ["int8", "e4m3", "fp32"])
def test_heads_freeze_and_pass_the_gradient_on(storage, freeze):
    module = head(storage, dropout=0.3, products="fp32")
    before = module.table.decode(0, 20)
    freeze(torch.nn.ModuleDict({"head": module}), False)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = module(x, ONE, ONE)
    (3 * loss).backward()
    y = torch.zeros(3, 20)
    y[1, 1] = 1
    z = x.detach().clone().requires_grad_()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        z @ before.t(), y, reduction="sum"
    )
    (expected / 3 * 3).backward()
    assert loss.item() == pytest.approx(expected.item() / 3, rel=1e-5)
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(module.table.decode(0, 20), before)
    assert module.steps == 0
    freeze(module, True)
    module(x, ONE, ONE)
    assert not torch.equal(module.table.decode(0, 20), before)


@pytest.mark.parametrize("storage", ["int4", "bf16"])
def test_heads_in_eval_pass_the_gradient_on(storage):
    module = head(storage).eval()
    before = module.table.decode(0, 20)
    x = torch.ones(2, 4, requires_grad=True)
    module(x, ONE, ONE).backward()
    assert x.grad.abs().sum() > 0
    assert torch.equal(module.table.decode(0, 20), before)


def test_rows_that_are_frozen_after_the_forward_pass_stay():
    module = bag()
    before, out = module.weight_fp32(), look_up(module)
    module.requires_grad_(False)
    out.sum().backward()
    assert torch.equal(module.weight_fp32(), before)
    assert module.steps == 0


def test_some_tables_freeze():
    """The others step as they would with those that are frozen left out."""
    tables = [nn.EmbeddingTable(30, 4, "fp32", 0.0), nn.EmbeddingTable(20, 2, "fp32", 0.0)]
    bags = nn.CachedEmbeddingBags(tables, 0, features=[0, 1, 0], seed=2)
    optim.RowAdagrad(bags, lr=0.5)
    both = copy.deepcopy(bags)
    optimizer = both.row_optimizer
    values, lengths = torch.tensor([1, 2, 3, 3, 4, 5]), torch.tensor([1, 1, 2, 0, 1, 1])
    weights = torch.arange(1.0, 7.0)
    grad = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    bags.tables[1].requires_grad_(False)
    before = bags.weight_fp32(1)
    for module in (bags, both):
        module(values, lengths, per_sample_weights=weights).backward(grad)
    assert torch.equal(bags.weight_fp32(1), before)
    assert not torch.equal(both.weight_fp32(1), before)
    assert torch.equal(bags.weight_fp32(0), both.weight_fp32(0))
    assert optimizer is not bags.row_optimizer


def test_copies_and_pickles_stay_what_they_are():
    module = bag()
    module.requires_grad_(False)
    file = io.BytesIO()
    module.row_optimizer = None
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        codes = twin.table.table.codes
        assert type(codes) is RowParameter
        assert codes.frozen
        assert torch.equal(twin.weight_fp32(), module.weight_fp32())
        assert codes.data_ptr() != module.table.table.codes.data_ptr()


def test_state_dicts_hold_plain_tensors():
    module = bag()
    assert all(type(t) is torch.Tensor for t in module.state_dict().values())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    module.load_state_dict(torch.load(file))


@pytest.mark.parametrize("function", [None, get_ema_multi_avg_fn(0.9)])
@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("make", [bag, lambda: head("int8"), lambda: head("int4")])
def test_integers_are_not_averaged(make, use_buffers, function):
    model = torch.nn.ModuleDict({"rows": make(), "dense": torch.nn.Linear(2, 2)})
    averaged = AveragedModel(model, multi_avg_fn=function, use_buffers=use_buffers)
    averaged.update_parameters(model)
    with pytest.raises(RuntimeError, match=r"rows of integers .* Leave the table out of"):
        averaged.update_parameters(model)


def test_rows_behind_a_cache_are_not_averaged():
    model = nn.CachedEmbeddingBag(20, 4, "fp32", 0.5)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    with pytest.raises(RuntimeError, match="those of a table with a cache are out of date"):
        averaged.update_parameters(model)


def test_whole_rows_of_numbers_are_averaged():
    model = head("fp32")
    averaged = AveragedModel(model)
    first = model.table.decode(0, 20)
    averaged.update_parameters(model)
    model(torch.ones(2, 4), ONE, ONE)
    averaged.update_parameters(model)
    mean = (first + model.table.decode(0, 20)) / 2
    torch.testing.assert_close(averaged.module.table.decode(0, 20), mean)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_optimizer_knows_rows_that_a_state_dict_brought(device):
    source = bag("int4")
    look_up(source).sum().backward()
    late = nn.CachedEmbeddingBag(20, 4, "int4", 0.0, seed=5, device=device)
    optimizer = optim.RowSGD(late, lr=0.5)
    late.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    for module in (source, late):
        look_up(module).sum().backward()
    assert torch.equal(late.weight_fp32(), source.weight_fp32())
    assert optimizer.param_groups[0]["params"][0] is late.table.table.codes


def test_assigned_rows_are_not_taken_from_another_module():
    source, other = head("fp32"), head("fp32")
    other.load_state_dict(source.state_dict(keep_vars=True), assign=True)
    assert other.table.codes is not source.table.codes
    assert type(source.table.codes) is RowParameter
    transposed = torch.randn(4, 20).t()
    state = other.state_dict() | {"table.codes": transposed}
    other.load_state_dict(state, assign=True)
    assert torch.equal(other.table.decode(0, 20), transposed)


def test_a_fused_optimizer_of_dense_parameters_refuses_rows():
    model = torch.nn.ModuleDict({"head": head("e4m3"), "dense": torch.nn.Linear(4, 4).bfloat16()})
    optimizer = optim.AdamW(model.parameters(), precision="nearest")
    with pytest.raises(ValueError, match=r"rows of shape \(20, 4\) update themselves"):
        optim.fuse_backward(model, optimizer)
    assert not model["head"].table.frozen


def test_rows_of_no_group():
    module = head()
    optimizer = module.row_optimizer
    module.table.codes = RowParameter(torch.zeros(20, 4, dtype=torch.float8_e4m3fn))
    assert optimizer.param_groups
    with pytest.raises(ValueError, match=r"rows of shape \(20, 4\) belong to no group"):
        module(torch.ones(2, 4), ONE, ONE)

"""Steps are taken once, by whom they are meant for: checkpoints, partial backward passes, ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from subulp import nn, optim

ROWS, COLS = torch.tensor([0, 1, 1]), torch.tensor([3, 5, 8])


def heads(**options):
    """Two heads of the same bits."""
    pair = []
    for _ in range(2):
        head = nn.ExtremeClassifier(6, 30, seed=2, **options)
        optim.RowSGD(head, lr=0.5)
        pair.append(head)
    return pair


def inputs():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    return [x.clone().requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("storage", ["e4m3", "fp32", "int8"])
def test_a_checkpointed_head_steps_once(use_reentrant, loss, storage):
    plain, kept = heads(storage=storage, dropout=0.2)
    a, b = inputs()
    layer = torch.nn.Linear(6, 6)

    def run(head, x):
        return head(layer(x).tanh(), ROWS, COLS, loss=loss) * 3

    for _ in range(2):
        one = run(plain, a)
        one.backward()
        other = checkpoint(run, kept, b, use_reentrant=use_reentrant)
        other.backward()
        assert torch.equal(a.grad, b.grad)
        # Reentrant checkpoints run without gradients at first, so that the loss is that of eval().
        assert use_reentrant or torch.equal(one, other) or (one.isnan() and other.isnan())
    assert plain.steps == kept.steps == 2
    assert torch.equal(plain.table.decode(0, 30), kept.table.decode(0, 30))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_bag_steps_and_counts_once(use_reentrant):
    plain = nn.CachedEmbeddingBag(50, 4, "int4", 0.2, ways=4, seed=1)
    optim.RowAdagrad(plain, lr=0.1)
    kept, _ = copy.deepcopy((plain, plain.row_optimizer))
    weights = torch.ones(3, 2, requires_grad=True)

    def run(bag, values, w):
        return bag(values, per_sample_weights=w).square().sum()

    for step in range(3):
        values = torch.tensor([[1, 2], [2, 9], [7, step]])
        run(plain, values, weights).backward()
        checkpoint(run, kept, values, weights, use_reentrant=use_reentrant).backward()
    assert plain.steps == kept.steps == 3
    assert torch.equal(plain.weight_fp32(), kept.weight_fp32())
    assert torch.equal(plain.statistics, kept.statistics)
    assert plain.hit_rate == kept.hit_rate > 0


def test_the_gradient_of_weights_alone_updates_no_row():
    bag = nn.CachedEmbeddingBag(50, 4, "int8", 0.2, seed=1)
    optim.RowSGD(bag, lr=0.5)
    before = bag.weight_fp32()
    weights = torch.ones(2, 2, requires_grad=True)
    values = torch.tensor([[1, 2], [3, 4]])
    out = bag(values, per_sample_weights=weights)
    (grad,) = torch.autograd.grad(out.sum(), weights, retain_graph=True)
    torch.testing.assert_close(grad, before[values].sum(-1))
    out.sum().backward(inputs=[weights], retain_graph=True)
    assert bag.steps == 0
    assert torch.equal(bag.weight_fp32(), before)
    out.sum().backward()
    assert bag.steps == 1
    assert not torch.equal(bag.weight_fp32(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_losss_factor_comes_before_the_embeddings_dtype(dtype):
    """A gradient of 1e-8 is zero in FP16; scaled by 2**20, as GradScaler does, it is not."""
    head, _ = heads(reduction="mean")
    x = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 1e-3).to(dtype)
    x.requires_grad_()
    factor = 2.0**-24
    (head.eval()(x, ROWS, COLS) * factor * 2.0**24).backward()
    exact = x.grad.clone()
    x.grad = None
    (head(x, ROWS, COLS) * factor).mul(2.0**24).backward()
    assert torch.equal(x.grad, exact)
    assert exact.abs().max() > 0


def test_negated_views_are_the_numbers_that_they_stand_for():
    """Autograd makes them from complex numbers: memory with the other sign, and a flag."""
    plain, lazy = heads(storage="e4m3", products="fp8")
    x = inputs()[0].detach()
    for head, given in ((plain, -x), (lazy, torch._neg_view(x))):
        head(given, ROWS, COLS)
    assert torch.equal(plain.table.decode(0, 30), lazy.table.decode(0, 30))
    assert torch.equal(plain.topk(-x)[0], lazy.topk(torch._neg_view(x))[0])
    bags = [nn.CachedEmbeddingBag(50, 4, "fp32", seed=1) for _ in range(2)]
    weights, grad = torch.rand(2, 3), torch.rand(2, 4)
    for bag, negated in zip(bags, (torch.neg, torch._neg_view), strict=True):
        optim.RowSGD(bag, lr=0.1)
        out = bag(torch.arange(6).view(2, 3), per_sample_weights=negated(weights))
        out.backward(negated(grad))
    assert torch.equal(bags[0].weight_fp32(), bags[1].weight_fp32())


# --------------------------------------------------------------------------------- many processes


@pytest.fixture
def two_processes() -> Iterator[None]:
    """A process group as DistributedDataParallel has it; the other process is not needed."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_copies_of_rows_in_other_processes_are_refused(two_processes):
    head, _ = heads()
    bag = nn.CachedEmbeddingBag(50, 4, seed=1)
    optim.RowSGD(bag)
    before = head.table.decode(0, 30), bag.weight_fp32()
    with pytest.raises(RuntimeError, match=r"ExtremeClassifier updates .* 2 processes"):
        head(inputs()[0], ROWS, COLS)
    with pytest.raises(RuntimeError, match=r"CachedEmbeddingBag updates .*Split the tables"):
        bag(torch.tensor([[1]]))
    assert torch.equal(before[0], head.table.decode(0, 30))
    # What trains nothing is the same everywhere.
    for module in (head, bag):
        module.requires_grad_(False)
    head(inputs()[0], ROWS, COLS).backward()
    bag(torch.tensor([[1]]))
    for module in (head, bag):
        module.requires_grad_(True).eval()
    assert torch.isfinite(head(inputs()[0], ROWS, COLS))
    assert torch.equal(bag.weight_fp32(), before[1])


def test_ddp_around_rows_is_refused(two_processes):
    model = torch.nn.Sequential(nn.CachedEmbeddingBag(50, 4, seed=1), torch.nn.Linear(4, 1))
    optim.RowSGD(model[0])
    with pytest.raises(RuntimeError, match="DistributedDataParallel does not know"):
        torch.nn.parallel.DistributedDataParallel(model)(torch.tensor([[1]]))


def test_one_process_may_train(one_process):
    head, _ = heads()
    model = torch.nn.ModuleDict({"dense": torch.nn.Linear(6, 6), "head": head})
    head(model["dense"](inputs()[0]), ROWS, COLS).backward()
    assert head.steps == 1

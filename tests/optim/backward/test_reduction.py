"""Gradients shared between ranks while the step is fused."""

from __future__ import annotations

import contextlib
import copy
import datetime
import importlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from subulp import optim

from ..support import BF16, same_bits
from .twins import MAKERS, assert_same, batches, loss_of, twins


def mean(grad: Tensor) -> Tensor:
    """The mean over all ranks, in place."""
    dist.all_reduce(grad)
    return grad.div_(dist.get_world_size())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_norm": 0.05},
    "accumulated": {"accumulate": 2, "accumulate_in": "param"},
}


@contextlib.contextmanager
def process_group(store: Path, rank: int, world: int) -> Iterator[None]:
    """A gloo group whose threads end with it.

    ``destroy_process_group`` ends them only where it drops the last reference to the group. The
    functions of ``torch.distributed.nn`` have the group that stands when they are defined as a
    default argument, and the first step of any optimizer imports them: too late, once there is a
    group. A thread that outlives Python's own end and lets go of a tensor then aborts the process.
    """
    importlib.import_module("torch.distributed.nn")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_main(rank: int, world: int, store: Path) -> None:
    torch.set_num_threads(1)
    with process_group(store, rank, world):
        group = weakref.ref(dist.group.WORLD)
        for options in CASES.values():
            compare(rank, options)
        overflow_on_one_rank(rank)
        other_graphs(rank)
    assert group() is None, "the process group outlives its destruction"


def unfused_reduction(params: list[Tensor]) -> None:
    for p in params:
        p.grad = mean(torch.zeros_like(p) if p.grad is None else p.grad)


def compare(rank: int, options: dict[str, Any]) -> None:
    """Fused and unfused data-parallel training have the same bits, and ranks stay equal."""
    passes = options.get("accumulate", 1)
    plain, fused = twins(MAKERS["adamw"]("collage-plus"), BF16)
    params = [p for p in plain[0].parameters() if p.requires_grad]
    mine = batches(4 * 2 * passes, BF16)[rank::2]
    with optim.fuse_backward(*fused, reduce=mean, **options) as handle:
        for i, batch in enumerate(mine):
            loss_of(plain[0], batch).backward()
            handle.backward(loss_of(fused[0], batch))
            if (i + 1) % passes:
                continue
            unfused_reduction(params)
            if "max_norm" in options:
                nn.utils.clip_grad_norm_(params, options["max_norm"])
            plain[1].step()
            plain[1].zero_grad()
    assert_same(plain, fused)
    assert_ranks_agree(fused[0])


def overflow_on_one_rank(rank: int) -> None:
    """All ranks see that the mean is not finite, and all leave the step out."""
    _, (model, optimizer) = twins(MAKERS["adamw"]("kahan"), torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = copy.deepcopy(model.state_dict())
    if rank == 1:
        model.head.weight.register_hook(lambda g: g * torch.inf)
    with optim.fuse_backward(model, optimizer, reduce=mean, scaler=scaler) as handle:
        handle.backward(scaler.scale(loss_of(model, batches(2, torch.float16)[rank])))
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def other_graphs(rank: int) -> None:
    """One rank uses the layers the other way round, and one of them not at all: no deadlock."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    optimizer = optim.AdamW(model.parameters())
    order = (0, 1, 2, 3) if rank == 0 else (2, 1, 0)
    with optim.fuse_backward(model, optimizer, reduce=mean):
        for _ in range(2):
            h = torch.ones(2, 4)
            for i in order:
                h = torch.tanh(model[i](h))
            h.sum().backward()
    assert_ranks_agree(model)
    assert int(optimizer.state[model[3].weight]["step"]) == 2


def assert_ranks_agree(model: nn.Module) -> None:
    for p in model.parameters():
        other = p.detach().clone()
        dist.broadcast(other, src=0)
        assert same_bits(p.detach(), other)


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_two_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_main, args=(2, tmp_path / "store"), nprocs=2)


# -------------------------------------------------------------------------------- on one rank


def named_reduce(model: nn.Module) -> tuple[list[tuple[int, ...]], Any]:
    seen: list[tuple[int, ...]] = []

    def reduce(grad: Tensor) -> Tensor:
        seen.append(tuple(grad.shape))
        return grad

    return seen, reduce


def test_the_order_is_that_of_the_parameters_backwards() -> None:
    """Whatever order autograd completes them in, and whichever it does not reach."""
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 4), nn.Linear(3, 5)])
    frozen = nn.Linear(3, 6).requires_grad_(False)
    model.append(frozen)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    seen, reduce = named_reduce(model)
    x = torch.ones(2, 3)
    with optim.fuse_backward(model, optimizer, reduce=reduce):
        (model[1](model[0](x)).sum() + model[2](x).sum()).backward()
        model[0](model[0](x)).sum().backward()
    assert seen == [(5,), (5, 3), (4,), (4, 3), (3, 3)] * 2


def test_a_gradient_is_reduced_before_it_is_unscaled_and_clipped() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    start = model.weight.item()
    seen = []

    def reduce(grad: Tensor) -> Tensor:
        seen.append(grad.item())
        return grad * 2

    with optim.fuse_backward(
        model, optimizer, reduce=reduce, scaler=scaler, clip_value=1.5
    ) as handle:
        handle.backward(scaler.scale(model(torch.ones(1, 1)).sum()))
    # Once in each pass.
    assert seen == [8.0, 8.0]
    assert model.weight.item() == pytest.approx(start - 1.5)


def test_reduction_in_place_leaves_accumulated_sums_alone() -> None:
    """The look-ahead pass reduces the sum of a parameter that the last pass does not reach."""
    plain, fused = twins(MAKERS["sgd"]("auto"), BF16)
    first, second = batches(2, BF16)
    with optim.fuse_backward(
        *fused, accumulate=2, max_norm=0.1, reduce=lambda g: g.mul_(0.5)
    ) as handle:
        for model, backward in ((plain[0], Tensor.backward), (fused[0], handle.backward)):
            backward(loss_of(model, first))
            backward(model.repeated(second[0] @ torch.ones(12, 16).bfloat16()).sum())
    trained = [p for p in plain[0].parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad.mul_(0.5)
    nn.utils.clip_grad_norm_(trained, 0.1)
    plain[1].step()
    assert_same(plain, fused)


@pytest.mark.parametrize("form", ["param", "fp32", "expansion"])
def test_ranks_reduce_one_dtype(form: str) -> None:
    """Sums of one rank and the missing or single gradients of another go into one collective."""
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)]).to(BF16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    dtypes = []

    def reduce(grad: Tensor) -> Tensor:
        dtypes.append(grad.dtype)
        return grad

    x = torch.ones(1, 2, dtype=BF16)
    with optim.fuse_backward(model, optimizer, reduce=reduce, accumulate=2, accumulate_in=form):
        model[0](x).sum().backward()
        model[1](model[0](x)).sum().backward()
    assert dtypes == [BF16 if form == "param" else torch.float32] * 3


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (lambda g: None, r"reduce returned NoneType for a gradient of shape \(1,\)"),
        (lambda g: g.sum(), r"reduce returned \(\) for a gradient of shape \(1,\)"),
    ],
)
def test_what_reduce_returns_is_checked(reduce: Any, message: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with (
        optim.fuse_backward(model, optimizer, reduce=reduce) as handle,
        pytest.raises(ValueError, match=message),
    ):
        handle.backward(model(torch.ones(2, 3)).sum())
    assert not optimizer.state


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_distributed_data_parallel_is_refused(tmp_path: Path) -> None:
    """Its gradients are reduced only after the hooks by which the step is fused."""
    with process_group(tmp_path / "store", rank=0, world=1):
        model = nn.Linear(3, 1)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*reduce="):
            optim.fuse_backward(wrapped, optimizer)
        with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel"):
            optim.fuse_backward(nn.Sequential(wrapped), optimizer)

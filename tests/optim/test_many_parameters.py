"""What is done for a parameter does not grow with the number of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import subulp
from subulp import diagnostics, optim
from subulp.nn import CachedEmbeddingBags, EmbeddingTable, Linear

FEW, MANY = 30, 120
OWN = str(Path(subulp.__file__).parent)

Work = Callable[[], Any]


def calls(work: Work) -> int:
    """How often functions and generators of the library run: no machine is too busy for that."""
    count = 0

    def seen(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OWN)

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def parameters(count: int) -> list[nn.Parameter]:
    them = [nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)) for _ in range(count)]
    for p in them:
        p.grad = torch.ones_like(p)
    return them


def chain(count: int) -> tuple[nn.Module, optim.AdamW, Work]:
    """A model, its optimizer, and a backward pass that computes gradients."""
    layers = (Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(count))
    model = nn.Sequential(*layers)
    optimizer = optim.AdamW(model.parameters(), precision="collage-plus")

    def backward() -> None:
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()

    return model, optimizer, backward


def first_step(count: int) -> Work:
    return optim.AdamW(parameters(count), precision="collage-plus").step


def later_step(count: int) -> Work:
    step = first_step(count)
    step()
    return step


def optimizers_of_one_each(count: int) -> Work:
    each = [optim.AdamW([p], precision="collage-plus") for p in parameters(count)]
    return lambda: [optimizer.step() for optimizer in each]


def groups_of_one_each(count: int) -> Work:
    groups = [{"params": [p]} for p in parameters(count)]
    return lambda: optim.AdamW(groups, precision="extra-bits-8").step()


def groups_that_are_added(count: int) -> Work:
    first, *others = parameters(count)

    def work() -> None:
        optimizer = optim.SGD([first], lr=0.1, precision="kahan")
        for p in others:
            optimizer.add_param_group({"params": [p]})

    return work


def steps_of_halves(count: int) -> Work:
    """Each has other parameters than the one before."""
    them = parameters(count)
    optimizer = optim.SGD(them, lr=0.1, precision="kahan")
    optimizer.step()

    def work() -> None:
        half = count // 2
        for chosen in (them[:half], them[half:]):
            optimizer.zero_grad()
            for p in chosen:
                p.grad = torch.ones_like(p)
            optimizer.step()

    return work


def saved_and_loaded(count: int) -> Work:
    optimizer = optim.AdamW(parameters(count), precision="collage-plus")
    optimizer.step()
    return lambda: optimizer.load_state_dict(optimizer.state_dict())


def saved_and_loaded_in_full(count: int) -> Work:
    model, optimizer, backward = chain(count)
    backward()
    optimizer.step()

    def work() -> None:
        whole = optimizer.full_precision_state_dict(model)
        optimizer.load_full_precision_state_dict(model, whole)

    return work


def another_precision(count: int) -> Work:
    optimizer = optim.AdamW(parameters(count), precision="collage-plus")
    optimizer.step()
    return lambda: optimizer.change_precision("extra-bits-8")


def averaged(count: int) -> Work:
    model, optimizer, backward = chain(count)
    backward()
    optimizer.step()
    average = optim.AveragedModel(model, optimizer, decay=0.9)
    return lambda: [average.update_parameters(model) for _ in range(2)]


def fused(count: int) -> Work:
    model, optimizer, backward = chain(count)
    optim.fuse_backward(model, optimizer)
    return backward


def watched(count: int) -> Work:
    _, optimizer, backward = chain(count)

    def work() -> None:
        with diagnostics.watch(optimizer):
            backward()
            optimizer.step()

    return work


def watched_while_fused(count: int) -> Work:
    model, optimizer, backward = chain(count)
    optim.fuse_backward(model, optimizer)

    def work() -> None:
        with diagnostics.watch(optimizer):
            backward()

    return work


def tables(count: int) -> tuple[CachedEmbeddingBags, optim.RowAdagrad, Work]:
    """Tables of their own cache, their optimizer, and a step."""
    module = CachedEmbeddingBags([EmbeddingTable(50, 8)] * count, narrow_above=0)
    optimizer = optim.RowAdagrad(module, lr=0.1)
    values, lengths = torch.arange(2 * count) % 50, torch.ones(2 * count, dtype=torch.int64)
    return module, optimizer, lambda: module(values, lengths).sum().backward()


def tables_trained(count: int) -> Work:
    _, _, step = tables(count)
    return lambda: [step() for _ in range(2)]


def tables_saved_and_loaded(count: int) -> Work:
    module, optimizer, step = tables(count)
    step()

    def work() -> None:
        saved = module.state_dict(), optimizer.state_dict()
        module.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])

    return work


@pytest.mark.parametrize(
    "prepare",
    [
        first_step,
        later_step,
        optimizers_of_one_each,
        groups_of_one_each,
        groups_that_are_added,
        steps_of_halves,
        saved_and_loaded,
        saved_and_loaded_in_full,
        another_precision,
        averaged,
        fused,
        watched,
        watched_while_fused,
        tables_trained,
        tables_saved_and_loaded,
    ],
    ids=lambda prepare: prepare.__name__,
)
def test_each_takes_no_more_the_more_there_are(prepare):
    calls(prepare(2))  # What is looked up once.
    few, many = (calls(prepare(count)) for count in (FEW, MANY))
    assert few > FEW
    assert many <= 1.1 * MANY / FEW * few

"""``model.to(memory_format=...)`` between steps: what is kept beside a parameter follows it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subulp import diagnostics, optim

from .support import BF16, same_bits

PRECISIONS = ("extra-bits-4", "extra-bits-16", "collage-plus", "master", "stochastic")
LAST, FIRST = torch.channels_last, torch.contiguous_format


def new(maker: Any, precision: str, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, bias=False).to(BF16)
    return conv, maker(conv.parameters(), lr=0.01, precision=precision, seed=1, **options)


def step(conv: nn.Module, optimizer: Any, t: int) -> None:
    generator = torch.Generator().manual_seed(t)
    p = conv.weight
    p.grad = torch.randn(p.shape, generator=generator).to(BF16)
    optimizer.step()


MAKERS = [(optim.AdamW, {}), (optim.SGD, {}), (optim.SGD, {"momentum": 0.9})]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("maker", "options"), MAKERS)
@pytest.mark.parametrize("begins", [FIRST, LAST])
def test_a_training_goes_on(maker: Any, options: dict, precision: str, begins: Any) -> None:
    """Nearest bits do not depend on the layout, so that the values can be compared."""
    runs = []
    # Random bits belong to the elements in storage order: no change comes before what draws them.
    draws = precision in ("extra-bits-4", "extra-bits-16", "stochastic")
    for change in (False, True):
        conv, optimizer = new(maker, precision, **options)
        conv.to(memory_format=begins)
        for t in range(3):
            step(conv, optimizer, t)
        kept = optimizer.wide_value(conv.weight).clone()
        if change:
            conv.to(memory_format=FIRST if begins is LAST else LAST)
            assert same_bits(optimizer.wide_value(conv.weight).contiguous(), kept.contiguous())
        if not draws:
            step(conv, optimizer, 3)
        conv.to(memory_format=begins)
        assert same_bits(
            optimizer.state_dict()["state"][0]["step"], torch.tensor(3.0 if draws else 4.0)
        )
        runs.append(optimizer.wide_value(conv.weight).clone())
    assert same_bits(runs[0].contiguous(), runs[1].contiguous())


@pytest.mark.parametrize("precision", ["extra-bits-4", "extra-bits-16"])
@pytest.mark.parametrize(("maker", "options"), MAKERS)
def test_a_state_dict_before_the_next_step_is_the_same(
    maker: Any, options: dict, precision: str
) -> None:
    conv, optimizer = new(maker, precision, **options)
    for t in range(3):
        step(conv, optimizer, t)
    before = copy.deepcopy(optimizer.state_dict()["state"][0])
    conv.to(memory_format=LAST)
    conv.requires_grad_(False)
    after = optimizer.state_dict()["state"][0]
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert same_bits(value, after[name].contiguous()), name


def copied(pair: tuple[nn.Module, Any]) -> tuple[nn.Module, Any]:
    return copy.deepcopy(pair)


def pickled(pair: tuple[nn.Module, Any]) -> tuple[nn.Module, Any]:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copied, pickled])
@pytest.mark.parametrize("late", [False, True])
def test_copies_know_how_their_words_lie(again: Callable, late: bool) -> None:
    """SGD without momentum keeps nothing beside the words that could tell."""
    conv, optimizer = new(optim.SGD, "extra-bits-16")
    conv.to(memory_format=LAST)
    for t in range(3):
        step(conv, optimizer, t)
    wide = optimizer.wide_value(conv.weight).clone()
    if late:
        conv.to(memory_format=FIRST)
    other, theirs = again((conv, optimizer))
    if not late:
        other.to(memory_format=FIRST)
    assert same_bits(theirs.wide_value(other.weight).contiguous(), wide.contiguous())


def test_momentum_that_joins_after_a_change() -> None:
    conv, optimizer = new(optim.SGD, "extra-bits-16")
    for t in range(3):
        step(conv, optimizer, t)
    twin, plain = copy.deepcopy((conv, optimizer))
    conv.to(memory_format=LAST)
    for o in (optimizer, plain):
        o.param_groups[0] |= {"momentum": 0.9, "lr": 0.0}
    step(conv, optimizer, 3)
    step(twin, plain, 3)
    wide = [o.wide_value(c.weight) for c, o in ((conv, optimizer), (twin, plain))]
    assert same_bits(wide[0].contiguous(), wide[1].contiguous())


@pytest.mark.parametrize("every", [1, 100])
def test_a_watch_follows(every: int) -> None:
    found = []
    for change in (False, True):
        conv, optimizer = new(optim.AdamW, "nearest")
        with diagnostics.watch(optimizer, every=every) as w:
            for t in range(6):
                if change and t == 3:
                    conv.to(memory_format=LAST)
                step(conv, optimizer, t)
        moments = w.state_dict()["moments"][0]
        shape = [conv.weight.shape[d] for d in (0, 2, 3, 1)]
        if change:
            moments = [m.view(shape).permute(0, 3, 1, 2) for m in moments]
        found.append([m.contiguous() for m in moments])
    first: list[Tensor] = found[0]
    assert first
    assert all(same_bits(a, b) for a, b in zip(first, found[1], strict=True))

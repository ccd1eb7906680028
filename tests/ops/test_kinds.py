"""Kinds of tensors that are remembered between checks."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from subulp.ops import kinds as kinds_module
from subulp.ops.kinds import FEWEST, Kinds, Remembered


class Other(Tensor):
    """A subclass without a dispatch of its own."""


def tensors() -> list[Tensor]:
    return [nn.Parameter(torch.zeros(3, 4)), torch.zeros(3, 4), torch.zeros(()), torch.zeros(0, 2)]


OTHERS = {
    "dtype": lambda t: t.bfloat16(),
    "shape": lambda t: torch.zeros(4, 3),
    "as many elements": lambda t: torch.zeros(12),
    "strides": lambda t: torch.zeros(4, 3).t(),
    "negated": torch._neg_view,
    "device": lambda t: t.to("meta"),
    "layout": lambda t: t.to_sparse(),
    "parameter": nn.Parameter,
    "subclass": lambda t: t.as_subclass(Other),
    "fewer dimensions": lambda t: t[0],
}


def test_this_pytorch_can_tell():
    kinds = Kinds(tensors())
    assert kinds.are_those_of(tensors())


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_are_told_apart(name):
    kinds, others = Kinds(tensors()), tensors()
    others[1] = OTHERS[name](others[1])
    assert not kinds.are_those_of(others)


def test_more_or_fewer_are_others():
    kinds = Kinds(tensors())
    assert not kinds.are_those_of(tensors()[:-1])
    assert not kinds.are_those_of([*tensors(), torch.zeros(())])


def test_a_mode_in_which_tensors_are_others():
    kinds, them = Kinds(tensors()), tensors()
    with torch.inference_mode():
        assert not kinds.are_those_of(them)
    with torch.no_grad():
        assert kinds.are_those_of(them)
    assert torch.func.vmap(lambda t: t + kinds.are_those_of([them[0], t, *them[2:]]))(
        torch.zeros(2, 3, 4)
    ).equal(torch.zeros(2, 3, 4))


def test_tensors_are_not_kept():
    (them := tensors()).append(big := torch.zeros(5))
    kinds, gone = Kinds(them), weakref.ref(big)
    del them, big
    gc.collect()
    assert gone() is None
    assert kinds.are_those_of([*tensors(), torch.zeros(5)])


def test_what_was_found_is_found_again():
    remembered: Remembered[str] = Remembered()
    many = [torch.zeros(2) for _ in range(FEWEST)]
    assert remembered.get("a", many) is None
    remembered.put("a", many, "found")
    assert remembered.get("a", [torch.ones(2) for _ in many]) == "found"
    assert remembered.get("b", many) is None
    assert remembered.get("a", [torch.zeros(3), *many[1:]]) is None


def test_few_are_not_remembered():
    remembered: Remembered[str] = Remembered()
    few = [torch.zeros(2) for _ in range(FEWEST - 1)]
    remembered.put("a", few, "found")
    assert remembered.get("a", few) is None


def test_the_latest_are_remembered(monkeypatch):
    monkeypatch.setattr(kinds_module, "MOST", 10 * FEWEST)
    remembered: Remembered[int] = Remembered()
    many = [torch.zeros(2) for _ in range(FEWEST)]
    for key in range(100):
        remembered.put(key, many, key)
        assert remembered.get(0, many) == 0
    kept = [key for key in range(100) if remembered.get(key, many) is not None]
    assert kept == [0, *range(91, 100)], "the first was asked for all the time"
    # One that is larger than all is remembered alone.
    more = [torch.zeros(2) for _ in range(11 * FEWEST)]
    remembered.put("more", more, 7)
    assert remembered.get("more", more) == 7
    assert remembered.get(0, many) is None


def test_threads_may_share_what_is_remembered(monkeypatch):
    monkeypatch.setattr(kinds_module, "MOST", 3 * FEWEST)
    remembered: Remembered[int] = Remembered()
    many = [torch.zeros(2) for _ in range(FEWEST)]

    def use(number: int) -> None:
        for turn in range(500):
            key = (number + turn) % 7
            assert remembered.get(key, many) in (None, key)
            remembered.put(key, many, key)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))

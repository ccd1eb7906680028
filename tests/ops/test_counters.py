"""Step counters: many are read and written in C++, with what PyTorch would make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from subulp.ops import native
from subulp.ops.step import counters
from subulp.ops.step.counters import FEWEST, Counters

CPU = torch.device("cpu")
VALUES = (0.0, 1.0, 41.0, 2.0**24 - 1, 2.0**24)


def steps(count: int = 3 * FEWEST) -> list[Tensor]:
    return [torch.tensor(VALUES[i % len(VALUES)]) for i in range(count)]


def outcome(them: list[Tensor]) -> tuple[Tensor, list[Tensor]] | str:
    """What is counted twice, or what is said instead."""
    try:
        for _ in range(2):
            found = Counters(them, CPU)
            found.count()
    except ValueError:
        return "refused"
    return found.after, them


def replaced(make: Callable[[Tensor], Tensor]) -> Callable[[], list[Tensor]]:
    def with_another() -> list[Tensor]:
        them = steps()
        them[5] = make(them[5])
        return them

    return with_another


def freed(step: Tensor) -> Tensor:
    step.untyped_storage().resize_(0)
    return step


CASES = {
    "plain": steps,
    "float64": replaced(Tensor.double),
    "int64": replaced(Tensor.long),
    "bfloat16": replaced(Tensor.bfloat16),
    "one element": replaced(lambda step: step.view(1)),
    "view": replaced(lambda step: torch.arange(9.0)[4]),
    "parameter": replaced(lambda step: torch.nn.Parameter(step, requires_grad=False)),
    "shared": lambda: [shared := torch.tensor(3.0), *steps(), shared],
    "half": replaced(lambda step: torch.tensor(0.5)),
    "negative": replaced(lambda step: torch.tensor(-1.0)),
    "infinite": replaced(lambda step: torch.tensor(float("inf"))),
    "NaN": replaced(lambda step: torch.tensor(float("nan"))),
    "freed": replaced(freed),
    "meta": replaced(lambda step: step.to("meta")),
}


REFUSED = {"int64", "one element", "half", "negative", "infinite", "NaN", "freed", "meta"}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_many_count_as_in_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(CASES[name]())
    monkeypatch.setattr(counters, "FEWEST", 1 << 30)
    expected = outcome(CASES[name]())
    if isinstance(expected, str) or isinstance(found, str):
        assert name in REFUSED
        assert found == expected
        return
    assert found[0].equal(expected[0])
    assert found[0].dtype == expected[0].dtype
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.equal(theirs)


def test_cpp_counts_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "stack", None)
    Counters(steps(), CPU).count()
    monkeypatch.undo()
    monkeypatch.setattr(native, "library", None)
    Counters(steps(3), CPU).count()
    monkeypatch.setenv("SUBULP_BACKEND", "reference")
    Counters(steps(), CPU).count()


def test_nothing_is_counted_before() -> None:
    them = steps()
    assert Counters(them, CPU).after[:3].tolist() == [1.0, 2.0, 42.0]
    assert all(a.equal(b) for a, b in zip(them, steps(), strict=True))


def test_a_count_is_a_write() -> None:
    them = steps()
    before = [step._version for step in them]
    Counters(them, CPU).count()
    assert all(step._version > old for step, old in zip(them, before, strict=True))


def test_a_counter_that_was_written_counts_on() -> None:
    them = steps()
    Counters(them, CPU).count()
    them[2].fill_(7.0)
    Counters(them, CPU).count()
    assert them[2].item() == 8.0


@pytest.mark.parametrize("count", [3, 3 * FEWEST])
def test_steps_that_draw_by_their_numbers_are_counted_on(count: int) -> None:
    """FP32 counts to 2**24 and stays there: every later step would draw the same bits."""
    last = 2.0**24 - 1
    them = [torch.tensor(last if i % 2 else 7.0) for i in range(count)]
    found = Counters(them, CPU, draws=True)
    found.count()
    wanted = [2.0**23 + 1 if i % 2 else 8.0 for i in range(count)]
    assert found.after.tolist() == wanted
    assert [float(step) for step in them] == wanted
    kept = [torch.tensor(last) for _ in range(count)]
    Counters(kept, CPU).count()
    assert [float(step) for step in kept] == [2.0**24] * count

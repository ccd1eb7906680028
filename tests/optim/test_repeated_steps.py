"""A step like the one before is not prepared anew: the same bits, whatever is changed meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from subulp import diagnostics, optim
from subulp.ops.kinds import Remembered
from subulp.ops.step import job, repeat
from tests.ops.support import environment, threads

from .support import BF16, E4M3, FP16, FP32, SHAPES, Case, Run, assert_same, cases, parameters

STEPS = 6
ANEW = [False] * 3
"""The first step makes the states, the second checks them, the third is remembered."""

Change = Callable[[Any, int], object]


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step of a bucket that is looked for, whether it was found."""
    seen: list[bool] = []
    found = repeat.repeated

    def spy(*arguments: Any) -> repeat.Repeated | None:
        step = found(*arguments)
        seen.append(step is not None)
        return step

    monkeypatch.setattr(repeat, "repeated", spy)
    # A parameter of a test before, now freed, may have had this one's identity and its kinds.
    monkeypatch.setattr(repeat, "_known", Remembered())
    monkeypatch.setattr(job, "_checked", Remembered())
    return seen


def trained(run: Run, change: Change | None = None) -> Run:
    """The run after some steps, the optimizer changed before each."""
    for t in range(1, STEPS + 1):
        if change is not None:
            change(run.optimizer, t)
        run.train(1)
    return run


def prepare_all_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "repeated", lambda *arguments: None)


@pytest.mark.parametrize("case", cases())
def test_bits_are_those_of_steps_that_are_prepared_anew(
    case: Case, repeats: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(case.fresh())
    # States of FP8 are scaled by the largest gradient, for which each step has to look.
    scaled = case.dtype == E4M3 and case.optimizer not in ("sgd",)
    assert repeats == ([False] * STEPS if scaled else ANEW + [True] * (STEPS - 3))
    prepare_all_anew(monkeypatch)
    assert_same(run, trained(case.fresh()))


# ---------------------------------------------------------------------- changes between steps

AT = 5
"""The step that is changed: one that would be repeated."""


def rate(optimizer: Any, t: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / t


def rate_in_place(optimizer: Any, t: int) -> None:
    group = optimizer.param_groups[0]
    if t == 1:
        group["lr"] = torch.tensor(0.1)
    group["lr"].mul_(0.9)


def betas_in_place(optimizer: Any, t: int) -> None:
    group = optimizer.param_groups[0]
    if t == 1:
        group["betas"] = [0.9, 0.99]
    if t == AT:
        group["betas"][0] = 0.3


def betas_of_a_cycle(optimizer: Any, t: int) -> None:
    optimizer.param_groups[0]["betas"] = (0.9 - 0.05 * t, 0.99)


def decay_in_place(optimizer: Any, t: int) -> None:
    group = optimizer.param_groups[0]
    if t == 1:
        group["weight_decay"] = torch.tensor(0.1)
    if t == AT:
        group["weight_decay"].fill_(0.7)


def eps(optimizer: Any, t: int) -> None:
    if t == AT:
        optimizer.param_groups[0]["eps"] = 0.5


def direction(optimizer: Any, t: int) -> None:
    optimizer.param_groups[0]["maximize"] = t == AT


def seed(optimizer: Any, t: int) -> None:
    optimizer.param_groups[0]["seed"] = 7 if t == AT else 3


def precision(optimizer: Any, t: int) -> None:
    if t == AT:
        optimizer.change_precision("master")


def arithmetic(optimizer: Any, t: int) -> None:
    optimizer.param_groups[0].update(arithmetic="strict" if t == AT else "wide", eps=1e-3)


def counters_apart(optimizer: Any, t: int) -> None:
    for i, state in enumerate(optimizer.state.values()):
        if t == AT:
            state["step"].fill_((3.0, 900.0, 2.0**24, 1.0)[i])


def state_dropped(optimizer: Any, t: int) -> None:
    if t == AT:
        optimizer.state[optimizer.param_groups[0]["params"][1]].clear()


def state_unknown(optimizer: Any, t: int) -> None:
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p].pop("mine", None)
        if t == AT:
            optimizer.state[p]["mine"] = torch.zeros(3)


def renamed(optimizer: Any, t: int) -> None:
    """Random bits are drawn by names."""
    if t == AT:
        optimizer.param_groups[0]["param_names"] = [f"p{i}" for i in range(len(SHAPES))]


CHANGES = {
    "collage-plus": (rate, rate_in_place, betas_in_place, betas_of_a_cycle, decay_in_place, eps),
    "stochastic": (direction, seed, renamed, counters_apart),
    "collage-light": (precision, arithmetic, state_dropped, state_unknown),
}
ALL_CHANGES = [(name, change) for name, changes in CHANGES.items() for change in changes]


@pytest.mark.parametrize(
    ("name", "change"), ALL_CHANGES, ids=[change.__name__ for _, change in ALL_CHANGES]
)
def test_a_change_counts(
    name: str, change: Change, repeats: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("adamw", name, BF16)
    changed = trained(case.fresh(), change)
    assert any(repeats) == (change is not betas_of_a_cycle)
    unchanged = trained(case.fresh())
    shows = changed.bits().keys() != unchanged.bits().keys() or any(
        not torch.equal(value, unchanged.bits()[key]) for key, value in changed.bits().items()
    )
    assert shows == (change is not state_unknown)
    prepare_all_anew(monkeypatch)
    assert_same(changed, trained(case.fresh(), change))


def test_momentum_comes_and_goes(repeats: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def change(optimizer: Any, t: int) -> None:
        optimizer.param_groups[0]["momentum"] = 0.0 if t in (1, 2, 3, 5) else 0.9

    case = Case("sgd", "extra-bits-5", FP16)
    run = trained(case.fresh(), change)
    prepare_all_anew(monkeypatch)
    assert_same(run, trained(case.fresh(), change))


def test_another_optimizer_of_the_same_parameters(repeats: list[bool]) -> None:
    """Adam and AdamW differ in nothing that a kernel's tensors would tell."""
    names = ("adam", "adamw")
    found = []
    for order in (names, names[::-1]):
        params = parameters(FP32)
        start = copy.deepcopy(params)
        runs = {name: Run(params, Case(name, "fp32", FP32).make(params)) for name in order}
        for _ in range(STEPS):
            bits = {}
            for name, run in runs.items():
                torch._foreach_copy_([p.data for p in params], start)
                bits[name] = run.train(1).bits()
        found.append(bits)
    # What the tensors are is known of the second optimizer one step earlier.
    assert sum(repeats) == 2 * (STEPS - 3 + STEPS - 2)
    for name in names:
        assert_same(found[0][name], found[1][name])
    assert not torch.equal(found[0]["adam"]["parameter 0"], found[0]["adamw"]["parameter 0"])


def test_what_is_chosen_at_run_time_is_chosen_anew(repeats: list[bool]) -> None:
    case = Case("adamw", "stochastic", BF16)
    plain = trained(case.fresh())
    repeats.clear()
    run = case.fresh()
    for t in range(1, STEPS + 1):
        with (
            environment(SUBULP_BACKEND="reference" if t == 4 else "cpu"),
            environment(SUBULP_ISA="plain" if t == 5 else "avx2"),
            threads(t),
        ):
            run.train(1)
    assert repeats == [False] * 4 + [True] * (STEPS - 4)
    assert_same(run, plain)


def test_observers_see_whole_steps(repeats: list[bool]) -> None:
    run = Case("adamw", "collage-light", BF16).fresh().train(4)
    assert repeats == [*ANEW, True]
    with diagnostics.watch(run.optimizer) as watched:
        run.train(1)
        assert len(repeats) == 4, "an observed step is not looked for"
        assert watched.effective_descent_quality > 0.0
    run.train(1)
    assert repeats[4:] == [True]


class Observer:
    """Keeps the devices of the jobs that it is shown."""

    def __init__(self) -> None:
        self.seen: list[torch.device] = []

    def begin_step(self) -> None: ...

    def begin_update(self, pending: Any) -> None:
        self.seen.append(pending.job.device)

    def end_update(self, bucket: Any) -> None: ...

    def end_step(self) -> None: ...


def test_somebody_observes_a_step_that_has_been_prepared(
    repeats: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Case("adamw", "collage-light", BF16).fresh().train(4)
    late = Observer()
    prepare = run.optimizer._prepare

    def prepare_and_join(buckets: Any) -> Any:
        pending = prepare(buckets)
        run.optimizer.observers = (late,)
        return pending

    monkeypatch.setattr(run.optimizer, "_prepare", prepare_and_join)
    run.train(1)
    assert repeats == [*ANEW, True, True]
    assert late.seen == [torch.device("cpu")]
    monkeypatch.undo()
    assert_same(run, Case("adamw", "collage-light", BF16).fresh().train(5))


def test_copies_and_loaded_states(repeats: list[bool]) -> None:
    run = Case("adamw", "collage-plus", BF16).fresh().train(4)
    optimizer = copy.deepcopy(run.optimizer)
    twin = Run(optimizer.param_groups[0]["params"], optimizer, run.t)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    for _ in range(3):
        run.train(1)
        twin.train(1)
    # The loaded states are of the kinds that were known; the copy's parameters are new.
    assert repeats == [*ANEW, True, True, False, True, False, True, True]
    assert_same(run, twin)


def test_a_version_is_counted(repeats: list[bool]) -> None:
    """A backward pass that still needs an old value must notice."""
    run = Case("sgd-momentum", "fp32", FP32).fresh().train(4)
    loss = (run.params[0] * run.params[0]).sum()
    counter = run.optimizer.state[run.params[0]]["step"]
    before = counter._version
    run.train(1)
    assert repeats == [*ANEW, True, True]
    assert counter._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_fused_backward_pass_repeats_its_buckets(
    repeats: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fused() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(BF16)
        optimizer = optim.AdamW(model.parameters(), lr=0.1, precision="stochastic", seed=3)
        optim.fuse_backward(model, optimizer)
        for _ in range(STEPS):
            model(torch.randn(5, 8).to(BF16)).square().sum().backward()
        return [p.detach() for p in model.parameters()]

    first = fused()
    assert repeats == ANEW + [True] * (STEPS - 3)
    prepare_all_anew(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(first, fused(), strict=True))

"""Tables that stay on a device between calls: found by what they hold, never by mistake."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from .support import (
    BF16,
    E4M3,
    Setup,
    State,
    assert_same,
    fresh_state,
    gradients,
    interpreted,
    parameters,
    take_step,
)

launch = pytest.importorskip("subulp.ops.triton.launch")

CPU = torch.device("cpu")
SIZES = (1100, 33, 40)


def doubled(table: np.ndarray) -> tuple[np.ndarray, ...]:
    return table, 2 * table


def negated(table: np.ndarray) -> tuple[np.ndarray, ...]:
    return (-table,)


def test_equal_tables_are_uploaded_once():
    table = np.arange(6).reshape(2, 3)
    first = launch.kept(CPU, table, doubled)
    assert [t.tolist() for t in first] == [[0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]]
    assert launch.kept(CPU, table.copy(), doubled) is first
    for other, make in ((table + 1, doubled), (table.reshape(3, 2), doubled), (table, negated)):
        found = launch.kept(CPU, other, make)
        assert [t.tolist() for t in found] == [t.reshape(-1).tolist() for t in make(other)]


def test_what_is_kept_is_bounded():
    tables = [np.full((1, 1), i) for i in range(launch._KEPT + 1)]
    first = launch.kept(CPU, tables[0], doubled)
    for table in tables:
        launch.kept(CPU, table, doubled)
    again = launch.kept(CPU, tables[0], doubled)
    assert again is not first
    assert torch.equal(again[1], first[1])


@interpreted
@pytest.mark.parametrize(
    "setup",
    [
        Setup("adam", "stochastic", BF16),
        Setup("sgd", "kahan", BF16),
        Setup("adam", "nearest", E4M3),
    ],
    ids=str,
)
def test_tensors_may_be_replaced_between_steps(setup):
    """Overwritten, exchanged, moved, and others in the memory of those that were freed."""
    expected = fresh_state(setup, parameters(setup, SIZES))
    actual = expected.map(torch.clone)
    grads = gradients(setup, SIZES, 1)

    def check(t: int) -> None:
        take_step(setup, expected, grads, t, backend="reference")
        take_step(setup, actual, grads, t, backend="triton")
        assert_same(actual, expected)

    check(1)
    for g in grads:
        g.copy_(g.float().flip(0))
    check(2)
    for state in (expected, actual):
        for role in vars(state).values():
            role.reverse()
    grads.reverse()
    check(3)
    name = "extras" if actual.extras else "slow"
    for state in (expected, actual):
        setattr(state, name, [(2 * t.float()).to(t.dtype) for t in getattr(state, name)])
    check(4)
    for t in range(5, 8):
        grads.clear()
        grads += gradients(setup, SIZES[::-1], t)
        check(t)


@interpreted
@pytest.mark.parametrize(
    "setup",
    [Setup("adam", "stochastic", BF16), Setup("adam", "collage-plus", E4M3)],
    ids=str,
)
def test_tensors_of_different_counts(setup):
    """What a step brings has a row for each count; which one is a tensor's may change."""
    states: list[State] = []
    for backend in ("reference", "triton"):
        state = fresh_state(setup, parameters(setup, SIZES))
        for t, ahead in ((1, (0, 6, 0)), (2, (0, 6, 0)), (9, (0, -2, 0)), (10, (0, 0, 0))):
            counts = [torch.tensor(float(t + more)) for more in ahead]
            take_step(setup, state, gradients(setup, SIZES, t), t, backend=backend, steps=counts)
        states.append(state)
    assert_same(states[1], states[0])


@interpreted
def test_buffers_that_begin_late():
    setup = dataclasses.replace(Setup("sgd", "nearest", BF16), momentum=0.9)
    states: list[State] = []
    for backend in ("reference", "triton"):
        state = fresh_state(setup, parameters(setup, SIZES))
        for t, fresh in ((1, [False] * 3), (2, [False, True, False]), (3, [False] * 3)):
            take_step(setup, state, gradients(setup, SIZES, t), t, backend=backend, fresh=fresh)
        states.append(state)
    assert_same(states[1], states[0])


def test_kernels_of_other_columns_are_others():
    """Triton keeps them on disk by source and arguments, of which the columns are one."""
    columns = {"numel": 0, "grad": 1}
    assert launch.layout(columns) != launch.layout({"grad": 0, "numel": 1})
    assert launch.layout(columns, {"step": 0}) != launch.layout(columns | {"step": 2})

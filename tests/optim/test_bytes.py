"""Bytes per parameter, from live tensors: Collage, Table 2."""

from __future__ import annotations

import pytest
import torch

from subulp import optim

from .support import BF16, E4M3, FP16, FP32, Case, cases, parameters

# 2 bytes of a parameter and its gradient, and what AdamW keeps beside them.
TOTALS = {
    "fp32": {FP32: 16},
    "nearest": {BF16: 8, FP16: 8, E4M3: 4},
    "stochastic": {BF16: 8, FP16: 8, E4M3: 4},
    "kahan": {BF16: 10, FP16: 10},
    "collage-light": {BF16: 10, FP16: 10, E4M3: 5},
    "collage-plus": {BF16: 12, FP16: 12, E4M3: 6},
    "fp32-states": {BF16: 12, FP16: 12},
    "master": {BF16: 16, FP16: 16},
}
# Whole groups of 32 packed tails.
SHAPES = ((32, 3), (64,))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("precision", "dtype", "total"),
    [(name, dtype, total) for name, row in TOTALS.items() for dtype, total in row.items()],
)
def test_table_2(precision, dtype, total, when):
    run = Case("adamw", precision, dtype).fresh(SHAPES)
    if when == "after":
        run.train(1)
    found = run.optimizer.bytes_per_parameter()
    assert found["total"] == total
    assert found["parameter"] == found["gradient"] == dtype.itemsize
    assert sum(found.values()) == 2 * total


def test_table_is_complete():
    listed = {(name, dtype) for name, row in TOTALS.items() for dtype in row}
    have = {(c.values[0].precision, c.values[0].dtype) for c in cases(["adamw"])}
    assert {pair for pair in have if "extra-bits" not in pair[0]} == listed


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rounding", ["nearest", "deterministic", "truncate", "stochastic"])
@pytest.mark.parametrize("k", range(1, 17))
def test_extra_bits(k, rounding, when):
    run = Case("adamw", optim.ExtraBits(k, rounding).__str__(), BF16).fresh(SHAPES)
    if when == "after":
        run.train(1)
    found = run.optimizer.bytes_per_parameter()
    weight = 2 + k / 8 + (1 / 8 if rounding == "stochastic" else 0)
    words = found.get("extra_bits", 0.0) + found.get("signed_bits", 0.0)
    assert found["parameter"] + words == weight
    assert found["total"] == weight + 2 + 4 + 4


@pytest.mark.parametrize(
    ("optimizer", "precision", "expected"),
    [
        ("sgd", "nearest", 4),
        ("sgd", "collage-plus", 6),
        ("sgd", "master", 8),
        ("sgd-momentum", "nearest", 6),
        ("sgd-momentum", "collage-light", 8),
        ("sgd-momentum", "collage-plus", 10),
        ("sgd-momentum", "master", 12),
    ],
)
def test_sgd(optimizer, precision, expected):
    run = Case(optimizer, precision, BF16).fresh(SHAPES)
    assert run.optimizer.bytes_per_parameter()["total"] == expected
    assert run.train(1).optimizer.bytes_per_parameter()["total"] == expected


def test_groups_are_averaged_by_their_elements():
    small, large = parameters(BF16, [(32,), (96,)])
    groups = [{"params": [small], "precision": "master"}, {"params": [large]}]
    found = optim.AdamW(groups, precision="nearest").bytes_per_parameter()
    assert found["master"] == 4 * 32 / 128
    assert found["total"] == (16 * 32 + 8 * 96) / 128


def test_tensors_are_what_is_counted():
    """The sum over live storage, gradients of their own dtype included."""
    run = Case("adamw", "collage-plus", BF16).fresh(SHAPES)
    for p in run.params:
        p.grad_dtype = torch.float32
        p.grad = torch.zeros(p.shape)
    run.optimizer.step()
    live = sum(p.nbytes + p.grad.nbytes for p in run.params) + sum(
        x.untyped_storage().nbytes()
        for p in run.params
        for name, x in run.optimizer.state[p].items()
        if name != "step"
    )
    found = run.optimizer.bytes_per_parameter()
    assert found["gradient"] == 4
    assert found["total"] * sum(p.numel() for p in run.params) == live


def test_scalar_parameter():
    run = Case("adamw", "collage-plus", BF16).fresh([()])
    assert run.optimizer.bytes_per_parameter()["total"] == 12
    assert run.train(1).optimizer.bytes_per_parameter()["total"] == 12

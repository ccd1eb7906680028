"""Clipping inside the backward pass has the bits of torch's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from subulp import optim

from ..support import BF16, FP32
from .twins import MAKERS, assert_same, batches, loss_of, twins


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_each_parameters_norm(dtype: torch.dtype, norm_type: float) -> None:
    """Some gradients are longer than the limit and some are not."""
    limit, cut = 0.03, []
    plain, fused = twins(MAKERS["sgd"]("auto"), dtype)
    with optim.fuse_backward(*fused, clip_parameter_norm=limit, norm_type=norm_type):
        for batch in batches(3, dtype):
            loss_of(plain[0], batch).backward()
            for p in plain[0].parameters():
                cut.append(bool(nn.utils.clip_grad_norm_([p], limit, norm_type) > limit))
            plain[1].step()
            plain[1].zero_grad()
            # A plain backward pass: one is enough.
            loss_of(fused[0], batch).backward()
    assert 0 < sum(cut) < len(cut)
    assert_same(plain, fused)


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_global_norm_of_other_types(norm_type: float) -> None:
    plain, fused = twins(MAKERS["sgd"]("auto"), BF16)
    with optim.fuse_backward(*fused, max_norm=0.1, norm_type=norm_type) as handle:
        for batch in batches(2, BF16):
            loss_of(plain[0], batch).backward()
            total = nn.utils.clip_grad_norm_(plain[0].parameters(), 0.1, norm_type)
            plain[1].step()
            plain[1].zero_grad()
            handle.backward(loss_of(fused[0], batch))
            assert handle.total_norm is not None
            assert torch.equal(handle.total_norm, total)
    assert_same(plain, fused)


@pytest.mark.parametrize("options", [{"clip_parameter_norm": 0.03}, {"clip_value": 1e-3}])
def test_the_accumulated_gradient_is_clipped(options: dict[str, float]) -> None:
    plain, fused = twins(MAKERS["sgd"]("auto"), BF16)
    with optim.fuse_backward(*fused, accumulate=2, **options):
        for i, batch in enumerate(batches(4, BF16)):
            loss_of(plain[0], batch).backward()
            loss_of(fused[0], batch).backward()
            if i % 2 == 0:
                continue
            if "clip_value" in options:
                nn.utils.clip_grad_value_(plain[0].parameters(), options["clip_value"])
            else:
                for p in plain[0].parameters():
                    nn.utils.clip_grad_norm_([p], options["clip_parameter_norm"])
            plain[1].step()
            plain[1].zero_grad()
    assert_same(plain, fused)


def test_a_step_without_gradients_has_no_norm() -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with optim.fuse_backward(model, optimizer, max_norm=1.0) as handle:
        handle.backward(torch.ones((), requires_grad=True) * 2)
        assert handle.total_norm is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_parameter_norm": 0.0}, r"clip_parameter_norm=0\.0 is out of range"),
        ({"clip_parameter_norm": float("nan")}, "clip_parameter_norm=nan is out of range"),
        (
            {"clip_parameter_norm": 1.0, "max_norm": 2.0},
            r"max_norm=2\.0 and clip_parameter_norm=1\.0 are both set: clip one way",
        ),
        ({"clip_parameter_norm": 1.0, "clip_value": 2.0}, "clip one way"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        optim.fuse_backward(model, optimizer, **options)
    optim.fuse_backward(model, optimizer).remove()

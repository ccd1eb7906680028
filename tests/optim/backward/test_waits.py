"""A step inside the backward pass does not have the host wait for a GPU, which may then run ahead.

Counted where tensors would have to come to the host: kernels are interpreted, which read no number
through PyTorch.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from subulp import optim
from tests.ops.support import environment, interpreted

pytestmark = interpreted


class Waits(TorchDispatchMode):
    """Counts what fetches numbers."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.seen: list[str] = []
        # Of a CPU's tensors these do not come by here.
        for name in ("tolist", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, function):
        def call(tensor, *args, **kwargs):
            # The counters of steps lie on the host.
            if not sys._getframe(1).f_code.co_filename.endswith("ops/step/job.py"):
                self.seen.append(function.__name__)
            return function(tensor, *args, **kwargs)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.is_nonzero,
            torch.ops.aten.equal,
        ):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def waits(
    monkeypatch,
    precision="collage-plus",
    dtype=torch.bfloat16,
    kind=optim.AdamW,
    nonfinite="propagate",
    **options,
):
    """Those of the second step, of a model with small tensors and a large one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 3))
    model = model.to(dtype)
    optimizer = kind(model.parameters(), lr=0.1, precision=precision, nonfinite=nonfinite, seed=0)
    x = torch.randn(4, 32, dtype=dtype)
    with (
        environment(SUBULP_BACKEND="triton"),
        optim.fuse_backward(model, optimizer, **options) as handle,
    ):
        for _ in range(2):
            before = [p.detach().clone() for p in model.parameters()]
            loss = model(x).float().square().mean()
            with monkeypatch.context() as patch, Waits(patch) as found:
                handle.backward(loss)
            assert any(
                not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
            )
    return found.seen


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_a_step_has_none(monkeypatch, kind):
    assert not waits(monkeypatch, kind=kind)


@pytest.mark.parametrize("precision", ["stochastic", "extra-bits-8", "kahan"])
def test_no_precision_has_any(monkeypatch, precision):
    assert not waits(monkeypatch, precision)


@pytest.mark.parametrize(
    "clipping", [{"max_norm": 0.01}, {"clip_parameter_norm": 0.01}, {"clip_value": 0.001}], ids=str
)
def test_clipping_is_decided_on_the_device(monkeypatch, clipping):
    assert not waits(monkeypatch, **clipping)


def test_a_policy_that_needs_the_host_waits_once(monkeypatch):
    """It raises: the same count sees that it looks."""
    assert waits(monkeypatch, nonfinite="raise") == ["tolist"]


def test_fetching_a_number_is_seen(monkeypatch):
    with monkeypatch.context() as patch, Waits(patch) as found:
        torch.ones(()).item()
        bool(torch.ones(()))
        torch.ones(()).cpu()
    assert len(found.seen) == 3

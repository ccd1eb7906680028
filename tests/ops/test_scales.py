"""Scales of FP8 states: a GPU computes the host's, and updates the running maxima."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from subulp.ops import adam, sgd
from subulp.ops.step.job import StepJob
from subulp.ops.step.scales import SCALES, Scaling

from .support import (
    BF16,
    DTYPES,
    E4M3,
    FP32,
    Setup,
    arguments,
    fresh_state,
    gradients,
    interpreted,
    parameters,
    short,
    take_step,
)

triton_scales = pytest.importorskip("subulp.ops.step.triton_scales")

SETUPS = {power: Setup(op, "nearest", E4M3) for power, op in ((1, "sgd"), (2, "adam"))}


def job_of(power: int, grads: list[torch.Tensor], amaxes: torch.Tensor, **options) -> StepJob:
    setup = SETUPS[power]
    state = fresh_state(setup, [torch.zeros(g.shape, dtype=E4M3) for g in grads])
    state.amaxes = list(amaxes.clone().unbind())
    make_job = adam.make_job if power == 2 else sgd.make_job
    return make_job(**arguments(setup, state, grads, 1, **options))


def scaling_of(job: StepJob) -> Scaling:
    assert job.scaling is not None
    return job.scaling


def check_same(job: StepJob) -> None:
    """The kernel's scales and running maxima are the host's."""
    scaling = scaling_of(job)
    before = torch.stack(tuple(scaling.amaxes))
    with np.errstate(all="ignore"):
        found = triton_scales.run(job, torch.from_numpy(triton_scales.progress(job)))
    after = torch.stack(tuple(scaling.amaxes))
    torch._foreach_copy_(list(scaling.amaxes), list(before.unbind()))
    job.settle()
    for i, name in enumerate(SCALES):
        wrong = np.flatnonzero(found[:, i].numpy() != job.scalars[name])
        assert not wrong.size, (name, wrong, before[wrong])
    job.keep_amaxes()
    expected = torch.stack(tuple(scaling.amaxes))
    assert torch.equal(after.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


@interpreted
@pytest.mark.parametrize("power", SETUPS)
def test_scales_of_a_gpu_are_those_of_the_host(power):
    """Running maxima of all sizes, zeros and subnormal ones, with every kind of gradient."""
    special = [0.0, 1e-45, 1e-40, 2.0**-126, 1.0, 1.5, 2.0, 3e38, torch.inf, torch.nan]
    numbers = torch.cat([torch.tensor(special), 2.0 ** torch.arange(-140.0, 128.0, 19.3)])
    before, now = torch.cartesian_prod(numbers, numbers).T.contiguous()
    grads = [torch.zeros(1, dtype=E4M3)] * len(now)
    check_same(job_of(power, grads, before, gradient_amaxes=now))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_largest_of_many_programs(dtype):
    """Wherever it lies: in whole blocks, at the end, alone, in an unaligned tensor; or NaN."""
    size = 2 * triton_scales.BLOCK + 77
    grads = []
    for place in (0, size // 2, size - 1):
        for value in (-3.0, torch.nan):
            g = torch.full((size,), 2.0**-7)
            g[place] = value
            grads.append(g.to(dtype))
    grads += [grads[0].new_empty(0), torch.zeros(5).to(dtype), grads[4][1:]]
    check_same(job_of(2, grads, torch.linspace(0.0, 4.0, len(grads))))


@interpreted
def test_an_order_of_arrival_does_not_matter(monkeypatch):
    """Programs in any order: the last one to come finishes, whichever it is."""
    launch = pytest.importorskip("subulp.ops.triton.launch")
    plan = launch.plan
    (g,) = gradients(SETUPS[2], [3 * triton_scales.BLOCK + 5], 1)
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        monkeypatch.setattr(launch, "_made", launch._made.__wrapped__)
        monkeypatch.setattr(launch, "plan", lambda *args, order=order: plan(*args)[order])
        job = job_of(2, [g], torch.zeros(1))
        there = torch.from_numpy(triton_scales.progress(job))
        results.append((triton_scales.run(job, there), scaling_of(job).amaxes[0]))
        monkeypatch.undo()
    assert scaling_of(job).amaxes[0] == g.float().abs().max()
    for scales, amax in results[1:]:
        assert torch.equal(scales, results[0][0])
        assert amax == results[0][1]


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
def test_running_maxima_change_when_the_step_is_taken(backend):
    setup = SETUPS[2]
    state = fresh_state(setup, parameters(setup, [40]))
    (g,) = gradients(setup, [40], 1)
    adam.make_job(**arguments(setup, state, [g], 1)).settle()
    assert state.amaxes[0] == 0.0
    take_step(setup, state, [g], 1, backend=backend)
    assert state.amaxes[0] == g.float().abs().max()


@pytest.mark.parametrize(
    ("amaxes", "found", "message"),
    [
        ([], None, "amaxes has 0 tensors"),
        ([torch.zeros((), dtype=BF16)], None, r"amaxes\[0\] is torch.bfloat16"),
        ([torch.zeros(1)], None, r"amaxes\[0\] is torch.float32 of shape \(1,\)"),
        ([torch.zeros(())], torch.zeros(2), r"gradient_amaxes is .* of shape \(2,\)"),
        ([torch.zeros(())], torch.zeros(1).double(), "gradient_amaxes is torch.float64"),
    ],
)
def test_what_kernels_would_misread_is_refused(amaxes, found, message):
    setup = SETUPS[2]
    state = fresh_state(setup, [torch.zeros(3, dtype=E4M3)])
    state.amaxes = amaxes
    grads = [torch.zeros(3, dtype=FP32)]
    with pytest.raises(ValueError, match=message):
        adam.make_job(**arguments(setup, state, grads, 1, gradient_amaxes=found))

"""Scales of FP8 states: a GPU computes the host's; the host asks for them where it must know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from subulp.ops.step.job import SCALES, StepJob, device_scales, new_scalars, scale_states
from subulp.ops.strategy import parse_strategy


@pytest.mark.parametrize("slow_power", [1, 2])
def test_scales_of_a_gpu_are_those_of_the_host(slow_power):
    """Running maxima of all sizes, zeros and subnormal ones, with every kind of gradient."""
    numbers = torch.cat(
        [
            torch.tensor([0.0, 1e-45, 1e-40, 2.0**-126, 1.0, 1.5, 2.0, 3e38, torch.inf]),
            2.0 ** torch.arange(-140.0, 128.0, 7.3),
        ]
    )
    before = numbers[numbers.isfinite()].repeat_interleave(len(numbers) + 1)
    now = torch.cat([numbers, torch.tensor([torch.nan])]).repeat(len(before) // (len(numbers) + 1))
    least = 2.0**-16
    scales, after = device_scales(before, now, slow_power, least)
    count = len(before)
    params = [torch.zeros(1, dtype=torch.float8_e4m3fn) for _ in range(count)]
    slow = [torch.zeros(1, dtype=torch.float8_e5m2) for _ in range(count)]
    job = StepJob(
        *(parse_strategy("nearest"), params, params, params, slow, (), ()),
        new_scalars([torch.tensor(1.0)] * count, [0] * count, [0] * count),
        *(0, 0.9, 0.1),
    )
    amaxes = list(before.clone().unbind())
    scale_states(job, amaxes, slow_power, now)
    assert torch.equal(torch.stack(amaxes), after)
    expected = np.stack([job.scalars[name] for name in SCALES], 1)
    assert np.array_equal(scales.numpy(), expected)
    # And the host gets them when it asks.
    other = replace(job, scales=scales, scalars=np.zeros_like(job.scalars))
    other.settle()
    for name in SCALES:
        assert np.array_equal(other.scalars[name], job.scalars[name])

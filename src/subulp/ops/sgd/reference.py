"""SGD step in plain PyTorch: the meaning that the other implementations reproduce bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ..step import storage
from ..step.job import StepJob


def run(job: StepJob) -> None:
    """Update the tensors of a job in place."""
    for i in range(len(job.params)):
        _step(job, i)


def _step(job: StepJob, i: int) -> None:
    s, strategy = job.scalars[i], job.strategy
    param, extra = job.params[i], job.role(job.extras, i)
    buffer, low = job.role(job.slow, i), job.role(job.slow_lows, i)
    # Kahan summation carries the remainder in the update, not in the parameter.
    kahan = strategy.weight == "kahan"
    theta = param.float() if kahan else storage.decode_parameter(strategy, param, extra)
    delta, b = update(job, i, theta)

    bits = storage.draw_bits(
        strategy,
        param,
        seed=job.seed,
        stream=int(s["stream"]),
        step=int(s["step"]),
        offset=int(s["offset"]),
    )
    if buffer is not None:
        assert b is not None
        for_state = storage.state_bits(strategy, param, bits)
        storage.encode_state(b, buffer, low, float(s["slow_encode"]), for_state)
    storage.apply_update(strategy, theta, delta, param, extra, bits)


def intended_update(job: StepJob, i: int, theta: Tensor) -> Tensor:
    """What the step would subtract from tensor ``i`` of wide value ``theta``; changes nothing."""
    return update(job, i, theta)[0]


def update(job: StepJob, i: int, theta: Tensor) -> tuple[Tensor, Tensor | None]:
    """The wide arithmetic of tensor ``i``: what is subtracted from ``theta``, and the new buffer.

    Separate multiplications and additions: ``add(..., alpha=)`` may contract into a fused one.
    """
    s = job.scalars[i]
    buffer, low = job.role(job.slow, i), job.role(job.slow_lows, i)
    b = None if buffer is None else storage.decode_state(buffer, low, float(s["slow_decode"]))
    g = job.grads[i].to(torch.float32)
    if job.maximize:
        g = -g
    if job.weight_decay != 0.0:
        g = g + theta * job.weight_decay
    if b is not None:
        b = g if s["step"] == 1 else b * job.beta1 + g * job.one_minus_beta1
        g = g + b * job.beta1 if job.nesterov else b
    return g * float(s["step_size"]), b

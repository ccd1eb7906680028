"""SGD step in plain PyTorch: the meaning that the other implementations reproduce bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ..step import storage
from ..step.job import StepJob


def run(job: StepJob) -> None:
    """Update the tensors of a job in place."""
    job.settle()
    for i in range(len(job.params)):
        _step(job, i)
    job.keep_amaxes()


def _step(job: StepJob, i: int) -> None:
    s, strategy = job.scalars[i], job.strategy
    param, extra = job.params[i], job.role(job.extras, i)
    buffer, low = job.role(job.slow, i), job.role(job.slow_lows, i)
    # Kahan summation carries the remainder in the update, not in the parameter.
    kahan = strategy.weight == "kahan"
    theta = param.float() if kahan else storage.decode_parameter(strategy, param, extra)
    delta, moments = update(job, i, theta, storage.decode_moments(job, i))

    bits = storage.draw_bits(
        strategy,
        param,
        seed=job.seed,
        stream=int(s["stream"]),
        step=int(s["step"]),
        region=job.region(i),
    )
    if buffer is not None:
        slow = storage.slow_bits(strategy, param, bits, int(s["slow_dither"]))
        storage.encode_state(moments[0], buffer, low, float(s["slow_encode"]), slow)
    dither = storage.dither_bits(strategy, int(s["extra_dither"]), param)
    storage.apply_update(strategy, theta, delta, param, extra, bits, dither)


def update(
    job: StepJob, i: int, theta: Tensor, moments: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The wide arithmetic of tensor ``i``.

    Separate multiplications and additions: ``add(..., alpha=)`` may contract into a fused one.

    Args:
        job: A step.
        i: Position of the tensor.
        theta: Its wide value.
        moments: The wide value of its momentum buffer, if it has one.

    Returns:
        What is subtracted from ``theta``, and the new buffer.
    """
    g = _gradient(job, i, theta)
    if moments:
        (b,) = moments = _moved(job, i, moments, g)
        g = g + b * job.beta1 if job.nesterov else b
    return g * float(job.scalars[i]["step_size"]), moments


def moved(job: StepJob, i: int, moments: list[Tensor], theta: Tensor | None = None) -> list[Tensor]:
    """The new moments of tensor ``i``, with its gradient in them.

    Args:
        job: A step.
        i: Position of the tensor.
        moments: The wide value of its momentum buffer, if it has one.
        theta: Its wide value, whose decay is part of the gradient (default: ``None``, no decay).
    """
    return _moved(job, i, moments, _gradient(job, i, theta)) if moments else []


def _gradient(job: StepJob, i: int, theta: Tensor | None) -> Tensor:
    g = job.grads[i].to(torch.float32)
    if job.maximize:
        g = -g
    if theta is not None and job.weight_decay != 0.0:
        g = g + theta * job.weight_decay
    return g


def _moved(job: StepJob, i: int, moments: list[Tensor], g: Tensor) -> list[Tensor]:
    first = job.scalars[i]["first"]
    return [g if first else moments[0] * job.beta1 + g * job.one_minus_beta1]

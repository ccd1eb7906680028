"""Adam step in plain PyTorch: the meaning that the other implementations reproduce bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics import ieee
from ..step import storage
from ..step.job import StepJob


def run(job: StepJob) -> None:
    """Update the tensors of a job in place."""
    job.settle()
    for i in range(len(job.params)):
        _step(job, i)
    job.keep_amaxes()


def _step(job: StepJob, i: int) -> None:
    strategy, param, extra = job.strategy, job.params[i], job.role(job.extras, i)
    # Kahan summation carries the remainder in the update, not in the parameter.
    kahan = strategy.weight == "kahan"
    theta = param.float() if kahan else storage.decode_parameter(strategy, param, extra)
    delta, moments = update(job, i, theta, storage.decode_moments(job, i))
    bits = _bits(job, i, param)
    _encode_moments(job, i, moments, bits)
    dither = storage.dither_bits(strategy, int(job.scalars[i]["extra_dither"]), param)
    storage.apply_update(strategy, theta, delta, param, extra, bits, dither)


def fold(job: StepJob) -> None:
    """Take the gradients of a job into its moments and leave the parameters, in place.

    The random bits are those that the step of the job draws.
    """
    for i, param in enumerate(job.params):
        moments = moved(job, i, storage.decode_moments(job, i))
        _encode_moments(job, i, moments, _bits(job, i, param))
    job.keep_amaxes()


def moved(job: StepJob, i: int, moments: list[Tensor], theta: Tensor | None = None) -> list[Tensor]:
    """The new moments of tensor ``i``, with its gradient in them.

    Args:
        job: A step.
        i: Position of the tensor.
        moments: The wide values of its two moments.
        theta: Its wide value, whose decay is part of the gradient unless it is decoupled
            (default: ``None``, no decay).
    """
    g = job.grads[i].to(torch.float32)
    if job.maximize:
        g = -g
    if theta is not None and not job.decoupled and job.weight_decay != 0.0:
        g = g + theta * job.weight_decay
    m, v = moments
    m = m * job.beta1 + g * job.one_minus_beta1
    v = v * job.beta2 + (g * job.one_minus_beta2) * g
    return [m, v]


def update(
    job: StepJob, i: int, theta: Tensor, moments: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The wide arithmetic of tensor ``i``.

    Separate multiplications and additions: ``add(..., alpha=)`` may contract into a fused one.

    Args:
        job: A step.
        i: Position of the tensor.
        theta: Its wide value.
        moments: The wide values of its two moments.

    Returns:
        What is subtracted from ``theta``, and the new moments.
    """
    job.settle()
    s = job.scalars[i]
    m, v = moments = moved(job, i, moments, theta)
    floor = float(s["slow_floor"])
    known = torch.where(v < floor, floor, v) if floor != 0.0 else v
    denominator = ieee.sqrt(known) * float(s["inv_sqrt_bias2"]) + job.eps
    delta = (m * float(s["step_size"])) / denominator
    if job.decoupled and s["decay"] != 0.0:
        delta = delta + theta * float(s["decay"])
    return delta, moments


def _encode_moments(job: StepJob, i: int, moments: list[Tensor], bits: Tensor | None) -> None:
    (m, v), s, low = moments, job.scalars[i], job.role(job.slow_lows, i)
    fast = storage.dither_bits(job.strategy, int(s["fast_dither"]), m)
    storage.encode_state(m, job.fast[i], None, float(s["fast_encode"]), fast)
    slow = storage.slow_bits(job.strategy, job.params[i], bits, int(s["slow_dither"]))
    storage.encode_state(v, job.slow[i], low, float(s["slow_encode"]), slow)


def _bits(job: StepJob, i: int, param: Tensor) -> Tensor | None:
    s = job.scalars[i]
    return storage.draw_bits(
        job.strategy,
        param,
        seed=job.seed,
        stream=int(s["stream"]),
        step=int(s["step"]),
        region=job.region(i),
    )

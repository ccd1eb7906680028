"""Adam step in plain PyTorch: the meaning that the other implementations reproduce bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics import ieee
from .. import storage
from ..job import StepJob


def run(job: StepJob) -> None:
    """Update the tensors of a job in place."""
    for i in range(len(job.params)):
        _step(job, i)


def _step(job: StepJob, i: int) -> None:
    s, strategy = job.scalars[i], job.strategy
    param, extra = job.params[i], job.role(job.extras, i)
    low = job.role(job.slow_lows, i)
    # Kahan summation carries the remainder in the update, not in the parameter.
    kahan = strategy.weight == "kahan"
    theta = param.float() if kahan else storage.decode_parameter(strategy, param, extra)
    delta, m, v = update(job, i, theta)

    bits = storage.draw_bits(
        strategy,
        param,
        seed=job.seed,
        stream=int(s["stream"]),
        step=int(s["step"]),
        offset=int(s["offset"]),
    )
    storage.encode_state(m, job.fast[i], None, float(s["fast_encode"]), None)
    for_state = storage.state_bits(strategy, param, bits)
    storage.encode_state(v, job.slow[i], low, float(s["slow_encode"]), for_state)
    storage.apply_update(strategy, theta, delta, param, extra, bits)


def intended_update(job: StepJob, i: int, theta: Tensor) -> Tensor:
    """What the step would subtract from tensor ``i`` of wide value ``theta``; changes nothing."""
    return update(job, i, theta)[0]


def update(job: StepJob, i: int, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The wide arithmetic of tensor ``i``: what is subtracted from ``theta``, and the new moments.

    Separate multiplications and additions: ``add(..., alpha=)`` may contract into a fused one.
    """
    s = job.scalars[i]
    m = storage.decode_state(job.fast[i], None, float(s["fast_decode"]))
    v = storage.decode_state(job.slow[i], job.role(job.slow_lows, i), float(s["slow_decode"]))
    g = job.grads[i].to(torch.float32)
    if job.maximize:
        g = -g
    if not job.decoupled and job.weight_decay != 0.0:
        g = g + theta * job.weight_decay
    m = m * job.beta1 + g * job.one_minus_beta1
    v = v * job.beta2 + (g * job.one_minus_beta2) * g
    floor = float(s["slow_floor"])
    known = torch.where(v < floor, floor, v) if floor != 0.0 else v
    denominator = ieee.sqrt(known) * float(s["inv_sqrt_bias2"]) + job.eps
    delta = (m * float(s["step_size"])) / denominator
    if job.decoupled and s["decay"] != 0.0:
        delta = delta + theta * float(s["decay"])
    return delta, m, v

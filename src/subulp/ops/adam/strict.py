"""Adam step in strict narrow arithmetic: Collage, Algorithm 2, every operation rounded.

Scalars are computed in FP64 and rounded to the format once, as the paper advises (section 4.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...numerics import expansion, format_of
from ..step.job import StepJob
from ..step.strict import add_to_parameter, constant


def run(job: StepJob) -> None:
    """Update the tensors of a job in place."""
    for i in range(len(job.params)):
        _step(job, i)


def _step(job: StepJob, i: int) -> None:
    param, extra = job.params[i], job.role(job.extras, i)
    fmt = format_of(param.dtype)
    x, t = job.exact, int(job.scalars[i]["step"])
    theta = param.float()

    def c(value: float) -> Tensor:
        return constant(value, theta, fmt)

    g = job.grads[i].float()
    if job.maximize:
        g = -g
    decay = x["weight_decay"]
    if decay and not job.decoupled:
        g = expansion.add(g, expansion.mult(c(decay), theta, fmt), fmt)

    kept = expansion.mult(c(x["beta1"]), job.fast[i].float(), fmt)
    m = expansion.add(kept, expansion.mult(c(1 - x["beta1"]), g, fmt), fmt)
    v = job.slow[i].float()
    square = expansion.mult(c(1 - x["beta2"]), expansion.mult(g, g, fmt), fmt)
    low = job.role(job.slow_lows, i)
    if low is None:
        v = expansion.add(expansion.mult(c(x["beta2"]), v, fmt), square, fmt)
    else:
        exact = torch.full_like(theta, x["beta2"], dtype=torch.float64)
        beta2, beta2_low = expansion.encode(exact, fmt)
        v, v_low = expansion.mul(beta2, beta2_low, v, low.float(), fmt)
        v, v_low = expansion.grow(v, v_low, square, fmt, ordered=False)
        low.copy_(v_low)

    m_hat = expansion.div(m, c(1 - x["beta1"] ** t), fmt)
    # Divided by the root of the bias, so that a small v does not underflow first.
    root = expansion.div(expansion.sqrt(v, fmt), c(math.sqrt(1 - x["beta2"] ** t)), fmt)
    update = expansion.div(m_hat, expansion.add(root, c(x["eps"]), fmt), fmt)
    if decay and job.decoupled:
        update = expansion.add(update, expansion.mult(c(decay), theta, fmt), fmt)
    job.fast[i].copy_(m)
    job.slow[i].copy_(v)
    add_to_parameter(job.strategy, param, extra, expansion.mult(c(-x["lr"]), update, fmt), fmt)

"""Adam step in strict narrow arithmetic: Collage, Algorithm 2, every operation rounded.

Scalars are computed in FP64 and rounded to the format once, as the paper advises (section 4.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...numerics import expansion as mcf
from ...numerics import format_of
from ..job import StepJob
from ..strict import add_to_parameter, constant


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
        g = mcf.add(g, mcf.mult(c(decay), theta, fmt), fmt)

    m = mcf.add(
        mcf.mult(c(x["beta1"]), job.fast[i].float(), fmt), mcf.mult(c(1 - x["beta1"]), g, fmt), fmt
    )
    v = job.slow[i].float()
    square = mcf.mult(c(1 - x["beta2"]), mcf.mult(g, g, fmt), fmt)
    low = job.role(job.slow_lows, i)
    if low is None:
        v = mcf.add(mcf.mult(c(x["beta2"]), v, fmt), square, fmt)
    else:
        beta2, beta2_low = mcf.encode(torch.full_like(theta, x["beta2"], dtype=torch.float64), fmt)
        v, v_low = mcf.mul(beta2, beta2_low, v, low.float(), fmt)
        v, v_low = mcf.grow(v, v_low, square, fmt, ordered=False)
        low.copy_(v_low)

    m_hat = mcf.div(m, c(1 - x["beta1"] ** t), fmt)
    # Divided by the root of the bias, so that a small v does not underflow first.
    root = mcf.div(mcf.sqrt(v, fmt), c(math.sqrt(1 - x["beta2"] ** t)), fmt)
    update = mcf.div(m_hat, mcf.add(root, c(x["eps"]), fmt), fmt)
    if decay and job.decoupled:
        update = mcf.add(update, mcf.mult(c(decay), theta, fmt), fmt)
    job.fast[i].copy_(m)
    job.slow[i].copy_(v)
    add_to_parameter(job.strategy, param, extra, mcf.mult(c(-x["lr"]), update, fmt), fmt)

"""SGD step in strict narrow arithmetic, after Collage, Algorithm 2: every operation rounded."""

from __future__ import annotations

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
    x, first = job.exact, job.scalars[i]["first"]
    theta = param.float()

    def c(value: float) -> Tensor:
        return constant(value, theta, fmt)

    g = job.grads[i].float()
    if job.maximize:
        g = -g
    if x["weight_decay"]:
        g = expansion.add(g, expansion.mult(c(x["weight_decay"]), theta, fmt), fmt)
    buffer, low = job.role(job.slow, i), job.role(job.slow_lows, i)
    if buffer is not None:
        entering = expansion.mult(c(1 - x["dampening"]), g, fmt)
        if first:
            b = g
        elif low is None:
            b = expansion.add(expansion.mult(c(x["momentum"]), buffer.float(), fmt), entering, fmt)
        else:
            b, b_low = expansion.scaling(buffer.float(), low.float(), c(x["momentum"]), fmt)
            b, b_low = expansion.grow(b, b_low, entering, fmt, ordered=False)
            low.copy_(b_low)
        buffer.copy_(b)
        g = expansion.add(g, expansion.mult(c(x["momentum"]), b, fmt), fmt) if job.nesterov else b
    add_to_parameter(job.strategy, param, extra, expansion.mult(c(-x["lr"]), g, fmt), fmt)

"""Steps of Adam and SGD by the C++ kernels."""

from __future__ import annotations

import ctypes
from array import array

import torch
from torch import Tensor

from .. import facts, native
from ..strategy import CODES
from .job import StepJob

_FAMILIES = {code: family for family, code in CODES.items()}


def addresses(job: StepJob) -> array[int]:
    """Sizes of a job's tensors, then the addresses of each role.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A tensor has no memory, or not as much as it says.
    """
    # One table, row by row: an array for each takes longer to make than a small step takes.
    table = array("Q", map(Tensor.numel, job.params))
    # Kernels see memory in storage order: any dense layout will do, as all roles share it.
    for name in job.roles():
        table.extend(job.addresses(name) or [0] * len(job.params))
    return table


def run(entry: str, job: StepJob) -> None:
    """Call the kernel ``entry`` on a job's tensors, in place.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A tensor has no memory, or not as much as it says.
        RuntimeError: The library is missing or has no such kernel.
    """
    job.settle()
    count, roles, table = len(job.params), job.roles().values(), addresses(job)
    first = table.buffer_info()[0]
    rows = [first + table.itemsize * count * (i + 1) for i in range(len(roles))]
    step = arguments(job)
    step.numel = first
    step.param, step.grad, step.fast, step.slow, step.extra, step.slow_low = (
        row if role else None for role, row in zip(roles, rows, strict=True)
    )
    call(entry, step)
    job.keep_amaxes()


def call(entry: str, step: native.Step) -> None:
    """Call the kernel ``entry``.

    Raises:
        RuntimeError: The library is missing or has no such kernel.
    """
    if getattr(native.library(), entry)(ctypes.byref(step)) != 0:
        dtypes = {code: dtype for dtype, code in facts.DTYPES.items()}
        raise RuntimeError(
            f"{entry} has no kernel for the strategy {_FAMILIES[step.strategy]!r} with "
            f"{dtypes[step.param_dtype]} parameters and {dtypes[step.grad_dtype]} gradients"
        )


def arguments(job: StepJob) -> native.Step:
    """What a kernel gets, but for the tensors' sizes and addresses. It lives as long as ``job``."""
    return native.Step(
        count=len(job.params),
        scalars=native.address(job.scalars),
        strategy=CODES[job.strategy.family],
        param_dtype=facts.DTYPES[job.params[0].dtype],
        grad_dtype=facts.DTYPES[job.grads[0].dtype],
        extra_bits=job.strategy.k,
        seed=job.seed,
        threads=torch.get_num_threads(),
        isa=native.isa(),
        maximize=job.maximize,
        decoupled=job.decoupled,
        nesterov=job.nesterov,
        beta1=job.beta1,
        one_minus_beta1=job.one_minus_beta1,
        beta2=job.beta2,
        one_minus_beta2=job.one_minus_beta2,
        eps=job.eps,
        weight_decay=job.weight_decay,
    )

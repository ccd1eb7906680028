"""Steps of Adam and SGD by the C++ kernels."""

from __future__ import annotations

import ctypes
from array import array

import torch
from torch import Tensor

from .. import facts, native, pointers
from ..strategy import CODES
from .job import StepJob


def addresses(job: StepJob) -> array[int]:
    """Sizes of a job's tensors, then the addresses of each role.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A tensor has no memory, or not as much as it says.
    """
    # One table, row by row: an array for each takes longer to make than a small step takes.
    table = array("Q", map(Tensor.numel, job.params))
    # Kernels see memory in storage order: any dense layout will do, as all roles share it.
    for name, role in job.roles().items():
        table.extend(pointers.dense_ptrs(name, role) or [0] * len(job.params))
    return table


def run(entry: str, job: StepJob) -> None:
    """Call the kernel ``entry`` on a job's tensors, in place.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A tensor has no memory, or not as much as it says.
        RuntimeError: The library is missing or has no such kernel.
    """
    lib = native.library()
    count, roles, table = len(job.params), job.roles().values(), addresses(job)
    first = table.buffer_info()[0]
    rows = [first + table.itemsize * count * (i + 1) for i in range(len(roles))]
    step = native.Step(
        count,
        first,
        *(row if role else None for role, row in zip(roles, rows, strict=True)),
        native.address(job.scalars),
        CODES[job.strategy.family],
        facts.DTYPES[job.params[0].dtype],
        facts.DTYPES[job.grads[0].dtype],
        job.strategy.k,
        job.seed,
        torch.get_num_threads(),
        native.isa(),
        job.maximize,
        job.decoupled,
        job.nesterov,
        job.beta1,
        job.one_minus_beta1,
        job.beta2,
        job.one_minus_beta2,
        job.eps,
        job.weight_decay,
    )
    if getattr(lib, entry)(ctypes.byref(step)) != 0:
        raise RuntimeError(
            f"{entry} has no kernel for precision={job.strategy.name!r} with {job.params[0].dtype} "
            f"parameters and {job.grads[0].dtype} gradients"
        )

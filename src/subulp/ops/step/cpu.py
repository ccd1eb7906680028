"""Steps of Adam and SGD by the C++ kernels."""

from __future__ import annotations

import ctypes
from array import array

import torch
from torch import Tensor

from .. import facts, native, pointers
from ..strategy import CODES
from .job import StepJob


def run(entry: str, job: StepJob) -> None:
    """Call the kernel ``entry`` on a job's tensors, in place.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A tensor has no memory.
        RuntimeError: The library is missing or has no such kernel.
    """
    lib = native.library()
    # Kernels see memory in storage order: any dense layout will do, as all roles share it.
    count = len(job.params)
    roles = (job.params, job.grads, job.fast, job.slow, job.extras, job.slow_lows)
    names = ("params", "grads", "the fast states", "the slow states", "extras", "the slow lows")
    # One table, row by row: an array for each takes longer to make than a small step takes.
    table = array("Q", map(Tensor.numel, job.params))
    for name, role in zip(names, roles, strict=True):
        table.extend(pointers.data_ptrs(name, role) or [0] * count)
    first = table.buffer_info()[0]
    addresses = [first + table.itemsize * count * (i + 1) for i in range(len(roles))]
    step = native.Step(
        count,
        first,
        *(address if role else None for role, address in zip(roles, addresses, strict=True)),
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

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Finiteness in Triton: one read, the tensors of a dtype in one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import format_of
from ..step import triton_storage as storage
from ..triton import codec, launch
from . import FiniteJob

BLOCK = 4096
"""Elements per block: 32 for each thread of four warps."""

STRIP = 512
"""Elements of what is read through masks: four for each thread."""


def run(job: FiniteJob) -> Tensor:
    """Bool tensor (): every value of every tensor is finite.

    Raises:
        RuntimeError: The kernels do not run on the device of the tensors.
    """
    launch.check_device(all_finite_kernel, job.device)
    # A kept contiguous copy lives as long as the call needs its address.
    dense = [t.contiguous() for t in job.tensors]
    dtypes = list(dict.fromkeys(t.dtype for t in dense))
    tables = []
    for dtype in dtypes:
        same = [t for t in dense if t.dtype == dtype]
        numel = np.array([t.numel() for t in same], dtype=np.int64)
        address = launch.addresses(same, len(same))
        whole = np.where(address % launch.ALIGNMENT == 0, numel // BLOCK, 0)
        table = np.stack((numel, whole, address), axis=1)
        tables.append(launch.kept(job.device, table, _tables))
    result = torch.ones((), dtype=torch.bool, device=job.device)
    for dtype, (programs, tensors) in zip(dtypes, tables, strict=True):
        args = (programs, tensors, result.view(torch.uint8))
        launch.launch(all_finite_kernel, job.device, *args, **_options(dtype))
    return result


def _tables(table: np.ndarray) -> tuple[np.ndarray, ...]:
    return launch.plan(table[:, 0], BLOCK), table


def compile_for(target: launch.Target, dtype: torch.dtype) -> Any:
    """Compile the kernel of a dtype ahead of time, see :func:`.launch.compile_for`."""
    types = {"programs": "*i64", "tensors": "*i64", "result": "*u8"}
    return launch.compile_for(all_finite_kernel, target, types, **_options(dtype))


def _options(dtype: torch.dtype) -> dict[str, Any]:
    return {"FORMAT": format_of(dtype).name, "BLOCK": BLOCK, "STRIP": STRIP, "num_warps": 4}


@triton.jit
def all_finite_kernel(
    programs, tensors, result, FORMAT: tl.constexpr, BLOCK: tl.constexpr, STRIP: tl.constexpr
):
    tensor, first, end = launch.work(programs)
    numel, address = tl.load(tensors + tensor * 3), tl.load(tensors + tensor * 3 + 2)
    whole = tl.load(tensors + tensor * 3 + 1)
    largest = storage.largest_code(address, numel, first, whole, end, FORMAT, BLOCK, STRIP)
    if largest > codec.max_code(FORMAT):
        # Programs only ever write the same value.
        tl.store(result, 0)

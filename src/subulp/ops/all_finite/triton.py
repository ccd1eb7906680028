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
        aligned = address % launch.ALIGNMENT == 0
        tables += [
            *launch.plan(numel, aligned, BLOCK),
            np.stack((numel, address), axis=1),
        ]
    result = torch.ones((), dtype=torch.bool, device=job.device)
    uploaded = iter(launch.upload(job.device, *tables))
    for dtype, whole, ragged, tensors in zip(dtypes, uploaded, uploaded, uploaded, strict=True):
        args = (tensors, result.view(torch.uint8))
        for programs, is_whole in ((whole, True), (ragged, False)):
            options = _options(dtype, whole=is_whole)
            launch.launch(all_finite_kernel, job.device, programs, *args, **options)
    return result


def compile_for(capability: int, dtype: torch.dtype, *, whole: bool) -> Any:
    """Compile the kernel of a dtype ahead of time, see :func:`.launch.compile_for`."""
    types = {"programs": "*i64", "tensors": "*i64", "result": "*u8"}
    options = _options(dtype, whole=whole)
    return launch.compile_for(all_finite_kernel, capability, types, **options)


def _options(dtype: torch.dtype, *, whole: bool) -> dict[str, Any]:
    return {"FORMAT": format_of(dtype).name, "WHOLE": whole, "BLOCK": BLOCK, "num_warps": 4}


@triton.jit
def all_finite_kernel(
    programs, tensors, result, FORMAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    tensor, first, end = launch.work(programs)
    numel, address = tl.load(tensors + tensor * 2), tl.load(tensors + tensor * 2 + 1)
    largest = tl.zeros((BLOCK,), tl.uint32)
    for index in range(first, end):
        at = index * BLOCK + tl.arange(0, BLOCK)
        inside = None if WHOLE else at < numel
        code = storage.load_code(address, at, inside, FORMAT)
        magnitude = code & ((1 << (codec.width(FORMAT) - 1)) - 1)
        if not WHOLE:
            magnitude = tl.where(inside, magnitude, 0)
        largest = tl.maximum(largest, magnitude)
    if tl.max(largest, axis=0) > codec.max_code(FORMAT):
        # Programs only ever write the same value.
        tl.store(result, 0)

"""Mixtures in C++ (csrc/mixture.h)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...numerics.mixture import TENSOR, THREE_WAY, TWO_WAY
from ...numerics.partition import grid_of
from .. import facts, native
from .job import DecodeJob, EncodeJob, Job


def run(job: Job) -> tuple[Tensor, ...] | Tensor:
    """Run ``job``: return the stored tensors and the numbers of a summary, or the decoded matrix.

    Raises:
        RuntimeError: The library is missing.
    """
    return _decode(job) if isinstance(job, DecodeJob) else _encode(job)


def _encode(job: EncodeJob) -> tuple[Tensor, ...]:
    x = job.x
    down, across = grid_of(x.shape, job.block)
    whole = job.recipe.granularity == "tensor"
    groups = (1, 1) if job.scaling == "e8m0" else grid_of((down, across), job.groups)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    types = torch.empty((1, 1) if whole else (down, across), dtype=torch.uint8)
    mantissa = torch.empty((1, *groups), dtype=torch.float32)
    exponents = torch.empty((down, across), dtype=torch.int8)
    numbers = torch.empty(2 * len(job.recipe.formats) + 8, dtype=torch.float64)
    call = native.Mixture(
        x.data_ptr(),
        *(*x.shape, *job.block, *job.groups),
        *(t.data_ptr() for t in (codes, types, mantissa, exponents, numbers)),
        facts.DTYPES[x.dtype],
        facts.RECIPE_CODES[job.recipe.name],
        facts.SCALINGS[job.scaling],
        job.threshold,
        torch.get_num_threads(),
        native.isa(),
    )
    library = native.library()
    count = library.subulp_mixture_encode(ctypes.byref(call))
    assert count >= 0
    wide = torch.empty(count, dtype=torch.uint8)
    if count:
        library.subulp_mixture_wide(ctypes.byref(call), wide.data_ptr())
    return codes, types, mantissa, exponents, wide, numbers


def _decode(job: DecodeJob) -> Tensor:
    m = job.mixture
    out = torch.empty(m.shape, dtype=torch.float32)
    # A kept contiguous copy lives as long as the call needs its address.
    codes, types, mantissa, exponents, wide = (t.contiguous() for t in m.tensors)
    # What matters: how many formats there are, and whether there is one type for all blocks.
    by_block = THREE_WAY if len(m.formats) == 2 else TWO_WAY
    recipe = TENSOR if types.numel() < exponents.numel() else by_block
    call = native.Mixture(
        None,
        *(*m.shape, *m.block, *m.blocks_of_group),
        *(t.data_ptr() for t in (codes, types, mantissa, exponents)),
        None,
        0,
        facts.RECIPE_CODES[recipe.name],
        # Mantissas lie by groups whatever they came from.
        facts.SCALINGS["gam"],
        0.0,
        torch.get_num_threads(),
        native.isa(),
    )
    native.library().subulp_mixture_decode(
        ctypes.byref(call), wide.data_ptr() if wide.numel() else None, out.data_ptr()
    )
    return out

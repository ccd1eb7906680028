"""Mixtures in C++ (csrc/mixture.h)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...numerics.mixture import TENSOR, THREE_WAY, TWO_WAY, Mixture
from ...numerics.partition import grid_of, sizes_of_blocks
from .. import facts, native
from ..pointers import data_ptr
from .job import DecodeJob, EncodeJob, Job


def run(job: Job) -> tuple[Tensor, ...] | Tensor:
    """Run ``job``: return the stored tensors and the numbers of a summary, or the decoded matrix.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A tensor has another shape, dtype or device than it must have.
        RuntimeError: The library is missing.
    """
    return _decode(job) if isinstance(job, DecodeJob) else _encode(job)


def _encode(job: EncodeJob) -> tuple[Tensor, ...]:
    x = job.x
    down, across = grid_of(x.shape, job.block)
    whole = job.recipe.granularity == "tensor"
    groups = (1, 1) if job.scaling == "e8m0" else grid_of((down, across), job.groups)
    cpu = job.device
    codes = torch.empty(x.shape, dtype=torch.uint8, device=cpu)
    types = torch.empty((1, 1) if whole else (down, across), dtype=torch.uint8, device=cpu)
    mantissa = torch.empty((1, *groups), dtype=torch.float32, device=cpu)
    exponents = torch.empty((down, across), dtype=torch.int8, device=cpu)
    numbers = torch.empty(2 * len(job.recipe.formats) + 8, dtype=torch.float64, device=cpu)
    call = native.Mixture(
        data_ptr("x", x, x.dtype),
        *(*x.shape, *job.block, *job.groups),
        *(data_ptr("a result", t, t.dtype) for t in (codes, types, mantissa, exponents, numbers)),
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
    wide = torch.empty(count, dtype=torch.uint8, device=cpu)
    if count:
        address = data_ptr("wide", wide, torch.uint8)
        library.subulp_mixture_wide(ctypes.byref(call), address)
    return codes, types, mantissa, exponents, wide, numbers


def _decode(job: DecodeJob) -> Tensor:
    m = job.mixture
    out = torch.empty(m.shape, dtype=torch.float32, device=job.device)
    # A kept contiguous copy lives as long as the call needs its address.
    codes, types, mantissa, exponents, wide = (t.contiguous() for t in m.tensors)
    grid = grid_of(m.shape, m.block)
    groups = grid_of(grid, m.blocks_of_group)
    addresses = (
        data_ptr("codes", codes, torch.uint8),
        data_ptr("types", types, torch.uint8, (1, 1) if types.numel() == 1 else grid),
        data_ptr("mantissa", mantissa, torch.float32, (1, *groups)),
        data_ptr("exponents", exponents, torch.int8, grid),
    )
    lower = data_ptr("wide", wide, torch.uint8, (_wide_numbers(m, types),))
    # What matters: how many formats there are, and whether there is one type for all blocks.
    by_block = THREE_WAY if len(m.formats) == 2 else TWO_WAY
    recipe = TENSOR if types.numel() < exponents.numel() else by_block
    call = native.Mixture(
        None,
        *(*m.shape, *m.block, *m.blocks_of_group),
        *addresses,
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
        ctypes.byref(call), lower or None, data_ptr("out", out, torch.float32)
    )
    return out


def _wide_numbers(m: Mixture, types: Tensor) -> int:
    """How many BF16 numbers the blocks hold.

    Raises:
        ValueError: A block is of no known type.
    """
    if types.numel() and int(types.max()) > len(m.formats):
        raise ValueError(
            f"types have a {int(types.max())}: expected numbers from 0 to {len(m.formats)}"
        )
    in_bf16 = types == len(m.formats)
    if types.numel() == 1:
        return m.codes.numel() if bool(in_bf16.all()) else 0
    return int(sizes_of_blocks(m.shape, m.block)[in_bf16].sum())

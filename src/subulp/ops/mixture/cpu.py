"""Mixtures in C++: the papers' recipes in one call (csrc/mixture.h), others in passes
(csrc/mixture_any.h).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...numerics import E4M3, E5M2, Format
from ...numerics.mixture import TENSOR, THREE_WAY, TWO_WAY, Mixture, Recipe, values_of
from ...numerics.partition import grid_of, sizes_of_blocks
from .. import facts, native
from ..pointers import data_ptr
from ..rows import encode as encode_values
from . import passes
from .job import DecodeJob, EncodeJob, Job

# Named in all that kernels write: torch's default may be another one.
CPU = torch.device("cpu")


def run(job: Job) -> tuple[Tensor, ...] | Tensor:
    """Run ``job``: return the stored tensors and the numbers of a summary, or the decoded matrix.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A tensor has another shape, dtype or device than it must have.
        RuntimeError: The library is missing.
        ValueError: The tensors are on another device.
    """
    if job.device.type != "cpu":
        raise ValueError(f"x is on {job.device}: the C++ kernels read memory of the CPU; move x")
    if isinstance(job, DecodeJob):
        job = replace(job, mixture=job.mixture.trimmed())
        return _decode(job) if _has_pass(job.mixture.formats) else _decode_any(job)
    known = job.fused
    return passes.encode(job, _Passes(job)) if known is None else _encode(job, known)


def _has_pass(formats: tuple[Format, ...]) -> bool:
    return formats in ((E4M3,), (E4M3, E5M2))


def _encode(job: EncodeJob, recipe: Recipe) -> tuple[Tensor, ...]:
    x = job.x
    down, across = grid_of(x.shape, job.block)
    whole = recipe.granularity == "tensor"
    groups = (1, 1) if job.scaling == "e8m0" else grid_of((down, across), job.groups)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=CPU)
    types = torch.empty((1, 1) if whole else (down, across), dtype=torch.uint8, device=CPU)
    mantissa = torch.empty((1, *groups), dtype=torch.float32, device=CPU)
    exponents = torch.empty((down, across), dtype=torch.int8, device=CPU)
    numbers = torch.empty(1, 2 * len(recipe.formats) + 8, dtype=torch.float64, device=CPU)
    call = native.Mixture(
        data_ptr("x", x, x.dtype),
        *(*x.shape, *job.block, *job.groups),
        *(data_ptr("a result", t, t.dtype) for t in (codes, types, mantissa, exponents, numbers)),
        facts.DTYPES[x.dtype],
        facts.RECIPE_CODES[recipe.name],
        facts.SCALINGS[job.scaling],
        job.threshold,
        torch.get_num_threads(),
        native.isa(),
    )
    library = native.library()
    count = library.subulp_mixture_encode(ctypes.byref(call))
    assert count >= 0
    wide = torch.empty(count, dtype=torch.uint8, device=CPU)
    if count:
        address = data_ptr("wide", wide, torch.uint8)
        library.subulp_mixture_wide(ctypes.byref(call), address)
    return codes, types, mantissa, exponents, wide, numbers


def _decode(job: DecodeJob) -> Tensor:
    m = job.mixture
    out = job.result()
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
        facts.FORMATS[m.wide_format.name],
        facts.RECIPE_CODES[recipe.name],
        # Mantissas lie by groups whatever they came from.
        facts.SCALINGS["gam"],
        0.0,
        torch.get_num_threads(),
        native.isa(),
    )
    call.to_dtype = facts.DTYPES[out.dtype]
    failed = native.library().subulp_mixture_decode(
        ctypes.byref(call), lower or None, data_ptr("out", out, out.dtype, m.shape)
    )
    if failed:
        raise ValueError(f"room has dtype {out.dtype}: expected FP32 or BF16")
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


class _Passes:
    """The passes over one matrix."""

    def __init__(self, job: EncodeJob) -> None:
        self._x, self._block, self._metric = job.x, job.block, job.metric
        self._grid = grid_of(job.x.shape, job.block)

    def measure(self) -> tuple[Tensor, Tensor, Tensor]:
        amax, smallest = (
            torch.empty(self._grid, dtype=torch.float32, device=CPU) for _ in range(2)
        )
        counts = torch.empty(self._grid, dtype=torch.int64, device=CPU)
        self._call("measure", (), amax=amax, smallest=smallest, counts=counts)
        return amax, smallest, counts

    def errors(self, factors: Mapping[Format, Tensor]) -> Mapping[Format, Tensor]:
        formats = tuple(factors)
        scales = torch.stack([factors[fmt] for fmt in formats])
        sums = torch.empty(scales.shape, dtype=torch.float32, device=CPU)
        self._call("errors", formats, factors=scales, sums=sums)
        return dict(zip(formats, sums, strict=True))

    def write(self, choice: passes.Choice) -> tuple[Tensor, Tensor]:
        codes = torch.empty(self._x.shape, dtype=torch.uint8, device=CPU)
        wide = torch.empty(choice.count, dtype=torch.uint8, device=CPU)
        self._call(
            "encode",
            choice.formats,
            factors=torch.stack(choice.factors),
            types=choice.types,
            offsets=choice.offsets,
            codes=codes,
            wide=wide,
        )
        return codes, wide

    def _call(self, name: str, formats: tuple[Format, ...], **tensors: Tensor) -> None:
        x = self._x
        call, kept = _blocks(x.shape, self._block, formats, x.dtype, **tensors)
        call.x, call.metric = data_ptr("x", x, x.dtype), facts.METRICS[self._metric]
        result = getattr(native.library(), f"subulp_blocks_{name}")(ctypes.byref(call))
        assert result == 0
        del kept


def _decode_any(job: DecodeJob) -> Tensor:
    m = job.mixture
    result = job.result()
    # These passes write FP32.
    out = torch.empty(m.shape, dtype=torch.float32, device=CPU) if _is_narrow(result) else result
    types = m.block_types().contiguous()
    offsets, count = passes.wide_offsets(types, len(m.formats), m.shape, m.block)
    assert count == m.wide.numel()
    values = torch.stack([_values(fmt) for fmt in m.formats])
    call, kept = _blocks(
        m.shape,
        m.block,
        m.formats,
        m.wide_format.dtype,
        factors=passes.inverse_scales(m),
        codes=m.codes.contiguous(),
        types=types,
        offsets=offsets,
        wide=m.wide.contiguous(),
    )
    native.library().subulp_blocks_decode(
        ctypes.byref(call),
        data_ptr("values", values, torch.float32),
        data_ptr("out", out, torch.float32),
    )
    del kept
    return encode_values(out, result) if _is_narrow(result) else result


def _is_narrow(result: Tensor) -> bool:
    return result.dtype == torch.bfloat16


@functools.cache
def _values(fmt: Format) -> Tensor:
    """FP32 values of all bytes."""
    return values_of(torch.arange(256, dtype=torch.uint8, device=CPU), fmt)


def _blocks(
    shape: torch.Size,
    block: tuple[int, int],
    formats: tuple[Format, ...],
    dtype: torch.dtype | None,
    **tensors: Tensor,
) -> tuple[native.Blocks, Any]:
    """The arguments of a pass, and what must live as long as it needs their addresses."""
    assert dtype is not None
    places = [
        (f.min_exponent + 127, f.mantissa_bits, f.exponent_bits + f.mantissa_bits) for f in formats
    ]
    narrow = np.array(places, dtype=native.NARROW)
    call = native.Blocks(
        rows=shape[0],
        columns=shape[1],
        block_rows=block[0],
        block_columns=block[1],
        formats=native.address(narrow),
        count=len(formats),
        dtype=facts.DTYPES[dtype],
        threads=torch.get_num_threads(),
        isa=native.isa(),
    )
    for name, tensor in tensors.items():
        setattr(call, name, data_ptr(name, tensor, tensor.dtype))
    return call, (narrow, tensors)

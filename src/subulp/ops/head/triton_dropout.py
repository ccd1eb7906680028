# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Dropout of a head's weights in Triton: a mask of random bits, which no memory holds."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import format_of
from ..triton import codec, launch, random_bits
from .tiles import DROPOUT_SLOT

BLOCK = 1024
"""Weights of a program."""


def factor_of(dropout: float) -> float:
    """What the weights that are kept are multiplied by, an FP32 number."""
    return float(torch.ones((), dtype=torch.float32, device="cpu").div_(1.0 - dropout))


def dropped(
    rows: Tensor, scale: float, dropout: float, address: Tensor, wide: torch.dtype
) -> Tensor:
    """The weights of stored rows that a step keeps, zeros for the others.

    Args:
        rows: ``(labels, dim)`` stored values, contiguous.
        scale: A stored value times ``scale``, a power of two, is the weight.
        dropout: Share of the weights that are left out.
        address: int64 on the device: see :func:`kept_at`.
        wide: FP32, or BF16, to which they are rounded.
    """
    out = torch.empty(rows.shape, dtype=wide, device=rows.device)
    on_gpu = rows.device.type == "cuda"
    with torch.cuda.device(rows.device) if on_gpu else contextlib.nullcontext():
        if rows.numel():
            dropped_kernel[(triton.cdiv(rows.numel(), BLOCK),)](
                rows.view(codec.WORDS[rows.dtype.itemsize]),
                out,
                rows.numel(),
                scale,
                factor_of(dropout),
                address,
                FORMAT=format_of(rows.dtype).name,
                BLOCK=BLOCK,
                enable_fp_fusion=False,
            )
    return out


def compile_for(target: launch.Target, dtype: torch.dtype, count: int) -> Any:
    """Compile the kernel for so many weights ahead of time, see :func:`.launch.compile_for`."""
    word = {1: "*u8", 2: "*i16", 4: "*i32"}[dtype.itemsize]
    arguments: dict[str, str | int] = {"rows": word, "out": "*bf16", "count": count}
    arguments |= {"scale": "fp32", "factor": "fp32", "address": "*i64"}
    options = {"FORMAT": format_of(dtype).name, "BLOCK": BLOCK}
    return launch.compile_for(dropped_kernel, target, arguments, **options)


@triton.jit
def dropped_kernel(
    rows, out, count, scale, factor, address, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    code = tl.load(rows + at, mask=inside, other=0).to(tl.uint32)
    weight = codec.value(code & ((1 << codec.width(FORMAT)) - 1), FORMAT) * scale
    weight = weight * kept_at(at, factor, address)
    if out.dtype.element_ty == tl.bfloat16:
        half = codec.nearest(weight, "bf16").to(tl.uint16)
        tl.store(out + at, half.to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(out + at, weight, mask=inside)


@triton.jit
def kept_at(at, factor, address):
    """The factors of some weights, 0 for those that are left out.

    Args:
        at: int64, places of the weights among the rows.
        factor: FP32, that of the others.
        address: int64 ``(4,)``: key and step of the random bits, where the rows begin, and the
            least word that keeps a weight.
    """
    key, step = tl.load(address).to(tl.uint64), tl.load(address + 1).to(tl.uint32)
    bits = random_bits.draw_at(tl.load(address + 2) + at, key, step, slot(), 32)
    return tl.where(bits.to(tl.int64) >= tl.load(address + 3), factor, 0.0)


@triton.constexpr_function
def slot():
    """Philox counter word of these bits."""
    return DROPOUT_SLOT

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Inputs in E4M3 in Triton: one launch, the zeros that FP8 units want around them included."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import codec, launch

BLOCK = 1024
"""Codes of a program."""


def inputs(x: Tensor, rows: int, columns: int) -> Tensor:
    """E4M3 ``(rows, columns)``: ``x``, rounded to nearest even, and zeros.

    Args:
        x: FP32 ``(batch, dim)``, contiguous.
        rows: At least ``batch``.
        columns: At least ``dim``.
    """
    launch.check_device(encode_kernel, x.device)
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
    on_gpu = x.device.type == "cuda"
    with torch.cuda.device(x.device) if on_gpu else contextlib.nullcontext():
        if codes.numel():
            encode_kernel[(triton.cdiv(codes.numel(), BLOCK),)](
                *(x, codes, *x.shape, rows, columns), BLOCK=BLOCK, enable_fp_fusion=False
            )
    return codes.view(torch.float8_e4m3fn)


def compile_for(target: launch.Target, shape: tuple[int, int], rows: int, columns: int) -> Any:
    """Compile the kernel for ``x`` of a shape ahead of time, see :func:`.launch.compile_for`."""
    arguments: launch.Arguments = {
        **{"x": "*fp32", "codes": "*u8", "batch": shape[0], "dim": shape[1]},
        **{"rows": rows, "columns": columns},
    }
    return launch.compile_for(encode_kernel, target, arguments, BLOCK=BLOCK)


@triton.jit
def encode_kernel(x, codes, batch, dim, rows, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // columns, at % columns
    number = tl.load(x + row * dim + column, mask=(row < batch) & (column < dim), other=0.0)
    tl.store(codes + at, codec.nearest(number, "e4m3").to(tl.uint8), mask=row < rows)

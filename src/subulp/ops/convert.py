"""Rows of a narrow format to FP32 and back: one read, one write."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import format_of, round_to
from . import backend, native


def decode(codes: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """``codes * scale`` in FP32.

    Args:
        codes: Contiguous tensor of any storage dtype.
        out: Contiguous FP32 tensor of its shape; overwritten.
        scale: A power of two, so that nothing is rounded (default: 1).

    Returns:
        ``out``.
    """
    if backend.choose(codes.device).backend == "cpu":
        _convert("subulp_decode", codes.dtype, codes, out, scale)
        return out
    return out.copy_(codes).mul_(scale)


def encode(values: Tensor, codes: Tensor, scale: float = 1.0) -> Tensor:
    """``values * scale``, rounded to nearest even; what is too large saturates.

    Args:
        values: Contiguous FP32 tensor.
        codes: Contiguous tensor of its shape and any storage dtype; overwritten.
        scale: A power of two (default: 1).

    Returns:
        ``codes``.
    """
    if backend.choose(codes.device).backend == "cpu":
        _convert("subulp_encode", codes.dtype, values, codes, scale)
        return codes
    return codes.copy_(round_to(values * scale, format_of(codes.dtype)))


def _convert(entry: str, dtype: torch.dtype, source: Tensor, target: Tensor, scale: float) -> None:
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert source.shape == target.shape
    failed = getattr(native.library(), entry)(
        native.DTYPE_CODES[dtype],
        source.data_ptr(),
        target.data_ptr(),
        source.numel(),
        scale,
        torch.get_num_threads(),
        native.isa(),
    )
    if failed:
        raise RuntimeError(f"{entry} has no kernel for {dtype}")

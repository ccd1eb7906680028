"""Logits in FP8: E4M3 inputs times E4M3 rows, summed in FP32, rounded once to BF16.

ELMO, section 4.3 and algorithm 1. What a product in FP32 of the decoded numbers gives, rounded to
BF16, is the definition; FP8 units differ from it in the order of the sum alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backend
from ..rows import encode

# The first with FP8 units: Ada. Hopper and Blackwell came after it.
_CAPABILITY = (8, 9)
# What cuBLAS wants of the inner size and of the batch.
_MULTIPLE = 16


def units_at(device: torch.device) -> bool:
    """Whether FP8 units multiply there: a GPU of sm_89 or later, unless a backend is forced."""
    if device.type != "cuda" or backend.choose(device).backend != "triton":
        return False
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def inputs(x: Tensor) -> Tensor:
    """FP32 inputs as E4M3, to nearest even; what is too large saturates."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return encode(x.contiguous(), codes)


def to_bf16_(values: Tensor) -> Tensor:
    """Round an FP32 tensor to BF16, to nearest even, in place."""
    return values.copy_(values.bfloat16())


def unit_logits(rows: Tensor, x: Tensor, scale: float) -> Tensor:
    """The logits from FP8 units.

    Args:
        rows: E4M3 ``(labels, dim)``, contiguous.
        x: E4M3 ``(batch, dim)``.
        scale: A stored row times ``scale`` is the weight.

    Returns:
        BF16 ``(labels, batch)``.
    """
    labels, dim = rows.shape
    batch = x.shape[0]
    inner = _padded(dim)
    # torch._scaled_mm takes the first operand row by row and the second column by column.
    logits = torch._scaled_mm(
        _enlarged(rows, labels, inner),
        _enlarged(x, max(_MULTIPLE, _padded(batch)), inner).t(),
        # Filled there: a copy would have the host wait.
        scale_a=torch.full((), scale, dtype=torch.float32, device=rows.device),
        scale_b=torch.ones((), dtype=torch.float32, device=rows.device),
        out_dtype=torch.bfloat16,
    )
    return logits[:, :batch]


def _padded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def _enlarged(codes: Tensor, rows: int, columns: int) -> Tensor:
    """The codes padded with zeros below and to the right."""
    if codes.shape == (rows, columns):
        return codes.contiguous()
    # Bytes: torch copies those on every device, and zero is zero in both.
    whole = torch.zeros(rows, columns, dtype=torch.uint8, device=codes.device)
    whole[: codes.shape[0], : codes.shape[1]] = codes.view(torch.uint8)
    return whole.view(codes.dtype)

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


def units_for(device: torch.device, dim: int) -> bool:
    """Whether FP8 units take rows of ``dim`` numbers there as they are stored."""
    return dim % _MULTIPLE == 0 and units_at(device)


def inputs(x: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
    """FP32 inputs as E4M3, to nearest even; what is too large saturates.

    Args:
        x: ``(batch, dim)``.
        shape: Of the result, with zeros below and to the right (default: that of ``x``).
    """
    rows, columns = x.shape if shape is None else shape
    if backend.choose(x.device).backend == "triton":
        # Triton may not be installed.
        from . import triton_fp8  # noqa: PLC0415

        return triton_fp8.inputs(x.contiguous(), rows, columns)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return enlarged(encode(x.contiguous(), codes), rows, columns)


def unit_inputs(x: Tensor) -> Tensor:
    """The same for FP8 units, in the sizes that they take."""
    return inputs(x, (max(_MULTIPLE, padded(x.shape[0])), padded(x.shape[1])))


def scales(scale: float, device: torch.device) -> Tensor:
    """Scales of rows and of inputs for :func:`unit_logits`, FP32 ``(2,)``."""
    # Filled there: a copy would have the host wait.
    found = torch.ones(2, dtype=torch.float32, device=device)
    found[0].fill_(scale)
    return found


def to_bf16_(values: Tensor) -> Tensor:
    """Round an FP32 tensor to BF16, to nearest even, in place."""
    return values.copy_(values.bfloat16())


def unit_logits(rows: Tensor, x: Tensor, scales: Tensor) -> Tensor:
    """The logits from FP8 units.

    Args:
        rows: E4M3 ``(labels, dim)``, contiguous.
        x: E4M3 ``(batch, dim)``, or :func:`unit_inputs`.
        scales: Of rows, a power of two, and of inputs: see :func:`scales`.

    Returns:
        BF16 ``(labels, batch)``; of :func:`unit_inputs`, columns of zeros after them.
    """
    labels, batch = rows.shape[0], x.shape[0]
    inner = padded(rows.shape[1])
    # torch._scaled_mm takes the first operand row by row and the second column by column.
    logits = torch._scaled_mm(
        enlarged(rows, labels, inner),
        enlarged(x, max(_MULTIPLE, padded(batch)), inner).t(),
        scale_a=scales[0],
        scale_b=scales[1],
        out_dtype=torch.bfloat16,
    )
    return logits[:, :batch]


def padded(size: int) -> int:
    """A size that units take, at least as large."""
    return -(-size // _MULTIPLE) * _MULTIPLE


def enlarged(codes: Tensor, rows: int, columns: int) -> Tensor:
    """E4M3 codes row by row, padded with zeros below and to the right."""
    if codes.shape == (rows, columns):
        return codes.contiguous()
    # Bytes: torch copies those on every device, and zero is zero in both.
    whole = torch.zeros(rows, columns, dtype=torch.uint8, device=codes.device)
    whole[: codes.shape[0], : codes.shape[1]] = codes.view(torch.uint8)
    return whole.view(codes.dtype)

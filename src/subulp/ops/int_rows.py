"""Rows of integers to FP32 and back: one read, one write."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import int_rows
from . import backend, native


def decode_rows(stored: Tensor, out: Tensor, bits: int) -> Tensor:
    """The values of stored rows, as :func:`subulp.numerics.int_rows.decode` gives them.

    Args:
        stored: Contiguous uint8 ``(rows, row_bytes(dim, bits))``: scale, bias, codes.
        out: Contiguous FP32 ``(rows, dim)``; overwritten.
        bits: Bits of an integer.

    Returns:
        ``out``.
    """
    if backend.choose(stored.device).backend == "cpu" and hasattr(
        native.library(), "subulp_decode_rows"
    ):
        _call("subulp_decode_rows", stored, out, bits, stored, out)
        return out
    return out.copy_(int_rows.decode(int_rows.from_bytes(stored, bits, out.shape[-1])))


def encode_rows(values: Tensor, stored: Tensor, bits: int) -> Tensor:
    """Rows to integers, rounded to nearest, see :func:`subulp.numerics.int_rows.encode`.

    Args:
        values: Contiguous FP32 ``(rows, dim)``.
        stored: Contiguous uint8 ``(rows, row_bytes(dim, bits))``; overwritten.
        bits: Bits of an integer.

    Returns:
        ``stored``.
    """
    if backend.choose(stored.device).backend == "cpu" and hasattr(
        native.library(), "subulp_decode_rows"
    ):
        _call("subulp_encode_rows", values, stored, bits, stored, values)
        return stored
    return stored.copy_(int_rows.to_bytes(int_rows.encode(values, bits)))


def _call(
    entry: str, source: Tensor, target: Tensor, bits: int, stored: Tensor, values: Tensor
) -> None:
    assert source.is_contiguous()
    assert target.is_contiguous()
    rows, dim = values.shape
    assert stored.shape == (rows, int_rows.row_bytes(dim, bits))
    failed = getattr(native.library(), entry)(
        bits,
        source.data_ptr(),
        target.data_ptr(),
        rows,
        dim,
        torch.get_num_threads(),
        native.isa(),
    )
    if failed:
        raise RuntimeError(f"{entry} has no kernel for integers of {bits} bits")

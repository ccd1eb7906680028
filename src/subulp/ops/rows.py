"""Rows of a narrow format or of integers to FP32 and back: one read, one write.

C++ on a CPU. Elsewhere plain PyTorch, which gives the same bits, integers some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..numerics import format_of, int_rows, round_to
from ..numerics.random_bits import RandomAddress
from . import backend, facts, native

# Integers that plain PyTorch converts at a time: each takes up to a hundred bytes on the way.
_SLICE = 1 << 22


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
        facts.DTYPES[dtype],
        source.data_ptr(),
        target.data_ptr(),
        source.numel(),
        scale,
        torch.get_num_threads(),
        native.isa(),
    )
    if failed:
        raise RuntimeError(f"{entry} has no kernel for {dtype}")


def decode_rows(stored: Tensor, out: Tensor, bits: int) -> Tensor:
    """The values of stored rows, as :func:`subulp.numerics.int_rows.decode` gives them.

    Args:
        stored: Contiguous uint8 ``(rows, row_bytes(dim, bits))``: scale, bias, codes.
        out: Contiguous FP32 ``(rows, dim)``; overwritten.
        bits: Bits of an integer.

    Returns:
        ``out``.
    """
    if backend.choose(stored.device).backend == "cpu":
        _convert_rows("subulp_decode_rows", stored, out, bits, stored, out)
        return out
    for part in _slices(out):
        out[part] = int_rows.decode(int_rows.from_bytes(stored[part], bits, out.shape[1]))
    return out


def encode_rows(
    values: Tensor, stored: Tensor, bits: int, random: RandomAddress | None = None
) -> Tensor:
    """Rows to integers, see :func:`subulp.numerics.int_rows.encode`.

    Args:
        values: Contiguous FP32 ``(rows, dim)``.
        stored: Contiguous uint8 ``(rows, row_bytes(dim, bits))``; overwritten.
        bits: Bits of an integer.
        random: Address of the bits of stochastic rounding, 32 for each element; ``None`` rounds to
            nearest (default: ``None``).

    Returns:
        ``stored``.
    """
    if backend.choose(stored.device).backend == "cpu":
        if random is None:
            _convert_rows("subulp_encode_rows", values, stored, bits, stored, values)
        else:
            address = (random.seed, random.stream, random.step, random.offset)
            entry = "subulp_encode_rows_randomly"
            _convert_rows(entry, values, stored, bits, stored, values, *address)
        return stored
    for part in _slices(values):
        x = values[part]
        if random is None:
            rows = int_rows.encode(x, bits)
        else:
            drawn = random.after(part.start * x.shape[1]).draw(x.shape, x.device)
            rows = int_rows.encode(x, bits, "stochastic", random=drawn)
        stored[part] = int_rows.to_bytes(rows)
    return stored


def _slices(values: Tensor) -> Iterator[slice]:
    rows, dim = values.shape
    size = max(1, _SLICE // dim)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _convert_rows(
    entry: str,
    source: Tensor,
    target: Tensor,
    bits: int,
    stored: Tensor,
    values: Tensor,
    *address: int,
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
        *address,
        torch.get_num_threads(),
        native.isa(),
    )
    if failed:
        raise RuntimeError(f"{entry} has no kernel for integers of {bits} bits")

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
from .pointers import data_ptr

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

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    _check_place(codes, out)
    if backend.choose(codes.device).backend == "cpu":
        shape = codes.shape
        source = data_ptr("codes", codes, codes.dtype)
        target = data_ptr("out", out, torch.float32, shape)
        _convert("subulp_decode", codes.dtype, source, target, shape.numel(), scale)
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

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    _check_place(codes, values)
    if backend.choose(codes.device).backend == "cpu":
        shape = codes.shape
        target = data_ptr("codes", codes, codes.dtype)
        source = data_ptr("values", values, torch.float32, shape)
        _convert("subulp_encode", codes.dtype, source, target, shape.numel(), scale)
        return codes
    return codes.copy_(round_to(values * scale, format_of(codes.dtype)))


def _check_place(stored: Tensor, values: Tensor) -> None:
    if stored.device != values.device:
        raise ValueError(
            f"rows lie on {stored.device} and values on {values.device}: expected one device"
        )


def _convert(
    entry: str, dtype: torch.dtype, source: int, target: int, count: int, scale: float
) -> None:
    format_of(dtype)
    code = facts.DTYPES[dtype]
    where = (torch.get_num_threads(), native.isa())
    if getattr(native.library(), entry)(code, source, target, count, scale, *where):
        raise RuntimeError(f"{entry} has no kernel for {dtype}")


def decode_rows(stored: Tensor, out: Tensor, bits: int) -> Tensor:
    """The values of stored rows, as :func:`subulp.numerics.int_rows.decode` gives them.

    Args:
        stored: Contiguous uint8 ``(rows, row_bytes(dim, bits))``: scale, bias, codes.
        out: Contiguous FP32 ``(rows, dim)``; overwritten.
        bits: Bits of an integer.

    Returns:
        ``out``.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    _check_place(stored, out)
    if backend.choose(stored.device).backend == "cpu":
        source, target = _row_addresses(stored, out, bits)
        _convert_rows("subulp_decode_rows", bits, source, target, out.shape)
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

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    _check_place(stored, values)
    if backend.choose(stored.device).backend == "cpu":
        target, source = _row_addresses(stored, values, bits)
        if random is None:
            _convert_rows("subulp_encode_rows", bits, source, target, values.shape)
        else:
            address = (random.seed, random.stream, random.step, random.offset)
            entry = "subulp_encode_rows_randomly"
            _convert_rows(entry, bits, source, target, values.shape, *address)
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


def _row_addresses(stored: Tensor, values: Tensor, bits: int) -> tuple[int, int]:
    if values.dim() != 2:
        raise ValueError(f"values have shape {tuple(values.shape)}: expected (rows, dim)")
    rows, dim = values.shape
    shape = (rows, int_rows.row_bytes(dim, bits))
    return (
        data_ptr("stored", stored, torch.uint8, shape),
        data_ptr("values", values, torch.float32),
    )


def _convert_rows(
    entry: str, bits: int, source: int, target: int, shape: torch.Size, *address: int
) -> None:
    where = (torch.get_num_threads(), native.isa())
    if getattr(native.library(), entry)(bits, source, target, *shape, *address, *where):
        raise RuntimeError(f"{entry} has no kernel for integers of {bits} bits")

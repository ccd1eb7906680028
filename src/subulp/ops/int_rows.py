"""Rows of integers to FP32 and back: one read, one write.

C++ on a CPU. Elsewhere plain PyTorch, a slice of rows at a time; a GPU has no kernel of its own for
this, and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..numerics import int_rows
from . import backend, native
from .random_address import RandomAddress

# Elements that plain PyTorch takes at a time: what it makes for each on the way is up to a hundred
# bytes.
_SLICE = 1 << 22


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
        _call("subulp_decode_rows", stored, out, bits, stored, out)
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
            _call("subulp_encode_rows", values, stored, bits, stored, values)
        else:
            address = (random.seed, random.stream, random.step, random.offset)
            entry = "subulp_encode_rows_randomly"
            _call(entry, values, stored, bits, stored, values, *address)
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


def _call(
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

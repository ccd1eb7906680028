"""Rows of small integers: uniform min-max quantisation with a scale and a bias for each row.

"Mixed-Precision Embedding Using a Cache", section 3 and Algorithm 1. A row ``x`` is stored as
integers ``q`` of 8, 4 or 2 bits, a scale ``s`` and a bias ``b``::

    b = min(x)    s = (max(x) - b) / (2**bits - 1)    q = round((x - b) / s)    x ~ q * s + b

each operation rounded to FP32 once. What the paper leaves open:

* The quotient may round to a little more than the largest integer; it is clamped.
* A constant row, and one whose ``s`` underflows to zero, has scale 0 and integers 0: it decodes to
  ``b`` exactly.
* A row with a NaN or an infinity, or whose range ``max - min`` overflows FP32, has scale and bias
  NaN and integers 0: all of it decodes to NaN. What cannot be represented is not made plausible.
* Zeros lose their sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .formats import BF16, E4M3, FP16, FP32, Format
from .rounding import check_bits

RowRounding = Literal["nearest", "stochastic"]

PARAMETER_BYTES = 8
"""Bytes of a row's scale and bias, both FP32."""


@dataclass(frozen=True)
class IntFormat:
    """A format of rows of integers: its name and size.

    Attributes:
        bits: Bits of an integer: 8, 4 or 2.
    """

    bits: int

    @property
    def name(self) -> str:
        """What tables and errors call it."""
        return f"int{self.bits}"

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of ``dim`` integers, its scale and bias included."""
        return row_bytes(dim, self.bits)

    def __str__(self) -> str:
        return self.name


INT8, INT4, INT2 = INT_FORMATS = IntFormat(8), IntFormat(4), IntFormat(2)

RowFormat = Format | IntFormat
"""The format of a table's rows."""

ROW_FORMATS: dict[str, RowFormat] = {f.name: f for f in (FP32, BF16, FP16, E4M3, *INT_FORMATS)}
"""Storages of giant tables by their names in ``storage=``."""

WIDTHS = tuple(f.bits for f in INT_FORMATS)
"""Bits that an integer may have."""


class IntRows(NamedTuple):
    """Quantised rows.

    Attributes:
        codes: uint8 ``(..., packed_bytes(dim, bits))``; the first integer of a byte in its lowest
            bits, and zeros where the last byte is not full.
        scale: FP32 ``(...)``.
        bias: FP32 ``(...)``.
        bits: Bits of an integer.
        dim: Integers of a row.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor
    bits: int
    dim: int


def encode(
    x: Tensor, bits: int, rounding: RowRounding = "nearest", *, random: Tensor | None = None
) -> IntRows:
    """Quantise rows, the last dimension of ``x``.

    Args:
        x: FP32 tensor (..., dim), ``dim`` at least 1.
        bits: 8, 4 or 2.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"`` (default: ``"nearest"``).
        random: For ``"stochastic"`` only: uniform random bits of the shape of ``x``, as for
            ``round_to``. The upper 24 bits are a number ``u`` in [0, 1); a quotient goes up exactly
            if its fraction is above ``u``, so an integer never moves and the bias is below 2**-24.

    Returns:
        Codes, scale and bias.

    Raises:
        ValueError: ``x`` is not FP32 or has no last dimension, ``bits`` or the rounding is unknown,
            or ``random`` is missing, superfluous, of another shape or dtype.
    """
    _check(x, bits, rounding, random)
    top = float((1 << bits) - 1)
    low, high = x.amin(-1), x.amax(-1)
    # Adding zero makes -0 a 0: which zero is the smaller one is nobody's to say.
    bias = low + 0.0
    span = high - bias
    valid = torch.isfinite(low) & torch.isfinite(high) & torch.isfinite(span)
    scale = span / top
    scale = torch.where(scale > 0, scale, 0.0)
    used = (valid & (scale > 0)).unsqueeze(-1)
    t = (x - bias.unsqueeze(-1)) / scale.unsqueeze(-1)
    t = torch.where(used, t, 0.0)
    if random is None:
        q = t.round()
    else:
        below = t.floor()
        u = (random.to(torch.int64) >> 8).to(torch.float32) * 2.0**-24
        q = below + (t - below > u)
    q = q.clamp(max=top).to(torch.uint8)
    nan = torch.full_like(scale, torch.nan)
    return IntRows(
        pack(q, bits),
        torch.where(valid, scale, nan),
        torch.where(valid, bias, nan),
        bits,
        x.shape[-1],
    )


def decode(rows: IntRows) -> Tensor:
    """``q * scale + bias``, two roundings: FP32 (..., dim)."""
    q = unpack(rows.codes, rows.bits, rows.dim).to(torch.float32)
    return q * rows.scale.unsqueeze(-1) + rows.bias.unsqueeze(-1)


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes that ``dim`` integers take."""
    return -(-dim * bits // 8)


def row_bytes(dim: int, bits: int) -> int:
    """Bytes of a whole stored row: scale, bias and codes."""
    return PARAMETER_BYTES + packed_bytes(dim, bits)


def pack(q: Tensor, bits: int) -> Tensor:
    """uint8 integers (..., dim) below ``2**bits`` to uint8 (..., packed_bytes(dim, bits))."""
    per_byte = 8 // bits
    missing = -q.shape[-1] % per_byte
    padded = torch.nn.functional.pad(q, (0, missing))
    # The count in numbers: without rows, -1 could be any.
    places = padded.view(*q.shape[:-1], packed_bytes(q.shape[-1], bits), per_byte)
    packed = places[..., 0].clone()
    for place in range(1, per_byte):
        packed |= places[..., place] << (bits * place)
    return packed


def unpack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """The ``dim`` integers of packed bytes, uint8; the inverse of :func:`pack`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    places: Tensor = (codes.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return places.flatten(-2)[..., :dim]


def to_bytes(rows: IntRows) -> Tensor:
    """Rows as they lie in a table: uint8 (..., row_bytes(dim, bits)), scale and bias first."""
    parameters = torch.stack((rows.scale, rows.bias), dim=-1).view(torch.uint8)
    return torch.cat((parameters, rows.codes), dim=-1)


def from_bytes(stored: Tensor, bits: int, dim: int) -> IntRows:
    """Rows of a table; the inverse of :func:`to_bytes`."""
    parameters = stored[..., :PARAMETER_BYTES].clone(memory_format=torch.contiguous_format)
    scale, bias = parameters.view(torch.float32).unbind(-1)
    return IntRows(stored[..., PARAMETER_BYTES:], scale, bias, bits, dim)


def _check(x: Tensor, bits: int, rounding: str, random: Tensor | None) -> None:
    if x.dtype != torch.float32:
        raise ValueError(f"x has dtype {x.dtype}: encode takes FP32 values; call x.float() first")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {tuple(x.shape)}: rows of at least one number are needed")
    if bits not in WIDTHS:
        raise ValueError(f"bits={bits} is not available: integers have 8, 4 or 2 bits")
    if rounding not in get_args(RowRounding):
        raise ValueError(f"rounding={rounding!r} is unknown: use 'nearest' or 'stochastic'")
    if rounding == "nearest":
        if random is not None:
            raise ValueError("random is given but rounding='nearest' uses none: leave it out")
        return
    if random is None:
        raise ValueError("rounding='stochastic' needs random: see numerics.random_bits.draw")
    check_bits(random, x)

"""A giant table of rows in a narrow format, the first of them kept precise.

An embedding table and a classifier over labels are the same object, read by index or multiplied
whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..numerics import BF16, E4M3, FP16, FP32, Format, round_to
from ..numerics.formats import simulated
from ..ops.convert import decode, encode

Storage = str | tuple[int, int] | Format

_FORMATS = {f.name: f for f in (FP32, BF16, FP16, E4M3)}

# FP32 values that are made or read at a time, so that no FP32 copy of the table ever exists.
_SLICE = 1 << 22


def parse_storage(storage: Storage) -> Format:
    """The format that a ``storage=`` argument names.

    Args:
        storage: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"e4m3"``; or a pair (exponent
            bits, mantissa bits), simulated in FP32 storage.

    Raises:
        ValueError: It is unknown, or a width is out of range.
    """
    if isinstance(storage, Format):
        return storage
    if isinstance(storage, tuple):
        return simulated(*storage)
    if storage not in _FORMATS:
        raise ValueError(
            f"storage={storage!r} is unknown: use one of {', '.join(_FORMATS)}, or a pair "
            "(exponent bits, mantissa bits) to simulate"
        )
    return _FORMATS[storage]


class RowTable(nn.Module):
    """``rows`` x ``dim`` numbers in a narrow format.

    Args:
        rows: Number of rows.
        dim: Numbers of a row.
        storage: See :func:`parse_storage`.
        precise_rows: The first rows also have a BF16 remainder, what rounding took from them
            (default: 0).
        scale: Power of two that a stored value is multiplied by (default: 1).
        device: Where the table lies (default: torch's).

    Attributes:
        codes: ``(rows, dim)`` stored values; a parameter without gradient, of the storage's dtype.
        remainder: BF16 ``(precise_rows, dim)``, or ``None``.
        format: The storage's format.
        scale: A stored value times ``scale`` is the weight.

    Raises:
        ValueError: A size is out of range, or ``scale`` is not a power of two.
    """

    remainder: Tensor | None

    def __init__(
        self,
        rows: int,
        dim: int,
        storage: Storage,
        *,
        precise_rows: int = 0,
        scale: float = 1.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rows < 1 or dim < 1:
            raise ValueError(f"a table of {rows} rows x {dim} is empty: give at least 1 x 1")
        if not 0 <= precise_rows <= rows:
            raise ValueError(f"precise_rows={precise_rows} is out of range: from 0 to {rows}")
        if not (scale > 0 and math.frexp(scale)[0] == 0.5):
            raise ValueError(f"scale={scale} is not a power of two: other factors would round")
        self.format = parse_storage(storage)
        self.scale = scale
        dtype = self.format.dtype or torch.float32
        codes = torch.zeros(rows, dim, dtype=dtype, device=device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        remainder = torch.zeros(precise_rows, dim, dtype=torch.bfloat16, device=device)
        self.register_buffer("remainder", remainder if precise_rows else None)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.codes.shape[0]

    @property
    def dim(self) -> int:
        """Numbers of a row."""
        return self.codes.shape[1]

    def decode(self, start: int, stop: int) -> Tensor:
        """FP32 weights of the rows ``start`` to ``stop``, as products see them: no remainders."""
        codes = self.codes[start:stop]
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        return decode(codes, out, self.scale)

    def wide(self, start: int, stop: int) -> Tensor:
        """FP32 weights of the rows ``start`` to ``stop``, remainders added."""
        values = self.decode(start, stop)
        if self.remainder is not None:
            kept = self.remainder[start:stop]
            values[: kept.shape[0]].add_(kept)
        return values

    @torch.no_grad()
    def store(self, start: int, values: Tensor) -> None:
        """Round FP32 ``(count, dim)`` weights to nearest into the rows from ``start`` on."""
        stop = start + values.shape[0]
        codes, values = self.codes[start:stop], values.contiguous()
        if self.format.dtype is None:
            codes.copy_(round_to(values * (1.0 / self.scale), self.format))
        else:
            encode(values, codes, 1.0 / self.scale)
        if self.remainder is not None:
            kept = self.remainder[start:stop]
            count = kept.shape[0]
            encode((values - self.decode(start, stop))[:count].contiguous(), kept)

    def gather(self, rows: Tensor) -> Tensor:
        """FP32 weights of some rows, ``(count, dim)``, remainders added."""
        codes = _bytes(self.codes.detach())[rows].view(self.codes.dtype)
        values = decode(codes, torch.empty(codes.shape, device=codes.device), self.scale)
        if self.remainder is not None:
            precise = rows < self.remainder.shape[0]
            values[precise] += self.remainder[rows[precise]]
        return values

    @torch.no_grad()
    def permute(self, order: Tensor) -> None:
        """Let row ``i`` be what row ``order[i]`` was, remainders included where both have one."""
        if self.remainder is not None:
            count = self.remainder.shape[0]
            source = order[:count]
            had = source < count
            moved = torch.zeros_like(self.remainder)
            moved[had] = self.remainder[source[had]]
            self.remainder.copy_(moved)
        self.codes.copy_(_bytes(self.codes.detach())[order].view(self.codes.dtype))

    @torch.no_grad()
    def fill_uniform(self, bound: float, generator: torch.Generator | None = None) -> None:
        """Draw every weight from ``[-bound, bound)``: the same ones in any storage."""
        if self.codes.is_meta:
            return
        for start, stop in self.slices():
            drawn = torch.empty(stop - start, self.dim)
            drawn.uniform_(-bound, bound, generator=generator)
            self.store(start, drawn.to(self.codes.device))

    def slices(self) -> Iterator[tuple[int, int]]:
        """Runs of rows whose FP32 copy is small."""
        step = max(1, _SLICE // self.dim)
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def nbytes(self) -> dict[str, int]:
        """Bytes of storage by tensor."""
        sizes = {"codes": self.codes.nbytes}
        if self.remainder is not None:
            sizes["remainder"] = self.remainder.nbytes
        return sizes

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        precise = "" if self.remainder is None else f", precise_rows={self.remainder.shape[0]}"
        return f"{self.rows}, {self.dim}, storage={self.format}{precise}, scale={self.scale}"


def _bytes(codes: Tensor) -> Tensor:
    """FP8 rows as bytes: torch indexes those on every device."""
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes

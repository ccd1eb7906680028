"""Rows of a table and its cache, read and written in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics import Format, format_of, int_rows, random_bits, round_to
from ...numerics.metrics import lane_sums
from .job import Table


def set_of(rows: Tensor, sets: int, *, mixed: bool) -> Tensor:
    """The set that each row belongs to, of so many; ``mixed``: as a mixing hash says."""
    return (random_bits.mix(rows) if mixed else rows) % sets


def find(table: Table, rows: Tensor) -> Tensor:
    """Where each row lies in the cache, -1 for those that do not: int64."""
    if not table.sets:
        return torch.full_like(rows, -1)
    sets = set_of(rows, table.sets, mixed=table.mixed)
    match = table.tags.view(table.sets, table.ways)[sets] == rows.unsqueeze(1)
    place = sets * table.ways + match.int().argmax(1)
    return torch.where(match.any(1), place, -1)


def decode(table: Table, rows: Tensor) -> Tensor:
    """What the table holds, FP32 ``(count, dim)``."""
    stored = as_bytes(table.codes)[rows]
    if table.bits:
        return int_rows.decode(int_rows.from_bytes(stored, table.bits, table.dim))
    return stored.view(table.codes.dtype).float()


def fetch(table: Table, rows: Tensor, places: Tensor) -> Tensor:
    """Algorithm 2's ``T[i]``: the cached row where there is one, else the table's."""
    values = decode(table, rows)
    cached = places >= 0
    values[cached] = table.cache[places[cached]]
    return values


def encode(
    table: Table,
    rows: Tensor,
    values: Tensor,
    *,
    stochastic: bool,
    seed: int,
    stream: int,
    step: int,
    slot: int,
) -> None:
    """Round FP32 values ``(count, dim)`` into some rows of the table, each given once.

    The random bits of an element are those of its place in the whole table, see
    :mod:`subulp.numerics.random_bits`.
    """
    fmt: Format | None = None if table.bits else format_of(table.codes.dtype)
    bits = None
    rounding = "stochastic" if stochastic and table.codes.dtype != torch.float32 else "nearest"
    if rounding == "stochastic":
        column = torch.arange(table.dim, dtype=torch.int64, device=rows.device)
        index = table.place.element(rows).unsqueeze(1) + column
        width = 32 if fmt is None else fmt.random_width
        bits = random_bits.draw_at(
            index, seed=seed, stream=stream, step=step, slot=slot, width=width
        )
    if fmt is None:
        stored = int_rows.to_bytes(
            int_rows.encode(values, table.bits, rounding, random=bits)  # type: ignore[arg-type]
        )
    elif fmt.dtype == torch.float32:
        stored = values
    else:
        stored = as_bytes(
            round_to(values, fmt, rounding, bits=bits).to(table.codes.dtype)  # type: ignore[arg-type]
        )
    as_bytes(table.codes)[rows] = stored


def as_bytes(codes: Tensor) -> Tensor:
    """FP8 rows as bytes: torch indexes those on every device."""
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes


def row_sum(x: Tensor) -> Tensor:
    """Sums of FP32 rows (rows, dim) in the order of :mod:`subulp.numerics.metrics`: (rows,)."""
    # Kernels begin with zeros: where all terms are -0, the sum is 0.
    return lane_sums(x) + 0.0

"""Tensors of a part of a table as a checkpoint has them, whatever ranks have the rows.

The rows of a whole table, filled up to whole periods, are a tensor ``(rounds, period, ...)``; those
of a rank are a range of the second dimension: DTensor's ``Shard(1)``. What a cache keeps is
``(sets, ways, ...)``, and a rank has a range of the first. So ``torch.distributed.checkpoint``
reshards them. A part that lies whole on one rank is a plain tensor of the same shape there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.embedding.job import EMPTY
from .cached_table import CachedTable
from .placement import PlacedPart
from .table_part import TablePart
from .table_ranks import TableRanks

_ROWS = ("table.codes", "counts")
_CACHE = ("cache", "tags", "stamps")
_DAMAGED = 2**31 - 1


def save_part(
    ranks: TableRanks, placed: PlacedPart, table: CachedTable, state: dict[str, Any], prefix: str
) -> None:
    """Replace the tensors of a part in a state dict by those of a checkpoint.

    Args:
        ranks: The ranks.
        placed: The part.
        table: What this rank has of it.
        state: The state dict.
        prefix: Of the part's keys.
    """
    part = _part(table)
    if placed.rank is not None and not part.taken:
        for name in (*_ROWS, *_CACHE):
            state.pop(prefix + name, None)
        return
    for name in (*_ROWS, *_CACHE):
        if (tensor := state.get(prefix + name)) is not None:
            if name == "tags":
                tags = tensor.long()
                tensor = torch.where(tags < 0, tags, part.numbers(tags)).to(torch.int32)
            cached = name in _CACHE
            state[prefix + name] = _shown(ranks, placed, table, tensor, cached=cached)


def save_rows(ranks: TableRanks, placed: PlacedPart, table: CachedTable, tensor: Tensor) -> Tensor:
    """A tensor with an entry for each row of a part, as a checkpoint has it."""
    return _shown(ranks, placed, table, tensor, cached=False)


def load_part(
    placed: PlacedPart, table: CachedTable, state: dict[str, Any], prefix: str
) -> list[str]:
    """Replace the tensors of a checkpoint in a state dict by those that this rank has of a part.

    Those of a whole table in one process are taken apart, too.

    Returns:
        Sentences about shapes that do not fit.
    """
    part = _part(table)
    own = _tensors(table)
    if placed.rank is not None and not part.taken:
        state.update({prefix + name: tensor for name, tensor in own.items()})
        return []
    found = []
    for name, tensor in own.items():
        saved = state.get(prefix + name)
        if not isinstance(saved, Tensor):
            continue
        cached = name in _CACHE
        local = _taken(table, saved, tensor, cached=cached)
        if local is None:
            found.append(
                f"{prefix}{name} has shape {tuple(saved.shape)}: expected "
                f"{_shape(table, tensor, cached=cached)}"
            )
            continue
        state[prefix + name] = _local_tags(part, local) if name == "tags" else local
    return found


def load_rows(table: CachedTable, saved: Tensor, own: Tensor) -> Tensor:
    """This rank's entries of a tensor that :func:`save_rows` has made; as it is if it does not fit.

    Args:
        table: The part.
        saved: The tensor.
        own: What this rank has now.
    """
    local = _taken(table, saved, own, cached=False)
    return saved if local is None else local


def _part(table: CachedTable) -> TablePart:
    assert table.part is not None
    return table.part


def _tensors(table: CachedTable) -> Mapping[str, Tensor]:
    tensors = {
        "table.codes": table.table.stored,
        "counts": table.counts,
        "cache": table.cache,
        "tags": table.tags,
        "stamps": table.stamps,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _shape(table: CachedTable, tensor: Tensor, *, cached: bool) -> tuple[int, ...]:
    """The shape of the whole, for what this rank has."""
    part, rest = _part(table), tuple(tensor.shape[1:])
    sets, ways = table.config.cache_shape()
    return (sets, ways, *rest) if cached else (part.rounds, part.period, *rest)


def _local_shape(table: CachedTable, tensor: Tensor, *, cached: bool) -> tuple[int, ...]:
    part, rest = _part(table), tuple(tensor.shape[1:])
    return (table.sets, table.ways, *rest) if cached else (part.rounds, part.taken, *rest)


def _shown(
    ranks: TableRanks, placed: PlacedPart, table: CachedTable, tensor: Tensor, *, cached: bool
) -> Tensor:
    local = tensor.view(_local_shape(table, tensor, cached=cached))
    if (
        placed.rank is not None
        or ranks.mesh is None
        or (cached and not table.config.cache_shape()[0])
    ):
        return local
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415

    shape = torch.Size(_shape(table, tensor, cached=cached))
    stride = torch.empty(shape, device="meta").stride()
    dim = 0 if cached else 1
    return DTensor.from_local(
        local, ranks.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
    )


def _taken(table: CachedTable, saved: Tensor, own: Tensor, *, cached: bool) -> Tensor | None:
    """What this rank has of a saved tensor; ``None`` if its shape does not fit."""
    part = _part(table)
    if hasattr(saved, "to_local"):
        if tuple(saved.shape) != _shape(table, own, cached=cached):
            return None
        saved = saved.to_local()
    if tuple(saved.shape) == _local_shape(table, own, cached=cached):
        return saved.reshape(own.shape)
    rest = tuple(own.shape[1:])
    if not cached and tuple(saved.shape) == (part.whole_rows, *rest):
        rows, first = part.run(0, part.whole_rows)
        # The rows that fill up the last period hold nothing.
        local = torch.zeros(own.shape, dtype=saved.dtype, device=saved.device)
        _bytes(local)[first : first + rows.numel()] = _bytes(saved)[rows.to(saved.device)]
        return local
    sets, ways = table.config.cache_shape()
    if cached and tuple(saved.shape) == (sets * ways, *rest):
        return saved[part.first * ways : part.first * ways + own.shape[0]]
    return None


def _local_tags(part: TablePart, tags: Tensor) -> Tensor:
    row = tags.long()
    residue = row % part.period
    local = row // part.period * part.taken + residue - part.first
    fits = (residue >= part.first) & (residue < part.stop) & (row < part.whole_rows)
    local = torch.where(fits, local, _DAMAGED)
    return torch.where(row == EMPTY, row, local).to(tags.dtype)


def _bytes(rows: Tensor) -> Tensor:
    """FP8 rows as bytes, which torch can index on every device."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows

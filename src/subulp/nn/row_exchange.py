"""Rows of a sharded table that move between ranks, and its state as DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dtensors import is_dtensor
from .ranks import Ranks, bytes_of
from .row_shards import RowShards

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SLICE_BYTES = 1 << 24
"""Bytes of rows that a rank sends or receives at a time."""

Wanted = Callable[[int, int, int], Tensor]
"""Rank, start, stop: the numbers of the rows that a rank wants for those places of its result."""


def fetch(
    ranks: Ranks, shards: RowShards, own: Tensor, wanted: Wanted, counts: Sequence[int]
) -> Tensor:
    """Rows of the whole table, wherever they are; all ranks call this with the same arguments.

    Args:
        ranks: The ranks.
        shards: Which rows each rank has.
        own: This rank's rows, ``(count, ...)`` of any dtype.
        wanted: What each rank wants: int64 row numbers, equal on all ranks.
        counts: Number of rows that each rank wants.

    Returns:
        The rows that this rank wants, ``(counts[rank], ...)``.
    """
    memory = bytes_of(own.contiguous())
    found = torch.empty(
        counts[ranks.rank], memory.shape[1], dtype=torch.uint8, device=memory.device
    )
    at_a_time = max(1, _SLICE_BYTES // memory.shape[1])
    for start in range(0, max(counts), at_a_time):
        asked = [
            wanted(rank, min(start, count), min(start + at_a_time, count))
            for rank, count in enumerate(counts)
        ]
        mine = [
            shards.places(ranks.rank, rows[shards.owners(rows) == ranks.rank]) for rows in asked
        ]
        owners = shards.owners(asked[ranks.rank])
        received = ranks.exchange(
            memory[torch.cat(mine)],
            [places.shape[0] for places in mine],
            torch.bincount(owners, minlength=ranks.size).tolist(),
        )
        found[start + owners.argsort(stable=True)] = received
    return found.view(own.dtype)


def chunked(ranks: Ranks, shards: RowShards, own: Tensor) -> Tensor:
    """This rank's part of ``torch.chunk`` of the whole table; collective unless it has just that.

    Args:
        ranks: The ranks.
        shards: Which rows each rank has.
        own: This rank's rows.
    """
    if shards.chunked:
        return own
    target = RowShards(shards.rows, 0, shards.ranks)
    return fetch(ranks, shards, own, _all(target, own.device), _counts(target))


def unchunked(ranks: Ranks, shards: RowShards, own: Tensor) -> Tensor:
    """The reverse of :func:`chunked`."""
    if shards.chunked:
        return own
    source = RowShards(shards.rows, 0, shards.ranks)
    return fetch(ranks, source, own, _all(shards, own.device), _counts(shards))


def permuted(ranks: Ranks, shards: RowShards, own: Tensor, order: Tensor) -> Tensor:
    """This rank's rows once row ``i`` is what row ``order[i]`` was."""
    numbers = _all(shards, own.device)
    return fetch(
        ranks,
        shards,
        own,
        lambda rank, start, stop: order[numbers(rank, start, stop)],
        _counts(shards),
    )


def _counts(shards: RowShards) -> list[int]:
    return [shards.count(rank) for rank in range(shards.ranks)]


def _all(shards: RowShards, device: torch.device) -> Wanted:
    """Every rank wants the rows that it is to have."""

    def wanted(rank: int, start: int, stop: int) -> Tensor:
        parts = []
        for run in shards.runs(rank):
            first = max(start, run.place)
            last = min(stop, run.place + run.count)
            numbers = range(first - run.place + run.first, last - run.place + run.first)
            if numbers:
                parts.append(
                    torch.arange(numbers.start, numbers.stop, dtype=torch.int64, device=device)
                )
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)

    return wanted


# -------------------------------------------------------------------------------------- DTensors


def to_dtensor(ranks: Ranks, shards: RowShards, own: Tensor) -> DTensor:
    """The whole table as a DTensor; collective unless ``shards.chunked``."""
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415

    local = own if own.is_meta else chunked(ranks, shards, own)
    if own.is_meta and not shards.chunked:
        local = own.new_empty(RowShards(shards.rows, 0, ranks.size).count(ranks.rank), own.shape[1])
    shape = torch.Size((shards.rows, own.shape[1]))
    return DTensor.from_local(
        local, ranks.mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
    )


def from_whole(ranks: Ranks, shards: RowShards, whole: Tensor) -> Tensor:
    """This rank's rows of a table of a state dict: a DTensor, or a tensor of all rows."""
    if not is_dtensor(whole):
        parts = [whole[run.first : run.first + run.count] for run in shards.runs(ranks.rank)]
        return torch.cat([_word(part) for part in parts] or [_word(whole[:0])]).view(whole.dtype)
    local: Tensor = whole.to_local()  # type: ignore[attr-defined]
    if local.is_meta:
        return local.new_empty(shards.count(ranks.rank), local.shape[1])
    return unchunked(ranks, shards, local)


def whole_fault(ranks: Ranks | None, name: str, value: Tensor, shape: Sequence[int]) -> str | None:
    """What is wrong with a state dict's tensor for a table whose whole has this shape, if anything.

    Args:
        ranks: The ranks that share the table; ``None`` for a table in one process.
        name: Of the tensor in the state dict.
        value: The tensor.
        shape: Of all ranks' rows together.
    """
    if is_dtensor(value):
        if ranks is None:
            return (
                f"{name} is a DTensor, and these rows are on no mesh: load it with "
                "torch.distributed.checkpoint, or pass its full_tensor()"
            )
        from torch.distributed.tensor import Shard  # noqa: PLC0415

        placements = value.placements  # type: ignore[attr-defined]
        if value.device_mesh != ranks.mesh or tuple(placements) != (Shard(0),):  # type: ignore[attr-defined]
            return (
                f"{name} has placements {placements} on {value.device_mesh}: expected "  # type: ignore[attr-defined]
                f"(Shard(0),) on {ranks.mesh}; load it with torch.distributed.checkpoint"
            )
    if ranks is not None and tuple(value.shape) != tuple(shape):
        return (
            f"{name} has shape {tuple(value.shape)}: the whole table, over {ranks.size} ranks, has "
            f"{tuple(shape)}"
        )
    return None


def _word(rows: Tensor) -> Tensor:
    """FP8 rows as bytes, which torch can concatenate on every device."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows

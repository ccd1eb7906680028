"""How the lookups of a rank reach the ranks that have the rows, and in which order.

A *slot* is a feature and a part of its table; a bag of a slot is cut into *runs*, whose sums travel
back. One process adds the rows of a bag in their order, so a run is what can be summed up
elsewhere without changing that order: the rows from the bag's beginning on that lie on one rank,
and each later row by itself. Runs are added up where the bag is, in their order: the same rounded
operations on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .placement import PlacedPart
from .table_part import shard_of

Sizes = list[list[int]]
"""Of each slot and each rank: a number of runs, lookups or bags."""


@dataclass(frozen=True)
class Slots:
    """The slots of a module.

    Attributes:
        features: The feature of each slot; features ascend.
        parts: Its part.
        dims: Its columns.
        periods: int64 ``(slots,)``: the period of its part.
        ranks: int64 ``(slots,)``: the rank that has all rows, -1 if they are split.
    """

    features: list[int]
    parts: list[int]
    dims: list[int]
    periods: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, features: Sequence[int], placed: Sequence[PlacedPart]) -> Slots:
        """The slots of features, each of a table, whose parts are placed."""
        found = [
            (f, p)
            for f, t in enumerate(features)
            for p, part in enumerate(placed)
            if part.table == t
        ]
        parts = [placed[p] for _, p in found]
        return cls(
            [f for f, _ in found],
            [p for _, p in found],
            [part.dim for part in parts],
            torch.tensor([part.period for part in parts], device="cpu"),
            torch.tensor([-1 if p.rank is None else p.rank for p in parts], device="cpu"),
        )

    def __len__(self) -> int:
        return len(self.features)

    @property
    def columns(self) -> list[int]:
        """Where the columns of each slot begin in the output, and where the last ones end."""
        columns = [0]
        for dim in self.dims:
            columns.append(columns[-1] + dim)
        return columns


@dataclass
class Routes:
    """The lookups of this rank, by slot and then by the rank that has the rows.

    Attributes:
        batch: Bags of a slot.
        runs: int32: lookups of each run, negative for the first of its bag on that rank.
        rows: int32: row numbers there.
        lookups: int64: where each of these stands among the values.
        run_counts: Runs of each slot for each rank.
        row_counts: Lookups.
        bag_counts: Bags that have lookups there.
        bags: int64: these bags.
        places: int64: where the runs of a bag are among those of its slot, bag by bag.
        ends: int64 ``(slots * batch + 1,)``: where these begin.
    """

    batch: int
    runs: Tensor
    rows: Tensor
    lookups: Tensor
    run_counts: Sizes
    row_counts: Sizes
    bag_counts: Sizes
    bags: Tensor
    places: Tensor
    ends: Tensor


def find_routes(
    slots: Slots, values: Tensor, offsets: Tensor, ranks: int, *, rows_alone: bool
) -> Routes:
    """Where the lookups of a rank go.

    Args:
        slots: The slots.
        values: int64 row numbers, feature by feature.
        offsets: int64 ``(features * batch + 1,)``.
        ranks: Number of ranks.
        rows_alone: Whether rows of tables that are split travel one by one, also where they could
            be summed up.
    """
    device, count = values.device, len(slots)
    features = torch.tensor(slots.features, device=device)
    shape = slots.features[-1] + 1, (offsets.numel() - 1) // (slots.features[-1] + 1)
    batch = shape[1]
    lengths = offsets.diff().view(shape)[features].reshape(-1)
    starts = offsets[:-1].view(shape)[features].reshape(-1)
    bag = torch.arange(count * batch, device=device).repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths)[bag]
    here = torch.arange(bag.numel(), device=device)
    lookups = starts[bag] + here - first
    slot = bag // max(batch, 1)
    fixed = slots.ranks.to(device)[slot]
    rank, row = shard_of(values[lookups], slots.periods.to(device)[slot], ranks)
    split = fixed < 0
    rank, row = torch.where(split, rank, fixed), torch.where(split, row, values[lookups])

    others = (rank != rank[first]).cumsum(0)
    begins = (here == first) | (others != others[first])
    if rows_alone:
        begins |= split
    start = begins.nonzero().squeeze(1)
    run_bag, run_rank = bag[start], rank[start]
    length = torch.cat((start, start.new_tensor([bag.numel()]))).diff()
    key = slot[start] * ranks + run_rank
    order = torch.argsort(key, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=device)
    run_counts = _counted(key, count, ranks)
    of_slot = torch.tensor([0, *(sum(n) for n in run_counts)], device=device).cumsum(0)
    places -= of_slot[slot[start]]

    pair = (run_bag * ranks + run_rank)[order]
    fresh = torch.ones_like(pair, dtype=torch.bool)
    fresh[1:] = pair[1:] != pair[:-1]
    runs = torch.where(fresh, -length[order], length[order])
    value_key = slot * ranks + rank
    value_order = torch.argsort(value_key, stable=True)
    run_ends = torch.bincount(run_bag, minlength=count * batch).cumsum(0)
    return Routes(
        batch,
        runs.to(torch.int32),
        row[value_order].to(torch.int32),
        lookups[value_order],
        run_counts,
        _counted(value_key, count, ranks),
        _counted(key[order][fresh], count, ranks),
        run_bag[order][fresh] % max(batch, 1),
        places,
        torch.cat((run_ends.new_zeros(1), run_ends)),
    )


def _counted(key: Tensor, slots: int, ranks: int) -> Sizes:
    counts: Sizes = torch.bincount(key, minlength=slots * ranks).view(slots, ranks).tolist()
    return counts


def transposed(sizes: Sizes) -> Sizes:
    """Sizes by rank and slot from those by slot and rank, or the other way round."""
    return [list(column) for column in zip(*sizes, strict=True)]


def times(sizes: Sizes, dims: Sequence[int]) -> Sizes:
    """Sizes by slot and rank, in numbers of vectors of the slot's dim."""
    return [[size * dim for size in row] for row, dim in zip(sizes, dims, strict=True)]


def regrouped(flat: Tensor, sizes: Sizes) -> Tensor:
    """What is ordered as ``sizes``, ordered as ``transposed(sizes)``."""
    if len(sizes) == 1 or len(sizes[0]) == 1:
        return flat
    pieces = flat.split_with_sizes([size for row in sizes for size in row])
    columns = len(sizes[0])
    return torch.cat([piece for c in range(columns) for piece in pieces[c::columns]])

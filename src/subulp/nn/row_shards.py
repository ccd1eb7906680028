"""Which rows of a table each rank of a mesh has.

Rows with a remainder come first in a table and are dearer than the others, so both kinds are cut
evenly: a rank has a run of the first kind, then a run of the second. Each kind is cut as
``torch.chunk`` does, and so as ``Shard(0)`` of a DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """A run of rows.

    Attributes:
        first: Number of its first row in the whole table.
        place: Number of its first row among the rank's own.
        count: Number of rows.
    """

    first: int
    place: int
    count: int

    def cut(self, start: int, stop: int) -> Run:
        """The rows of the run from number ``start`` to ``stop`` of the whole table."""
        first = min(max(start, self.first), self.first + self.count)
        last = max(first, min(stop, self.first + self.count))
        return Run(first, self.place + first - self.first, last - first)


@dataclass(frozen=True)
class RowShards:
    """How ``ranks`` ranks share a table.

    Attributes:
        rows: Rows of the whole table.
        precise: How many of them, from the first on, have a remainder.
        ranks: Number of ranks.
    """

    rows: int
    precise: int
    ranks: int

    @property
    def chunked(self) -> bool:
        """Whether ranks have what ``torch.chunk`` of the whole table gives them."""
        return self.ranks == 1 or self.precise in (0, self.rows)

    def runs(self, rank: int) -> list[Run]:
        """The runs of rows of a rank, in the order that it keeps them in; at most two."""
        if self.ranks == 1:
            return [Run(0, 0, self.rows)]
        found, place = [], 0
        for first, last in ((0, self.precise), (self.precise, self.rows)):
            size = self._size(first, last)
            start = min(first + rank * size, last)
            stop = min(start + size, last)
            if start < stop:
                found.append(Run(start, place, stop - start))
                place += stop - start
        return found

    def count(self, rank: int) -> int:
        """Number of a rank's rows."""
        return sum(run.count for run in self.runs(rank))

    def precise_count(self, rank: int) -> int:
        """Number of a rank's rows with a remainder."""
        return sum(run.cut(0, self.precise).count for run in self.runs(rank))

    def numbers(self, rank: int, device: torch.device) -> Tensor:
        """The numbers of a rank's rows in the whole table, int64."""
        runs = [
            torch.arange(run.first, run.first + run.count, dtype=torch.int64, device=device)
            for run in self.runs(rank)
        ]
        return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64, device=device)

    def owners(self, rows: Tensor) -> Tensor:
        """The ranks that have rows, int64."""
        plain = rows >= self.precise
        first = self._size(0, self.precise)
        second = self._size(self.precise, self.rows)
        return torch.where(plain, (rows - self.precise) // max(1, second), rows // max(1, first))

    def places(self, rank: int, rows: Tensor) -> Tensor:
        """Where a rank keeps rows, all of which it has."""
        places = torch.zeros_like(rows)
        for run in self.runs(rank):
            inside = (rows >= run.first) & (rows < run.first + run.count)
            places = torch.where(inside, rows - run.first + run.place, places)
        return places

    def _size(self, first: int, last: int) -> int:
        return -(-(last - first) // self.ranks)

"""Which rows and columns of an embedding table lie together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.embedding.job import Part


@dataclass(frozen=True)
class TablePart:
    """Some of the rows, or some of the columns, of a table.

    Row ``r`` has the residue ``r % period``, and a part takes the rows whose residues are in a
    range. The period of a table with a cache is its number of sets, so that the rows of a set stay
    together, with the set; that of others is the number of rows, so that a part is a run of them.

    Attributes:
        whole_rows: Rows of the table.
        period: See above.
        first: First residue taken.
        stop: First residue no longer taken; ``first`` for none.
        whole_dim: Numbers of a row of the table.
        column: First column taken.
        dim: Columns taken.
    """

    whole_rows: int
    period: int
    first: int
    stop: int
    whole_dim: int
    column: int
    dim: int

    @property
    def taken(self) -> int:
        """Residues taken."""
        return self.stop - self.first

    @property
    def rounds(self) -> int:
        """How often a residue occurs, at most."""
        return -(-self.whole_rows // self.period)

    @property
    def rows(self) -> int:
        """Rows of the part: as many for each residue, so a few may be none of the table's."""
        return self.rounds * self.taken

    @property
    def real_rows(self) -> int:
        """Rows of the part that are the table's."""
        return self._before(self.whole_rows)

    def as_op(self) -> Part:
        """The part in the form that :mod:`subulp.ops.embedding` takes."""
        return Part(self.period, self.first, max(self.taken, 1), self.whole_dim, self.column)

    def numbers(self, rows: Tensor) -> Tensor:
        """Row numbers of the table from those of the part."""
        taken = max(self.taken, 1)
        return rows // taken * self.period + self.first + rows % taken

    def run(self, start: int, stop: int) -> tuple[Tensor, int]:
        """The rows ``start`` to ``stop`` of the table that the part takes.

        Returns:
            int64 ``(count,)``: their numbers less ``start``; and the part's number of the first,
            from which on they follow one another.
        """
        residue = torch.arange(start, stop) % self.period
        found = ((residue >= self.first) & (residue < self.stop)).nonzero().squeeze(1)
        return found, self._before(start)

    def _before(self, row: int) -> int:
        """How many of the rows before ``row`` the part takes."""
        left = min(max(row % self.period - self.first, 0), self.taken)
        return row // self.period * self.taken + left


def shard_of(rows: Tensor, period: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Where rows of a table lie that is split over ranks, as :func:`residues` splits it.

    Args:
        rows: int64 row numbers.
        period: int64, that of each row's table; see :class:`TablePart`.
        ranks: Number of ranks.

    Returns:
        int64 tensors of the shape of ``rows``: the rank, and the row number there.
    """
    size = -(-period // ranks)
    residue = rows % period
    rank = residue // size
    taken = torch.minimum(period - rank * size, size)
    return rank, rows // period * taken + residue - rank * size


def residues(period: int, ranks: int, rank: int) -> tuple[int, int]:
    """The residues of a rank, first and stop: as ``torch.chunk`` and DTensor's ``Shard`` cut."""
    size = -(-period // ranks)
    return min(rank * size, period), min((rank + 1) * size, period)

"""Where the parts of embedding tables lie: on which rank, whole or split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .cached_table import CachedTable, EmbeddingTable
from .table_part import TablePart, residues


@dataclass(frozen=True)
class TableWise:
    """A whole table on one rank.

    Attributes:
        rank: Its rank in the mesh; ``None`` for the one with the fewest bytes (default: ``None``).
    """

    rank: int | None = None


@dataclass(frozen=True)
class RowWise:
    """The rows of a table split over all ranks, the sets of its cache with them."""


@dataclass(frozen=True)
class ColumnWise:
    """The columns of a table split into tables of their own, each whole on one rank.

    A part has a cache, scales and biases of integer rows, and a sum of ``RowAdagrad(rowwise=True)``
    of its own, as in TorchRec. The number of parts, not that of ranks, decides the bits.

    Attributes:
        parts: Number of parts, of widths as equal as can be; or their widths.
        ranks: The rank of each part; ``None`` for those with the fewest bytes (default: ``None``).
    """

    parts: int | tuple[int, ...]
    ranks: tuple[int, ...] | None = None

    def widths(self, dim: int) -> list[int]:
        """The columns of each part of a table of so many."""
        if isinstance(self.parts, tuple):
            return list(self.parts)
        cuts = [dim * i // self.parts for i in range(self.parts + 1)]
        return [stop - start for start, stop in itertools.pairwise(cuts)]


Placement = TableWise | RowWise | ColumnWise


@dataclass(frozen=True)
class PlacedPart:
    """Columns of a table, and who has their rows.

    Attributes:
        table: Number of the table.
        config: How the table is stored, cached and rounded.
        column: First column.
        dim: Number of columns.
        rank: The rank that has all rows; ``None`` if they are split over the ranks.
    """

    table: int
    config: EmbeddingTable
    column: int
    dim: int
    rank: int | None

    @property
    def period(self) -> int:
        """See :class:`.table_part.TablePart`."""
        return self.config.cache_shape()[0] or self.config.num_embeddings

    def on(self, rank: int, ranks: int) -> TablePart:
        """The rows and columns that lie on a rank, perhaps none."""
        if self.rank is None:
            first, stop = residues(self.period, ranks, rank)
        else:
            first, stop = 0, self.period if rank == self.rank else 0
        rows, dim = self.config.num_embeddings, self.config.embedding_dim
        return TablePart(rows, self.period, first, stop, dim, self.column, self.dim)


def place(
    configs: Sequence[EmbeddingTable], plan: Sequence[Placement] | None, ranks: int
) -> list[PlacedPart]:
    """The parts of all tables, table by table, the same on every rank.

    Args:
        configs: The tables.
        plan: The placement of each; ``None`` splits the rows of tables that take more than a rank's
            even share of the bytes, and places the others whole.
        ranks: Number of ranks.

    Raises:
        ValueError: The plan does not fit the tables or the ranks.
    """
    sizes = [_bytes(config) for config in configs]
    if plan is None:
        share = sum(sizes) / ranks
        plan = [
            RowWise() if size > share and config.hash != "mixed" else TableWise()
            for config, size in zip(configs, sizes, strict=True)
        ]
    if len(plan) != len(configs):
        raise ValueError(f"plan has {len(plan)} placements for {len(configs)} tables: one for each")
    for t, (config, placement) in enumerate(zip(configs, plan, strict=True)):
        _check(t, config, placement, ranks)
    loads = [0.0] * ranks
    for placement, size in zip(plan, sizes, strict=True):
        for rank in _ranks(placement) or ():
            loads[rank] += size / _parts(placement)
    chosen: dict[int, list[int]] = {}
    # The largest first, so that the small ones even the ranks out.
    for t in sorted(range(len(configs)), key=lambda t: -sizes[t]):
        chosen[t] = _ranks(plan[t]) or []
        for _ in range(_parts(plan[t]) - len(chosen[t])):
            rank = min(range(ranks), key=loads.__getitem__)
            loads[rank] += sizes[t] / _parts(plan[t])
            chosen[t].append(rank)
    placed: list[PlacedPart] = []
    for t, (config, placement) in enumerate(zip(configs, plan, strict=True)):
        if isinstance(placement, RowWise):
            placed.append(PlacedPart(t, config, 0, config.embedding_dim, None))
            continue
        widths = [config.embedding_dim]
        if isinstance(placement, ColumnWise):
            widths = placement.widths(config.embedding_dim)
        column = 0
        for width, rank in zip(widths, chosen[t], strict=True):
            placed.append(PlacedPart(t, config, column, width, rank))
            column += width
    return placed


def _bytes(config: EmbeddingTable) -> int:
    return CachedTable(config, "meta").memory().total


def _parts(placement: Placement) -> int:
    """Number of parts that lie whole on one rank each."""
    if isinstance(placement, RowWise):
        return 0
    if isinstance(placement, TableWise):
        return 1
    return placement.parts if isinstance(placement.parts, int) else len(placement.parts)


def _ranks(placement: Placement) -> list[int] | None:
    """The ranks that a placement names."""
    if isinstance(placement, TableWise) and placement.rank is not None:
        return [placement.rank]
    if isinstance(placement, ColumnWise) and placement.ranks is not None:
        return list(placement.ranks)
    return None


def _check(t: int, config: EmbeddingTable, placement: Placement, ranks: int) -> None:
    if not isinstance(placement, TableWise | RowWise | ColumnWise):
        raise ValueError(
            f"the placement of table {t} is {placement!r}: use TableWise, RowWise or ColumnWise"
        )
    if isinstance(placement, RowWise) and config.hash == "mixed" and config.cache_shape()[0]:
        raise ValueError(
            f"table {t} has hash='mixed' and RowWise(): the rows of a set would lie on several "
            "ranks; use hash='modulo', or place the table by TableWise() or ColumnWise()"
        )
    if isinstance(placement, ColumnWise):
        dim, parts = config.embedding_dim, _parts(placement)
        widths = placement.widths(dim) if parts > 0 else []
        if sum(widths) != dim or min(widths) < 1:
            raise ValueError(
                f"table {t} has {dim} columns: ColumnWise({placement.parts}) has to have from 1 "
                "part to one for each column, and widths that add up to them"
            )
        if placement.ranks is not None and len(placement.ranks) != parts:
            raise ValueError(
                f"table {t}: ColumnWise({placement.parts}) names {len(placement.ranks)} ranks: one "
                "for each part"
            )
    for rank in _ranks(placement) or ():
        if not 0 <= rank < ranks:
            raise ValueError(f"table {t} is placed on rank {rank}: the mesh has 0 to {ranks - 1}")

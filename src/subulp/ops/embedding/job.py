"""Arguments of the embedding ops: tables with their caches, and lookups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...numerics import Format, format_of
from ...numerics.int_rows import IntFormat

Policy = Literal["lfu", "lru"]
Update = Literal["sgd", "adagrad", "rowwise-adagrad"]

EMPTY = -1
"""Tag of a way that holds no row."""

MAX_WAYS = 64
"""Rows of a set, at most."""

COUNT_LIMIT = 2**31 - 1
"""Access counts saturate here."""

GRADIENT_SPAN = 64
"""Gradients of a row that are summed one after the other; spans of so many are summed then.

A row that many lookups share is thus summed by many threads of a GPU, in one order everywhere.
"""

BYPASS_SLOT, EVICT_SLOT, FLUSH_SLOT = 0, 1, 2
"""Philox counter words of the reasons to round a row.

Rows of a set are updated in ascending order. A row that is evicted before its own turn in a step
(``EVICT_SLOT``) may come back in that turn and be rounded again (``BYPASS_SLOT``, or evicted once
more, which is after its turn and has that word as well): so no (row, step, word) is used twice.
"""


@dataclass(frozen=True)
class Part:
    """Which rows and columns of a whole table a table has: random bits are counted by these.

    Row ``r`` is the whole's ``r // taken * period + first + r % taken``: of every ``period`` rows,
    ``taken`` ones from ``first`` on. They are in the whole's order.

    Attributes:
        period: Rows of the whole among which some are taken.
        first: The first row taken.
        taken: How many are, at least 1.
        dim: Numbers of a row of the whole.
        column: The first column.
    """

    period: int
    first: int
    taken: int
    dim: int
    column: int

    def element(self, row: Tensor) -> Tensor:
        """Where a row's first element lies in the whole table: int64."""
        whole = row // self.taken * self.period + self.first + row % self.taken
        return whole * self.dim + self.column


@dataclass
class Table:
    """A table of ``rows`` x ``dim`` and its cache of ``sets`` x ``ways`` rows.

    Attributes:
        codes: Stored rows: ``(rows, dim)``, or uint8 ``(rows, row_bytes(dim, bits))``.
        cache: FP32 ``(sets * ways, dim)``; no rows where there is no cache.
        tags: int32 ``(sets * ways,)``: which row lies there, ``EMPTY`` for none.
        bits: Bits of an integer, 0 for a floating-point storage.
        ways: Rows of a set.
        mixed: Whether the set of a row is chosen by a mixing hash, instead of ``row % sets``.
        part: Which rows and columns of a whole table these are; ``None`` if they are all.
    """

    codes: Tensor
    cache: Tensor
    tags: Tensor
    bits: int
    ways: int
    mixed: bool
    part: Part | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.codes.shape[0]

    @property
    def dim(self) -> int:
        """Numbers of a row."""
        return self.cache.shape[1]

    @property
    def sets(self) -> int:
        """Sets of the cache; 0 without one."""
        return self.tags.shape[0] // self.ways

    @property
    def place(self) -> Part:
        """Where its elements lie in the whole table."""
        return self.part or Part(1, 0, 1, self.dim, 0)

    @property
    def storage(self) -> Format | IntFormat:
        """The format of a row."""
        return IntFormat(self.bits) if self.bits else format_of(self.codes.dtype)


@dataclass
class TableUpdate:
    """What an update of a table needs beside the table.

    Attributes:
        counts: LFU: int32 ``(rows,)``, lookups in training so far; else empty.
        stamps: LRU: int32 ``(sets * ways,)``, the step of the last update; else empty.
        floors: LFU: int32 ``(sets,)``, a lower bound of the counts of a full set's residents: a
            row below it need not look at them; else empty. Backends may leave it alone.
        accumulator: FP32 ``(rows,)`` or ``(rows, dim)``; empty for SGD.
        stochastic: Whether rows that leave FP32 are rounded stochastically, or to nearest.
        stream: Philox key word.
        lr: Learning rate.
        weight_decay: Weight decay of the touched rows.
        eps: Adagrad's epsilon.
    """

    counts: Tensor
    stamps: Tensor
    floors: Tensor
    accumulator: Tensor
    stochastic: bool
    stream: int
    lr: float
    weight_decay: float
    eps: float

    @property
    def rule(self) -> Update:
        """The optimizer's rule, from the shape of its state."""
        if self.accumulator.numel() == 0:
            return "sgd"
        return "adagrad" if self.accumulator.dim() == 2 else "rowwise-adagrad"


def table_tensors(tables: Sequence[Table], updates: Sequence[TableUpdate]) -> list[Tensor]:
    """Stored rows, cache and tags of each table; with updates, also what these write, in order."""
    if not updates:
        return [t for table in tables for t in (table.codes, table.cache, table.tags)]
    return [
        t
        for table, u in zip(tables, updates, strict=True)
        for t in (
            *(table.codes, table.cache, table.tags),
            *(u.counts, u.stamps, u.floors, u.accumulator),
        )
    ]


@dataclass
class Lookups:
    """Bags of rows: feature by feature, in each of them bag by bag.

    Attributes:
        features: The table of each feature.
        values: int64 ``(count,)`` row numbers.
        offsets: int64 ``(len(features) * batch + 1,)``: where the values of a bag begin.
        weights: FP32 ``(count,)``, or ``None`` for 1.
    """

    features: Sequence[int]
    values: Tensor
    offsets: Tensor
    weights: Tensor | None

    @property
    def batch(self) -> int:
        """Bags of a feature."""
        return (self.offsets.shape[0] - 1) // len(self.features)

    def columns(self, tables: Sequence[Table]) -> list[int]:
        """Where each feature's columns begin in the output, and where the last ones end."""
        columns = [0]
        for table in self.features:
            columns.append(columns[-1] + tables[table].dim)
        return columns


@dataclass
class Job:
    """One call of an embedding op.

    Attributes:
        kind: What to do with them.
        tables: All tables.
        lookups: Which rows.
        grad: FP32 ``(batch, sum of dims)``: the output's gradient, for all but ``"pool"``.
        statistics: For ``"pool"``: int64 ``(tables, 2)``; lookups and cache hits are added.
        updates: For ``"update"``: one for each table.
        evictions: For ``"update"``: int64 ``(tables,)``; the number of evicted rows is added.
        seed: Philox key word.
        step: Philox counter word, and the time stamp of LRU; from 1.
    """

    kind: Literal["pool", "weight-grad", "update"]
    tables: Sequence[Table]
    lookups: Lookups
    grad: Tensor | None = None
    statistics: Tensor | None = None
    updates: Sequence[TableUpdate] = ()
    evictions: Tensor | None = None
    seed: int = 0
    step: int = 0

    @property
    def device(self) -> torch.device:
        """Device of the lookups."""
        return self.lookups.values.device

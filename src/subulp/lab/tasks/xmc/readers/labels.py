"""Which instance has which labels: a sparse matrix of ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....data.lines import Indices, Int64s, checked_indices

Int32s = NDArray[np.int32]

MAX_LABELS = 2**31 - 1
"""Label numbers are int32: half the bytes of int64, and the pairs are what memory must hold."""


@dataclass(frozen=True, eq=False)
class LabelMatrix:
    """Rows are instances, columns are labels; compressed by rows.

    Attributes:
        indptr: int64 ``(instances + 1,)``: row ``i`` is ``indices[indptr[i]:indptr[i + 1]]``.
        indices: int32 ``(pairs,)``: labels, ascending and different within a row.
        num_labels: Number of columns.
    """

    indptr: Int64s
    indices: Int32s
    num_labels: int

    @classmethod
    def from_sorted(cls, counts: Int64s, indices: Int32s, num_labels: int) -> LabelMatrix:
        """Rows one after the other, each ascending and without repeats.

        Args:
            counts: Labels of each row, ``(instances,)``.
            indices: All labels, each below ``num_labels``, ``(counts.sum(),)``.
            num_labels: Number of columns.
        """
        return cls(offsets_of(counts), indices, num_labels)

    @classmethod
    def from_pairs(cls, rows: Int64s, cols: Int64s, shape: tuple[int, int]) -> LabelMatrix:
        """Pairs in any order, each inside ``shape``; what is repeated is merged."""
        order = np.argsort(rows, kind="stable")
        counts, indices = sorted_rows(np.bincount(rows, minlength=shape[0]), cols[order])
        return cls.from_sorted(counts, indices, shape[1])

    @classmethod
    def identity(cls, num_labels: int) -> LabelMatrix:
        """Row ``i`` has the label ``i`` alone."""
        indices = np.arange(num_labels, dtype=np.int32)
        return cls(np.arange(num_labels + 1, dtype=np.int64), indices, num_labels)

    @property
    def shape(self) -> tuple[int, int]:
        """Instances and labels."""
        return len(self), self.num_labels

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def row(self, index: int) -> Int32s:
        """The labels of one instance; a view."""
        return self.indices[self.indptr[index] : self.indptr[index + 1]]

    def pairs(self, indices: Indices) -> tuple[Int64s, Int64s]:
        """The ones of a batch.

        Args:
            indices: Instances, ``(batch,)``.

        Returns:
            Positions in the batch, from 0, and labels: int64 ``(pairs,)`` each, in ascending order.

        Raises:
            IndexError: An instance is out of range.
        """
        chosen = checked_indices(indices, len(self))
        starts = self.indptr[chosen]
        counts = self.indptr[chosen + 1] - starts
        rows = np.repeat(np.arange(len(chosen), dtype=np.int64), counts)
        return rows, self.indices[ranges(starts, counts)].astype(np.int64)

    def counts(self) -> Int64s:
        """Instances of each label, int64 ``(num_labels,)``."""
        return np.bincount(self.indices, minlength=self.num_labels)

    def without(self, other: LabelMatrix) -> LabelMatrix:
        """This matrix less the ones of another of the same shape."""
        kept = ~np.isin(self._keys(), other._keys(), assume_unique=True)
        kept_before = offsets_of(kept)
        return LabelMatrix(kept_before[self.indptr], self.indices[kept], self.num_labels)

    def stack(self, other: LabelMatrix) -> LabelMatrix:
        """This matrix, and below it the rows of another over the same labels."""
        return LabelMatrix(
            np.concatenate([self.indptr, self.indptr[-1] + other.indptr[1:]]),
            np.concatenate([self.indices, other.indices]),
            self.num_labels,
        )

    def _keys(self) -> Int64s:
        rows = np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.indptr))
        return rows * self.num_labels + self.indices


def offsets_of(counts: NDArray[np.generic]) -> Int64s:
    """0 and the running sums of ``counts``: int64 ``(len(counts) + 1,)``."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """``start, start + 1, ...``, ``count`` of them, for one start after the other."""
    before = offsets_of(counts)
    return np.repeat(starts - before[:-1], counts) + np.arange(before[-1])


def sorted_rows(counts: Int64s, indices: NDArray[np.integer]) -> tuple[Int64s, Int32s]:
    """Labels ascending and different within each row, and how many each row has then."""
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    keys = (rows << 32) | indices
    if (np.diff(keys) <= 0).any():
        keys = np.unique(keys)
        counts = np.bincount(keys >> 32, minlength=len(counts))
    return counts, (keys & 0xFFFFFFFF).astype(np.int32)

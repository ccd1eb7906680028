"""From parsed examples to what a model takes: rows of tables, and numbers to one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .examples import Examples, Floats, Keys
from .layout import Layout


@dataclass(frozen=True)
class Batch:
    """Examples as a model takes them.

    Attributes:
        labels: float32 ``(count,)``, 0 or 1.
        numbers: float32 ``(count, numbers)``.
        rows: int64 ``(count, tables)``.
    """

    labels: Floats
    numbers: Floats
    rows: npt.NDArray[np.int64]


class Counts:
    """How often each key of a table occurs, in 12 bytes a different key."""

    _PENDING = 1 << 20

    def __init__(self) -> None:
        self._keys = np.empty(0, np.uint32)
        self._counts = np.empty(0, np.int64)
        self._pending: list[tuple[Keys, npt.NDArray[np.int64]]] = []
        self._waiting = 0

    def add(self, keys: Keys) -> None:
        """Count some keys."""
        found = np.unique(keys, return_counts=True)
        self._pending.append(found)
        self._waiting += len(found[0])
        # Merged when as many wait as are there: every key is copied a few times, not at each call.
        if self._waiting > max(self._PENDING, len(self._keys)):
            self._merge()

    def _merge(self) -> None:
        keys = np.concatenate([self._keys, *(p[0] for p in self._pending)])
        counts = np.concatenate([self._counts, *(p[1] for p in self._pending)])
        self._keys, places = np.unique(keys, return_inverse=True)
        self._counts = np.zeros(len(self._keys), np.int64)
        np.add.at(self._counts, places, counts)
        self._pending, self._waiting = [], 0

    def vocabulary(self, min_count: int, most: int) -> Keys:
        """The keys that occur often enough, ascending; of too many the most frequent ones."""
        self._merge()
        enough = self._counts >= min_count
        keys, counts = self._keys[enough], self._counts[enough]
        if len(keys) > most:
            order = np.lexsort((keys, -counts))
            keys = np.sort(keys[order[:most]])
        return keys


class Moments:
    """Mean and deviation of each column of numbers, missing ones left out."""

    def __init__(self, columns: int) -> None:
        self._count, self._sum, self._squares = np.zeros((3, columns))

    def add(self, numbers: Floats) -> None:
        """Count the numbers of some examples."""
        there = ~np.isnan(numbers)
        values = np.where(there, numbers, 0.0).astype(np.float64)
        self._count += there.sum(0)
        self._sum += values.sum(0)
        self._squares += (values**2).sum(0)

    def result(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Means and deviations; a column that is constant or empty has the deviation 1."""
        count = np.maximum(self._count, 1)
        mean = self._sum / count
        variance = np.maximum(self._squares / count - mean**2, 0.0)
        return mean, np.where(variance > 1e-12 * (1 + mean**2), np.sqrt(variance), 1.0)


class Encoder:
    """Rows and numbers of examples.

    A key is hashed to the row ``key % rows``; with a vocabulary its place there plus one, and row 0
    is for what the vocabulary lacks.

    Args:
        layout: Which numbers are standardised, and how many rows tables have.
        moments: Of the training part's numbers.
        vocabularies: Keys of each table, ascending; ``None`` to hash.

    Attributes:
        rows: Rows of each table.
    """

    def __init__(
        self, layout: Layout, moments: Moments, vocabularies: Sequence[Keys] | None
    ) -> None:
        mean, deviation = moments.result()
        scaled = np.array([number.standardise for number in layout.numbers])
        self._mean = np.where(scaled, mean, 0.0).astype(np.float32)
        self._deviation = np.where(scaled, deviation, 1.0).astype(np.float32)
        self._vocabularies = vocabularies
        self.rows = [table.rows for table in layout.tables]
        if vocabularies is not None:
            self.rows = [len(keys) + 1 for keys in vocabularies]

    def __call__(self, examples: Examples) -> Batch:
        """What a model takes of some examples."""
        numbers = (examples.numbers - self._mean) / self._deviation
        return Batch(examples.labels, np.nan_to_num(numbers, nan=0.0), self._rows(examples.keys))

    def _rows(self, keys: Keys) -> npt.NDArray[np.int64]:
        if self._vocabularies is None:
            hashed: npt.NDArray[np.int64] = keys.astype(np.int64) % np.array(self.rows)
            return hashed
        columns = [
            _places(vocabulary, keys[:, table])
            for table, vocabulary in enumerate(self._vocabularies)
        ]
        return np.stack(columns, 1)


def _places(vocabulary: Keys, keys: Keys) -> npt.NDArray[np.int64]:
    if not len(vocabulary):
        return np.zeros(len(keys), np.int64)
    places = np.searchsorted(vocabulary, keys).clip(max=len(vocabulary) - 1)
    found: npt.NDArray[np.int64] = np.where(vocabulary[places] == keys, places + 1, 0)
    return found

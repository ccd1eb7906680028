"""Examples as arrays: as they stand in a file, and as a model takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .layout import Layout

Floats = npt.NDArray[np.float32]
Keys = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Examples:
    """Examples as they stand in a file.

    Attributes:
        labels: float32 ``(count,)``, 0 or 1.
        numbers: float32 ``(count, numbers)``, transformed; NaN where one is missing.
        keys: uint32 ``(count, tables)``: a hash of each table's category.
    """

    labels: Floats
    numbers: Floats
    keys: Keys

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: npt.NDArray[np.int64] | slice) -> Examples:
        """Some of them."""
        return Examples(self.labels[chosen], self.numbers[chosen], self.keys[chosen])

    @classmethod
    def join(cls, parts: Sequence[Examples]) -> Examples:
        """At least one part after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.numbers for part in parts]),
            np.concatenate([part.keys for part in parts]),
        )


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


class ColumnStatistics:
    """Mean and deviation of each column of numbers, without missing ones."""

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
        statistics: Means and deviations of the training part's numbers.
        vocabularies: Keys of each table, ascending; ``None`` to hash.

    Attributes:
        layout: As above.
        rows: Rows of each table.
    """

    def __init__(
        self, layout: Layout, statistics: ColumnStatistics, vocabularies: Sequence[Keys] | None
    ) -> None:
        mean, deviation = statistics.result()
        scaled = np.array([number.standardise for number in layout.numbers])
        self._set(
            layout,
            np.where(scaled, mean, 0.0).astype(np.float32),
            np.where(scaled, deviation, 1.0).astype(np.float32),
            vocabularies,
        )

    def _set(
        self, layout: Layout, mean: Floats, deviation: Floats, vocabularies: Sequence[Keys] | None
    ) -> None:
        self.layout = layout
        self._mean, self._deviation, self._vocabularies = mean, deviation, vocabularies
        self.rows = [table.rows for table in layout.tables]
        if vocabularies is not None:
            self.rows = [len(keys) + 1 for keys in vocabularies]

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What :meth:`restored` needs beside the layout."""
        named = {f"vocabulary.{i}": keys for i, keys in enumerate(self._vocabularies or ())}
        return {"mean": self._mean, "deviation": self._deviation, **named}

    @classmethod
    def restored(cls, layout: Layout, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Encoder:
        """The encoder whose :meth:`arrays` are given.

        Raises:
            ValueError: They are not those of an encoder of the layout.
        """
        count, tables = len(layout.numbers), len(layout.tables)
        names = {f"vocabulary.{i}": i for i in range(tables)}
        known = set(arrays) - {"mean", "deviation"}
        if not {"mean", "deviation"} <= set(arrays) or known not in (set(), set(names)):
            raise ValueError(f"the columns are {', '.join(sorted(arrays))}")
        for name, array in arrays.items():
            numbers = name in ("mean", "deviation")
            right = np.float32 if numbers else np.uint32
            if array.dtype != right or array.ndim != 1 or (numbers and len(array) != count):
                raise ValueError(f"{name} has the dtype {array.dtype} and shape {array.shape}")
            if not numbers and (np.diff(array.astype(np.int64)) <= 0).any():
                raise ValueError(f"{name} does not ascend")
        made = object.__new__(cls)
        vocabularies = [arrays[name] for name in names] if known else None
        made._set(layout, arrays["mean"], arrays["deviation"], vocabularies)  # type: ignore[arg-type]
        return made

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

"""How often each number occurs in a stream of numbers."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", bound=np.integer)

_PENDING = 1 << 20


class Counts(Generic[Number]):
    """The count of each different number; memory holds these alone.

    Args:
        dtype: What the numbers are.
    """

    def __init__(self, dtype: type[Number]) -> None:
        self._numbers = np.empty(0, dtype)
        self._counts = np.empty(0, np.int64)
        self._pending: list[tuple[npt.NDArray[Number], npt.NDArray[np.int64]]] = []
        self._waiting = 0

    def add(self, numbers: npt.NDArray[Number]) -> None:
        """Count some numbers."""
        found = np.unique(numbers, return_counts=True)
        self._pending.append(found)
        self._waiting += len(found[0])
        # Merged when as many wait as are there: each is copied a few times, not at every call.
        if self._waiting > max(_PENDING, len(self._numbers)):
            self._merge()

    def most_frequent(self, most: int, min_count: int = 1) -> npt.NDArray[Number]:
        """Numbers that occur often enough, ascending.

        Args:
            most: How many at most: the most frequent ones; ties go to the lower number.
            min_count: Times that a number must occur (default: 1).
        """
        self._merge()
        enough = self._counts >= min_count
        numbers, counts = self._numbers[enough], self._counts[enough]
        if len(numbers) > most:
            numbers = np.sort(numbers[np.argsort(-counts, kind="stable")[:most]])
        return numbers

    def _merge(self) -> None:
        numbers = np.concatenate([self._numbers, *(n for n, _ in self._pending)])
        counts = np.concatenate([self._counts, *(c for _, c in self._pending)])
        self._numbers, places = np.unique(numbers, return_inverse=True)
        self._counts = np.zeros(len(self._numbers), np.int64)
        np.add.at(self._counts, places, counts)
        self._pending, self._waiting = [], 0

"""Parsed examples, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

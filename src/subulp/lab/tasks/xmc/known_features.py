"""Given features as bags, numbered anew: those that the training part has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...data.lines import Int64s
from .readers.bags import BagLines, Features

Floats = NDArray[np.float32]

_FORMAT = "subulp features 1"
_READ_AT_ONCE = 4096
_MERGED_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class KnownFeatures:
    """The features that training instances have, out of those that there may be.

    Attributes:
        numbers: In the data set's numbering, ascending, int64 ``(known,)``; a feature's place is
            its new number.
        num_features: What every feature of the data set is below.
    """

    numbers: Int64s
    num_features: int

    @classmethod
    def build(cls, source: BagLines, max_features: int) -> KnownFeatures:
        """Count features in one pass, and keep the most frequent; ties go to the lower number.

        The memory is that of the features that occur, whatever the file's header says.

        Args:
            source: The training instances.
            max_features: Features that are kept at most.

        Raises:
            ValueError: No instance has a feature.
        """
        counted = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        waiting = [counted]
        for start in range(0, len(source), _READ_AT_ONCE):
            found = source.read(np.arange(start, min(start + _READ_AT_ONCE, len(source))))
            waiting.append(np.unique(found.ids[found.values != 0], return_counts=True))
            # Merging sorts all that is known: rarely.
            if sum(len(numbers) for numbers, _ in waiting[1:]) > _MERGED_AT_ONCE:
                waiting = [_merged(waiting)]
        numbers, counts = _merged(waiting)
        if not len(numbers):
            raise ValueError(
                "no training instance has a feature other than 0: there is nothing to learn from"
            )
        kept = np.argsort(-counts, kind="stable")[:max_features]
        return cls(np.sort(numbers[kept]), source.num_features)

    def __len__(self) -> int:
        return len(self.numbers)

    def encode(self, features: Features) -> tuple[Int64s, Int64s, Floats]:
        """The known features of each instance under their new numbers, in the order given.

        Returns:
            ``ids``, int64 ``(known features of all instances,)``; ``offsets``, int64
            ``(instances + 1,)``; and ``weights``, FP32: the values, divided by the Euclidean norm
            of those of the instance, so that neither tiny nor huge ones are lost in FP32.
        """
        places = np.searchsorted(self.numbers, features.ids)
        places = np.minimum(places, len(self) - 1)
        known = self.numbers[places] == features.ids
        count = len(features.offsets) - 1
        instance = np.repeat(np.arange(count), np.diff(features.offsets))[known]
        values = features.values[known].astype(np.float64)
        norms = np.sqrt(np.bincount(instance, values * values, minlength=count))
        norms[norms == 0] = 1.0
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(instance, minlength=count), out=offsets[1:])
        return places[known], offsets, (values / norms[instance]).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write the numbers as one JSON object."""
        fields = {
            "format": _FORMAT,
            "num_features": self.num_features,
            "numbers": self.numbers.tolist(),
        }
        path.write_text(json.dumps(fields), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> KnownFeatures:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds something else.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}")
            known = cls(np.array(fields["numbers"], np.int64), int(fields["num_features"]))
            if known.numbers.ndim != 1 or not len(known):
                raise ValueError("it has no list of features")
            if (np.diff(known.numbers, prepend=-1) <= 0).any():
                raise ValueError("its features are not in ascending order")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} is no list of features as {_FORMAT!r} writes it ({error}): give the file "
                "that the training run wrote"
            ) from None
        return known


def _merged(counted: list[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    """The same numbers, each once, ascending, and the sums of their counts."""
    numbers, place = np.unique(np.concatenate([n for n, _ in counted]), return_inverse=True)
    counts = np.zeros(len(numbers), np.int64)
    np.add.at(counts, place, np.concatenate([c for _, c in counted]))
    return numbers, counts

"""The bag-of-words form: a header ``N D L`` and lines ``label,label feature:value ...``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....data.lines import Indices, Int64s, TextLines, checked_indices, fail, whole_lines
from .label_files import Headed
from .labels import LabelMatrix, offsets_of
from .sparse import list_rows, pair_rows


class Features(NamedTuple):
    """Sparse features of a batch, in the form of an embedding bag.

    Attributes:
        ids: Features of all instances one after the other, int64 ``(pairs,)``, as they stand in
            the file: not sorted, and what is repeated is repeated.
        offsets: int64 ``(batch + 1,)``: those of instance ``i`` are
            ``ids[offsets[i]:offsets[i + 1]]``.
        values: Their values, FP32 ``(pairs,)``.
    """

    ids: Int64s
    offsets: Int64s
    values: NDArray[np.float32]


class FeatureLines:
    """Lines ``feature:value ...``, read from the disk when they are asked for.

    Neither a header nor labels stand before the features. All lines are checked first.

    Args:
        path: The file, plain or ``.gz``.
        num_features: What every feature is below.

    Raises:
        ValueError: A line is malformed; the message begins with ``file:line``.
    """

    def __init__(self, path: Path, num_features: int) -> None:
        for line, block in whole_lines(path):
            pair_rows(path, line, block, num_features, "feature")
        self._lines = TextLines(path)
        self.num_features = num_features

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, indices: Indices) -> Features:
        """The features of the lines ``indices``, from 0."""
        lines = self._lines.read_bytes(indices)
        return _features(
            self._lines.path, [raw.removesuffix(b"\n") for raw in lines], self.num_features
        )


class BagLines:
    """The features of a bag-of-words file, read from the disk when they are asked for.

    Args:
        lines: The file with its header.
        num_features: What every feature is below.
    """

    def __init__(self, lines: TextLines, num_features: int) -> None:
        self._lines = lines
        self.num_features = num_features

    def __len__(self) -> int:
        return len(self._lines) - 1

    @property
    def digest(self) -> str:
        """Digest of the file."""
        return self._lines.digest

    def read(self, indices: Indices) -> Features:
        """The features of the instances ``indices``."""
        lines = self._lines.read_bytes(checked_indices(indices, len(self)) + 1)
        return _features(self._lines.path, [_split(raw)[1] for raw in lines], self.num_features)


def read_bag_file(path: Path, cache: Path | None = None) -> tuple[BagLines, LabelMatrix]:
    """Check all of a file, and keep its labels.

    A line begins with its labels; one that begins with a space, or is empty, has none.

    Args:
        path: The file, plain or ``.gz``.
        cache: As in :class:`TextLines` (default: ``None``).

    Raises:
        ValueError: The file is malformed; the message begins with ``file:line``.
    """
    file = Headed(path, "num_instances num_features num_labels")
    num_features = file.numbers[1]
    if not num_features:
        fail(path, 1, "0 features: expected at least 1")
    counts, indices = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for line, block in file.blocks():
        parts = [_split(raw) for raw in block.removesuffix(b"\n").split(b"\n")]
        lists = b"\n".join(labels for labels, _ in parts) + b"\n"
        found, numbers = list_rows(path, line, lists, file.num_labels)
        counts.append(found)
        indices.append(numbers)
        features = b"\n".join(features for _, features in parts) + b"\n"
        pair_rows(path, line, features, num_features, "feature")
    labels = LabelMatrix.from_sorted(
        np.concatenate(counts), np.concatenate(indices), file.num_labels
    )
    return BagLines(TextLines(path, cache, limit=file.instances + 2), num_features), labels


def _features(path: Path, lines: list[bytes], num_features: int) -> Features:
    """Lines of features that were checked before."""
    if not lines:
        return Features(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.float32))
    rows = pair_rows(path, 1, b"\n".join(lines) + b"\n", num_features, "feature")
    return Features(rows.numbers, offsets_of(rows.counts), rows.values.astype(np.float32))


def _split(raw: bytes) -> tuple[bytes, bytes]:
    """Labels and features of a line."""
    labels, _, features = raw.removesuffix(b"\n").removesuffix(b"\r").partition(b" ")
    # Without labels some files leave out the space as well.
    return (b"", labels + b" " + features) if b":" in labels else (labels, features)

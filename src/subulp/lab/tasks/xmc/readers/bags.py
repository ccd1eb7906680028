"""The bag-of-words form: a header ``N D L`` and lines ``label,label feature:value ...``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ....data.lines import (
    Indices,
    Int64s,
    TextLines,
    checked_indices,
    fail,
    single_lines,
    whole_lines,
)
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


class BagSource(Protocol):
    """Features by the numbers of their instances.

    Attributes:
        num_features: What every feature is below.
    """

    num_features: int

    def __len__(self) -> int: ...

    @property
    def digest(self) -> str:
        """Digest of all features."""

    def read(self, indices: Indices) -> Features:
        """The features of the instances ``indices``."""


class BagLines:
    """The features of the lines of a file, read from the disk when they are asked for.

    Args:
        lines: The file, all of it checked.
        num_features: What every feature is below.
        labelled: A header stands before the lines, and labels before the features of each.
    """

    def __init__(self, lines: TextLines, num_features: int, *, labelled: bool) -> None:
        self._lines, self._labelled = lines, labelled
        self.num_features = num_features

    def __len__(self) -> int:
        return len(self._lines) - self._labelled

    @property
    def digest(self) -> str:
        """Digest of the file."""
        return self._lines.digest

    def read(self, indices: Indices) -> Features:
        """The features of the instances ``indices``."""
        chosen = checked_indices(indices, len(self)) + self._labelled
        if not len(chosen):
            return Features(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.float32))
        lines = self._lines.read_bytes(chosen)
        found = (_split(raw)[1] if self._labelled else raw.removesuffix(b"\n") for raw in lines)
        block = b"\n".join(found) + b"\n"
        rows = pair_rows(self._lines.path, 1, block, self.num_features, "feature")
        return Features(rows.numbers, offsets_of(rows.counts), rows.values.astype(np.float32))


def read_feature_file(path: Path, num_features: int) -> BagLines:
    """Check a file of lines ``feature:value ...``, without a header or labels.

    Args:
        path: The file, plain or ``.gz``.
        num_features: What every feature is below.

    Raises:
        ValueError: A line is malformed; the message begins with ``file:line``.
    """
    for line, block in whole_lines(path):
        pair_rows(path, line, block, num_features, "feature")
    return BagLines(TextLines(path), num_features, labelled=False)


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
        parts = [_split(raw) for raw in single_lines(block)]
        lists = b"\n".join(labels for labels, _ in parts) + b"\n"
        found, numbers = list_rows(path, line, lists, file.num_labels)
        counts.append(found)
        indices.append(numbers)
        features = b"\n".join(features for _, features in parts) + b"\n"
        pair_rows(path, line, features, num_features, "feature")
    labels = LabelMatrix.from_sorted(
        np.concatenate(counts), np.concatenate(indices), file.num_labels
    )
    lines = TextLines(path, cache, limit=file.instances + 2)
    return BagLines(lines, num_features, labelled=True), labels


def _split(raw: bytes) -> tuple[bytes, bytes]:
    """Labels and features of a line."""
    labels, _, features = raw.removesuffix(b"\n").removesuffix(b"\r").partition(b" ")
    # Without labels some files leave out the space as well.
    return (b"", labels + b" " + features) if b":" in labels else (labels, features)

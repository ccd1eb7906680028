"""Files of label pairs: ``trn_X_Y.txt`` with its header, and ``trn_filter_labels.txt`` without."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from ....data.lines import fail, shown, whole_lines
from .header import Headed
from .labels import LabelMatrix
from .sparse import label_rows

_MOST_DIGITS = 18  # Of an int64, whatever its digits.


def read_label_file(path: Path) -> LabelMatrix:
    """A header ``num_instances num_labels``, and a line ``label:1 label:1`` for each instance.

    Raises:
        ValueError: The file is malformed; the message begins with ``file:line``.
    """
    file = Headed(path, "num_instances num_labels")
    counts, indices = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for line, block in file.blocks():
        found, labels = label_rows(path, line, block, file.num_labels)
        counts.append(found)
        indices.append(labels)
    return LabelMatrix.from_sorted(np.concatenate(counts), np.concatenate(indices), file.num_labels)


def read_filter_file(path: Path, shape: tuple[int, int]) -> LabelMatrix:
    """Lines ``instance label``: pairs that neither train nor count in an evaluation.

    Args:
        path: The file.
        shape: Instances and labels of the part that it belongs to.

    Raises:
        ValueError: The file is malformed; the message begins with ``file:line``.
    """
    pairs = array("q")
    for line, block in whole_lines(path):
        for number, raw in enumerate(block.removesuffix(b"\n").split(b"\n"), line):
            pairs.extend(_pair(path, number, raw, shape))
    rows, cols = np.array(pairs, np.int64).reshape(-1, 2).T
    return LabelMatrix.from_pairs(rows, cols, shape)


def _pair(path: Path, line: int, raw: bytes, shape: tuple[int, int]) -> list[int]:
    tokens = raw.split()
    if len(tokens) != len(shape) or not all(t.isdigit() for t in tokens):
        fail(path, line, f"expected 'instance label', found {shown(raw)}")
    for token, what, bound in zip(tokens, ("instance", "label"), shape, strict=True):
        if len(token) > _MOST_DIGITS or int(token) >= bound:
            fail(path, line, f"{what} {shown(token)} is out of range: expected 0 to {bound - 1}")
    return [int(token) for token in tokens]

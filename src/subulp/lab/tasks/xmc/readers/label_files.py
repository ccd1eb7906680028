"""Files of label pairs, and the header that says how much of a sparse file follows.

``trn_X_Y.txt`` has the header, ``trn_filter_labels.txt`` has none.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from ....data import room
from ....data.lines import count_lines, fail, shown, single_lines, whole_lines
from .labels import MAX_LABELS, LabelMatrix
from .sparse import label_rows

_MOST_DIGITS = 18  # An int64 holds every number of so many.


class Headed:
    """A file of one header and as many lines as its first number says.

    Nothing is allocated by the header's word: numbers are compared with what was read.

    Args:
        path: The file.
        fields: What the header holds, ``"num_instances ... num_labels"``.

    Raises:
        ValueError: The header is malformed, or names no label or too many.
    """

    def __init__(self, path: Path, fields: str) -> None:
        self.path = path
        self._blocks = whole_lines(path)
        _, first = next(self._blocks, (1, b""))
        header, _, self._rest = first.partition(b"\n")
        self.numbers = self._numbers(header, fields)
        self.instances, self.num_labels = self.numbers[0], self.numbers[-1]
        if not 1 <= self.num_labels <= MAX_LABELS:
            fail(path, 1, f"{self.num_labels} labels: expected 1 to {MAX_LABELS}")
        # Counts of each label are the first thing that is made of them.
        what = f"{path}:1: {self.num_labels:,} labels: an array of their counts"
        room.check_room(what, 8 * self.num_labels, "is it the header of this file?")

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines after the header, and the number of the first of them.

        Raises:
            ValueError: There are more or fewer lines than the header says.
        """
        found = 0
        rest = [(2, self._rest)] if self._rest else []
        for line, block in chain(rest, self._blocks):
            lines = count_lines(block)
            if found + lines > self.instances:
                excess = line + self.instances - found
                fail(
                    self.path,
                    excess,
                    f"more lines than the header's {self.instances:,} instances: is it another "
                    "file's header?",
                )
            yield line, block
            found += lines
        if found < self.instances:
            fail(
                self.path,
                found + 2,
                f"the file ends after {found:,} instances, where the header says "
                f"{self.instances:,}: is it complete?",
            )

    def _numbers(self, header: bytes, fields: str) -> list[int]:
        tokens = header.split()
        if len(tokens) != len(fields.split()) or not all(map(_is_count, tokens)):
            fail(self.path, 1, f"expected the header {fields!r}, found {shown(header)}")
        return [int(token) for token in tokens]


def _is_count(token: bytes) -> bool:
    return token.isdigit() and len(token) <= _MOST_DIGITS


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
        for number, raw in enumerate(single_lines(block), line):
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

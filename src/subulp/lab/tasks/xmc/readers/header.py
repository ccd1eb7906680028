"""The first line of a sparse file, which says how much follows: read, and held to its word."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ....data.lines import fail, shown, whole_lines
from .labels import MAX_LABELS

_MOST_DIGITS = 18  # Of an int64, whatever its digits.


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

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines after the header, and the number of the first of them.

        Raises:
            ValueError: There are more or fewer lines than the header says.
        """
        found = 0
        rest = [(2, self._rest)] if self._rest else []
        for line, block in chain(rest, self._blocks):
            lines = block.count(b"\n") + (not block.endswith(b"\n"))
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
                f"{self.instances:,}: is it whole?",
            )

    def _numbers(self, header: bytes, fields: str) -> list[int]:
        tokens = header.split()
        if len(tokens) != len(fields.split()) or not all(map(_is_count, tokens)):
            fail(self.path, 1, f"expected the header {fields!r}, found {shown(header)}")
        return [int(token) for token in tokens]


def _is_count(token: bytes) -> bool:
    return token.isdigit() and len(token) <= _MOST_DIGITS

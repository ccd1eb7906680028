"""Tables as rows of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A text, and a smaller one beneath it."""

    text: str
    below: str = ""


@dataclass(frozen=True)
class Table:
    """Columns after the first one hold numbers; the first one names the row.

    Attributes:
        caption: What it shows, for those who do not see it.
        columns: Headings, that of the rows' names first.
        rows: Name, key in figures or nothing, and cells.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, str, Sequence[Cell]]]

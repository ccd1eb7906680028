"""One line of a file of examples: the definition of what it may be, and the wording of its errors.

:mod:`.parse_block` parses whole blocks of lines to the same values.
"""

from __future__ import annotations

import bisect
import csv
import math
import re
import zlib
from collections.abc import Sequence

import numpy as np

from ....data.lines import shown
from .layout import Layout, Transform

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]{1,8}")

MISSING = -1
"""The bucket of a missing number."""


def parse_line(layout: Layout, raw: bytes) -> tuple[float, list[float], list[int]]:
    """Label, transformed numbers (NaN where missing), and keys of a line without its end.

    Raises:
        ValueError: The line is not as the layout says.
    """
    fields = split_line(layout.separator, layout.quote, raw)
    if len(fields) != len(layout.columns):
        raise ValueError(f"{len(fields)} fields: {expected(layout)}")
    values = dict(zip(layout.columns, fields, strict=True))
    label = layout.negative[0] if layout.label is None else values[layout.label]
    if label not in layout.positive and label not in layout.negative:
        known = " or ".join(repr(v) for v in (layout.negative[0], layout.positive[0]))
        raise ValueError(f"label {layout.label} is {_quoted(label)}: expected {known}")
    numbers = [
        transform(number(layout, n.column, values[n.column]), n.transform) for n in layout.numbers
    ]
    names = {
        column: category(layout, column, values[column]) for column in sorted(layout.categories)
    }
    if layout.hexadecimal:
        keys = [int(names[table.columns[0]] or "0", 16) for table in layout.tables]
    else:
        keys = [key(table.columns, [names[c] for c in table.columns]) for table in layout.tables]
    return float(label in layout.positive), numbers, keys


def split_line(separator: str, quote: str, raw: bytes) -> list[str]:
    """The fields of a line, without the spaces around them."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte {raw[error.start]:#04x}; convert the file to UTF-8"
        ) from None
    if not quote:
        return [part.strip(" ") for part in text.split(separator)]
    try:
        reader = csv.reader([text], delimiter=separator, quotechar=quote, strict=True)
        return [part.strip(" ") for part in next(reader, [""])]
    except csv.Error as error:
        raise ValueError(f"{error}: a quoted field must end on its line") from None


def expected(layout: Layout) -> str:
    """How many fields a line must have."""
    separator = {"\t": "tabs", ",": "commas"}.get(layout.separator, repr(layout.separator))
    label = "label, " if "label" in layout.columns else ""
    what = f" ({label}13 numbers, 26 categories)" if layout.hexadecimal else ""
    return f"expected {len(layout.columns)}{what}, separated by {separator}"


def number(layout: Layout, column: str, text: str) -> float:
    """A number; NaN where it is missing.

    Raises:
        ValueError: It is no finite number.
    """
    if text in ("", layout.missing):
        return math.nan
    value = float(text) if _NUMBER.fullmatch(text) else math.inf
    if not math.isfinite(value):
        raise ValueError(f"column {column} is {_quoted(text)}: expected a number or nothing")
    return value


def transform(value: float, how: Transform) -> float:
    """A number as the model sees it: float32, NaN where missing."""
    if how == "log" and not math.isnan(value):
        value = float(np.log1p(max(value, 0.0)))
    # Beyond FP32's range a model sees the largest number.
    largest = float(np.finfo(np.float32).max)
    return float(np.float32(value if math.isnan(value) else min(max(value, -largest), largest)))


def category(layout: Layout, column: str, text: str) -> str:
    """A category; of a number with buckets, that of its bucket.

    Raises:
        ValueError: It is not hexadecimal, or no number, where it must be.
    """
    if layout.hexadecimal and text and not _HEXADECIMAL.fullmatch(text):
        raise ValueError(
            f"column {column} is {_quoted(text)}: expected at most 8 hexadecimal digits or nothing"
        )
    if column not in layout.buckets:
        return text
    value = number(layout, column, text)
    return str(MISSING if math.isnan(value) else bisect.bisect(layout.buckets[column], value))


def key(columns: Sequence[str], values: Sequence[str]) -> int:
    """The 32-bit hash of a category: CRC-32 of ``column=value|column=value`` in UTF-8."""
    text = "|".join(f"{c}={v}" for c, v in zip(columns, values, strict=True))
    return zlib.crc32(text.encode())


def _quoted(text: str) -> str:
    return shown(text.encode())

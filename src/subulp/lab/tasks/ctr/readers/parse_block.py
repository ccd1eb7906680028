"""Blocks of lines as arrays: :func:`.parse_line.parse_line` for many lines at once.

Blocks are parsed by pyarrow. Whatever it refuses, and whatever it may read otherwise than the
definition, goes line by line through the definition, which words the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ....data.lines import count_lines
from .examples import Examples, Keys
from .layout import Layout, Table, Transform
from .parse_line import MISSING, key, parse_line

OnBadLine = Callable[[int, str], None]
"""Told the index of a bad line in its block, from 0, and what is wrong with it."""

_FLOAT32 = np.finfo(np.float32)


def parse_block(layout: Layout, block: bytes, on_bad_line: OnBadLine) -> Examples:
    """The examples of whole lines; empty lines are none.

    Args:
        layout: What the lines hold.
        block: Lines with their ends, the last one's may be missing.
        on_bad_line: Called for every bad line, which is skipped if the call returns.
    """
    block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
    if b"\r" not in block:
        try:
            return _parse_arrays(layout, block)
        except (pa.ArrowException, _UnclearError):
            pass
    return _parse_lines(layout, block, on_bad_line)


class _UnclearError(Exception):
    """Only the definition can tell what a block means."""


def _parse_lines(layout: Layout, block: bytes, on_bad_line: OnBadLine) -> Examples:
    parsed = []
    for index, raw in _lines(block):
        try:
            parsed.append(parse_line(layout, raw))
        except ValueError as error:
            on_bad_line(index, str(error))
    count = len(parsed)
    return Examples(
        np.array([p[0] for p in parsed], np.float32),
        np.array([p[1] for p in parsed], np.float32).reshape(count, len(layout.numbers)),
        np.array([p[2] for p in parsed], np.uint32).reshape(count, len(layout.tables)),
    )


def _lines(block: bytes) -> Iterator[tuple[int, bytes]]:
    for index, raw in enumerate(block.split(b"\n")):
        if raw.strip(b" "):
            yield index, raw


def _parse_arrays(layout: Layout, block: bytes) -> Examples:
    lines = _count(block)
    if not lines:
        return _parse_lines(layout, b"", lambda *_: None)
    numeric = {n.column for n in layout.numbers} | set(layout.buckets)
    label = set() if layout.label is None else {layout.label}
    text = (label | layout.categories) - set(layout.buckets)
    table = csv.read_csv(
        pa.BufferReader(block),
        csv.ReadOptions(
            use_threads=False, block_size=max(len(block), 1), column_names=layout.columns
        ),
        csv.ParseOptions(
            delimiter=layout.separator,
            quote_char=layout.quote or False,
            double_quote=bool(layout.quote),
        ),
        csv.ConvertOptions(
            column_types={
                **dict.fromkeys(layout.columns, pa.string()),
                **dict.fromkeys(numeric - text, pa.float64()),
            },
            include_columns=sorted(numeric | text),
            null_values=["", layout.missing],
            strings_can_be_null=False,
        ),
    )
    if len(table) != lines:
        raise _UnclearError
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    texts = {name: columns[name] for name in text}
    if not layout.hexadecimal:
        texts = {name: pc.utf8_trim(column, " ") for name, column in texts.items()}
    values = {name: _numbers(layout, (columns | texts)[name]) for name in numeric}
    return Examples(
        np.zeros(lines, np.float32)
        if layout.label is None
        else _labels(layout, texts[layout.label]),
        np.stack([_transform(values[n.column], n.transform) for n in layout.numbers], 1),
        _keys(layout, texts, values),
    )


def _count(block: bytes) -> int:
    """Lines that are not empty; pyarrow takes a line of spaces for one."""
    if not block or block.startswith(b"\n") or b"\n\n" in block:
        return sum(1 for _ in _lines(block))
    return count_lines(block)


def _numbers(layout: Layout, column: Any) -> npt.NDArray[np.float64]:
    if column.type == pa.string():
        empty = pc.is_in(column, pa.array(["", layout.missing]))
        column = pc.if_else(empty, None, column).cast(pa.float64())
    values: npt.NDArray[np.float64] = column.to_numpy(zero_copy_only=False)
    if not np.isfinite(values[column.is_valid().to_numpy(zero_copy_only=False)]).all():
        raise _UnclearError
    return values


def _transform(values: npt.NDArray[np.float64], how: Transform) -> npt.NDArray[np.float32]:
    if how == "log":
        values = np.log1p(np.maximum(values, 0.0))
    narrow: npt.NDArray[np.float32] = values.clip(_FLOAT32.min, _FLOAT32.max).astype(np.float32)
    return narrow


def _labels(layout: Layout, column: Any) -> npt.NDArray[np.float32]:
    found = column.dictionary_encode()
    meaning = dict.fromkeys(layout.negative, 0.0) | dict.fromkeys(layout.positive, 1.0)
    try:
        values = [meaning[name] for name in found.dictionary.to_pylist()]
    except KeyError:
        raise _UnclearError from None
    labels: npt.NDArray[np.float32] = np.array(values, np.float32)[found.indices.to_numpy()]
    return labels


def _keys(
    layout: Layout, texts: dict[str, Any], values: dict[str, npt.NDArray[np.float64]]
) -> Keys:
    if layout.hexadecimal:
        return np.stack([_hexadecimal(texts[t.columns[0]]) for t in layout.tables], 1)
    found = {}
    for column in layout.categories:
        if column in layout.buckets:
            bounds = layout.buckets[column]
            codes = np.searchsorted(bounds, values[column], side="right")
            codes = np.where(np.isnan(values[column]), len(bounds) + 1, codes)
            names = [*map(str, range(len(bounds) + 1)), str(MISSING)]
        else:
            encoded = texts[column].dictionary_encode()
            names = encoded.dictionary.to_pylist()
            codes = encoded.indices.to_numpy(zero_copy_only=False)
        found[column] = (codes.astype(np.int64), names)
    return np.stack([_crossed(table, found) for table in layout.tables], 1)


def _crossed(table: Table, found: dict[str, tuple[npt.NDArray[np.int64], list[str]]]) -> Keys:
    """Keys of a table: every combination of categories that there is is hashed once."""
    first, *others = table.columns
    codes = found[first][0]
    combinations = [[name] for name in found[first][1]]
    for column in others:
        extra, names = found[column]
        used, codes = np.unique(codes * len(names) + extra, return_inverse=True)
        combinations = [
            [*combinations[code // len(names)], names[code % len(names)]] for code in used.tolist()
        ]
    return np.array([key(table.columns, values) for values in combinations], np.uint32)[codes]


_DIGITS = np.full(256, 255, np.uint8)
for _value, _digit in enumerate("0123456789abcdef"):
    _DIGITS[[ord(_digit), ord(_digit.upper())]] = _value


def _hexadecimal(column: Any) -> Keys:
    """At most 8 hexadecimal digits as a number."""
    padded = pc.utf8_lpad(column, 8, "0")
    if pc.max(pc.binary_length(padded)).as_py() != 8:
        raise _UnclearError
    offset, characters = padded.offset, padded.buffers()[2]
    raw = np.frombuffer(characters, np.uint8)[8 * offset : 8 * (offset + len(padded))]
    digits = _DIGITS[raw].reshape(-1, 4, 2)
    if digits.max() > 15:
        raise _UnclearError
    pairs = digits[:, :, 0] << 4 | digits[:, :, 1]
    return pairs.reshape(-1, 4).copy().view(">u4").ravel().astype(np.uint32)

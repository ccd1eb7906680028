"""Lines of ``number:value`` pairs, and of label lists: one meaning, two speeds.

:func:`pairs_of_line` and :func:`labels_of_line` say what a line means and what is wrong with it.
Blocks that hold nothing but plain numbers are parsed as arrays, several times faster; every other
block goes line by line, so that errors have one place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....data.lines import Int64s, fail, shown, single_lines
from .labels import Int32s, sorted_rows

Floats = NDArray[np.float64]

_MOST_DIGITS = 10  # A number below 2**32 has no more; more would overflow the fast path's integers.
_LARGEST = float(np.finfo(np.float32).max)
_ONE = re.compile(rb":1\.0+(?=[ \n]|$)")
_VALUE = re.compile(rb":([^ \n]+)")
_PLAIN_LIST = b"0123456789,\n"
_PLAIN_PAIRS = b"0123456789.eE+-: \n"


class Rows(NamedTuple):
    """Pairs of a block of lines.

    Attributes:
        counts: Pairs of each line, int64 ``(lines,)``.
        numbers: What stands before the colons, int64 ``(pairs,)``.
        values: What stands behind them, ``(pairs,)``.
    """

    counts: Int64s
    numbers: Int64s
    values: Floats


def label_rows(path: Path, line: int, block: bytes, num_labels: int) -> tuple[Int64s, Int32s]:
    """Lines ``label:1 label:1``.

    A value above 0 makes the label one of the instance's, 0 leaves it out.

    Args:
        path: The file, for messages.
        line: Number of the first line.
        block: Whole lines.
        num_labels: What every label is below.

    Returns:
        How many labels each line has, ``(lines,)``, and the labels, ascending and different within
        a line.

    Raises:
        ValueError: A line is malformed or a label out of range; the message begins with
            ``file:line``.
    """
    rows = pair_rows(path, line, block, num_labels, "label")
    if (rows.values < 0).any():
        _fail_at(path, line, rows, rows.values < 0, "a negative value; give label:1")
    present = rows.values > 0
    if present.all():
        return sorted_rows(rows.counts, rows.numbers)
    numbers = np.repeat(np.arange(len(rows.counts)), rows.counts)[present]
    counts = np.bincount(numbers, minlength=len(rows.counts))
    return sorted_rows(counts, rows.numbers[present])


def pair_rows(path: Path, line: int, block: bytes, bound: int, what: str) -> Rows:
    """Lines ``number:value number:value``, in the order in which they stand.

    Args:
        path: The file, for messages.
        line: Number of the first line.
        block: Whole lines.
        bound: What every number is below.
        what: What the numbers are called in messages.

    Raises:
        ValueError: A line is malformed or a number out of range; the message begins with
            ``file:line``.
    """
    block = block.replace(b"\r\n", b"\n")
    rows = _plain_pairs(block)
    if rows is not None and _fits(rows, bound):
        return rows
    return _line_by_line(path, line, block, lambda raw: pairs_of_line(raw, bound, what))


def _fits(rows: Rows, bound: int) -> bool:
    return bool((rows.numbers < bound).all() and (np.abs(rows.values) <= _LARGEST).all())


def list_rows(path: Path, line: int, block: bytes, num_labels: int) -> tuple[Int64s, Int32s]:
    """Lines ``label,label``; as :func:`label_rows`."""
    counts_numbers = _plain_lists(block)
    if counts_numbers is None or not (counts_numbers[1] < num_labels).all():
        rows = _line_by_line(
            path, line, block, lambda raw: [(n, 1.0) for n in labels_of_line(raw, num_labels)]
        )
        counts_numbers = rows.counts, rows.numbers
    return sorted_rows(*counts_numbers)


def pairs_of_line(raw: bytes, bound: int, what: str) -> list[tuple[int, float]]:
    """What one line of pairs means.

    Raises:
        ValueError: The line is malformed; the message says how.
    """
    return [_pair(token, bound, what) for token in raw.split()]


def labels_of_line(raw: bytes, num_labels: int) -> list[int]:
    """What one list of labels means.

    Raises:
        ValueError: The list is malformed; the message says how.
    """
    raw = raw.strip()
    if not raw:
        return []
    return [_number(token.strip(), num_labels, "label") for token in raw.split(b",")]


def _pair(token: bytes, bound: int, what: str) -> tuple[int, float]:
    number, colon, value = token.partition(b":")
    if not colon:
        raise ValueError(f"expected {what}:value, found {shown(token)}")
    return _number(number, bound, what), _value(value)


def _number(token: bytes, bound: int, what: str) -> int:
    if not token.isdigit():
        raise ValueError(f"expected a {what} from 0 to {bound - 1}, found {shown(token)}")
    # Thousands of digits are not made into a number only to be refused.
    digits = token.lstrip(b"0")
    if len(digits) > len(str(bound)) or int(digits or b"0") >= bound:
        raise ValueError(f"{what} {shown(token)} is out of range: expected 0 to {bound - 1}")
    return int(digits or b"0")


def _value(token: bytes) -> float:
    try:
        # float() takes "nan", "inf" and "1_000" too.
        value = math.nan if token.strip(b"0123456789.eE+-") else float(token)
    except ValueError:
        value = math.nan
    if not abs(value) <= _LARGEST:
        raise ValueError(f"expected a number of FP32's range after the colon, found {shown(token)}")
    return value


def _line_by_line(
    path: Path, line: int, block: bytes, parse: Callable[[bytes], list[tuple[int, float]]]
) -> Rows:
    counts: list[int] = []
    pairs: list[tuple[int, float]] = []
    for number, raw in enumerate(single_lines(block), line):
        try:
            found = parse(raw)
        except ValueError as error:
            fail(path, number, str(error))
        counts.append(len(found))
        pairs += found
    return Rows(
        np.array(counts, np.int64),
        np.array([number for number, _ in pairs], np.int64),
        np.array([value for _, value in pairs], np.float64),
    )


def _fail_at(path: Path, line: int, rows: Rows, wrong: NDArray[np.bool_], message: str) -> None:
    pair = int(np.argmax(wrong))
    row = int(np.searchsorted(np.cumsum(rows.counts), pair, side="right"))
    fail(path, line + row, f"label {rows.numbers[pair]} has {message}")


def _plain_pairs(block: bytes) -> Rows | None:
    """The pairs of a block, or None if any line needs a closer look."""
    if block.translate(None, _PLAIN_PAIRS):
        return None
    if b"." in block:
        block = _ONE.sub(b":1", block)
    characters = np.frombuffer(block, np.uint8)
    starts, ends, counts = _tokens(characters, b" ")
    colons = np.flatnonzero(characters == ord(":"))
    if len(colons) != len(starts) or not ((starts < colons) & (colons + 1 < ends)).all():
        return None
    numbers = _integers(characters, starts, colons)
    if numbers is None:
        return None
    if ((ends - colons == 2) & (characters[colons + 1] == ord("1"))).all():
        return Rows(counts, numbers, np.ones(len(numbers)))
    try:
        return Rows(counts, numbers, np.array([float(v) for v in _VALUE.findall(block)]))
    except ValueError:
        return None


def _plain_lists(block: bytes) -> tuple[Int64s, Int64s] | None:
    """The labels of a block of lists, or None if any line needs a closer look."""
    if block.translate(None, _PLAIN_LIST):
        return None
    characters = np.frombuffer(block, np.uint8)
    starts, ends, counts = _tokens(characters, b",")
    # One comma less than labels on every line that has labels: none is empty.
    if np.count_nonzero(characters == ord(",")) != np.maximum(counts - 1, 0).sum():
        return None
    numbers = _integers(characters, starts, ends)
    return None if numbers is None else (counts, numbers)


def _tokens(characters: NDArray[np.uint8], separator: bytes) -> tuple[Int64s, Int64s, Int64s]:
    """Begin and end of each token, and the number of tokens of each line."""
    newlines = characters == ord("\n")
    inside = np.concatenate([[False], ~(newlines | (characters == ord(separator))), [False]])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[0::2], edges[1::2]
    line_ends = np.flatnonzero(newlines)
    if not len(line_ends) or line_ends[-1] != len(characters) - 1:
        line_ends = np.append(line_ends, len(characters))
    before = np.searchsorted(starts, line_ends)
    return starts, ends, np.diff(before, prepend=0)


def _integers(characters: NDArray[np.uint8], starts: Int64s, ends: Int64s) -> Int64s | None:
    """The tokens as numbers, or None if one is too long or not all digits."""
    widths = ends - starts
    longest = int(widths.max(initial=0))
    if longest > _MOST_DIGITS:
        return None
    numbers = np.zeros(len(starts), np.int64)
    for place in range(longest):
        inside = place < widths
        digits = characters[np.where(inside, starts + place, 0)].astype(np.int64) - ord("0")
        if (inside & ((digits < 0) | (digits > 9))).any():
            return None
        numbers = np.where(inside, 10 * numbers + digits, numbers)
    return numbers

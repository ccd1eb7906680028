"""The JSON form: an object a line, with a title, a content, and the labels of an instance."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ....data.lines import Indices, TextLines, fail, shown, single_lines, whole_lines
from .labels import LabelMatrix, sorted_rows

_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonTexts:
    """Title and content of each line, parted by a space, read when they are asked for.

    Args:
        lines: A file of JSON objects, all checked.
    """

    def __init__(self, lines: TextLines) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def digest(self) -> str:
        """Digest of the file."""
        return self._lines.digest

    def __iter__(self) -> Iterator[str]:
        return (_text_of(json.loads(line)) for line in self._lines)

    def read(self, indices: Indices) -> list[str]:
        """The texts of the instances ``indices``."""
        return [_text_of(json.loads(line)) for line in self._lines.read(indices)]


def read_json_texts(path: Path, cache: Path | None = None) -> JsonTexts:
    """A file of objects with ``title`` and ``content``, either of which may be missing.

    Args:
        path: The file, plain or ``.gz``.
        cache: As in :class:`TextLines` (default: ``None``).

    Raises:
        ValueError: The file is malformed; the message begins with ``file:line``.
    """
    for _ in _records(path):
        pass
    return JsonTexts(TextLines(path, cache))


def read_json_part(
    path: Path, num_labels: int, cache: Path | None = None
) -> tuple[JsonTexts, LabelMatrix]:
    """The same, and the labels ``target_ind``; ``target_rel``, where given, must be as long.

    A relevance above 0 makes the label one of the instance's, 0 leaves it out.

    Raises:
        ValueError: The file is malformed; the message begins with ``file:line``.
    """
    counts, indices = array("q"), array("q")
    for line, record in _records(path):
        try:
            labels = _labels(record, num_labels)
        except ValueError as error:
            fail(path, line, str(error))
        counts.append(len(labels))
        indices.extend(labels)
    found, ordered = sorted_rows(np.array(counts, np.int64), np.array(indices, np.int64))
    matrix = LabelMatrix.from_sorted(found, ordered, num_labels)
    return JsonTexts(TextLines(path, cache)), matrix


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, block in whole_lines(path):
        for number, raw in enumerate(single_lines(block), line):
            yield number, _record(path, number, raw)


def _record(path: Path, line: int, raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"))
    # A line of ten thousand brackets is nested deeper than Python calls itself.
    except (ValueError, RecursionError) as error:
        fail(path, line, f"expected a JSON object, found {shown(raw)} ({error})")
    if not isinstance(record, dict):
        fail(path, line, f"expected a JSON object, found {shown(raw)}")
    for name in ("title", "content"):
        if not isinstance(record.get(name, ""), str):
            fail(path, line, f"expected text as {name!r}, found {_shown(record[name])}")
    return record


def _text_of(record: dict[str, Any]) -> str:
    parts = (record.get("title", ""), record.get("content", ""))
    # JSON can escape half a character, which no encoder of text accepts.
    return _SURROGATE.sub("\ufffd", " ".join(part for part in parts if part))


def _labels(record: dict[str, Any], num_labels: int) -> list[int]:
    labels = record.get("target_ind")
    if not isinstance(labels, list):
        raise ValueError(f"expected a list of labels as 'target_ind', found {_shown(labels)}")
    for label in labels:
        # True is an int.
        if type(label) is not int or not 0 <= label < num_labels:
            raise ValueError(f"expected a label from 0 to {num_labels - 1}, found {_shown(label)}")
    return _relevant(labels, record.get("target_rel"))


def _relevant(labels: list[int], relevances: Any) -> list[int]:
    if relevances is None:
        return labels
    if not isinstance(relevances, list) or len(relevances) != len(labels):
        raise ValueError(
            f"expected {len(labels)} numbers as 'target_rel', one a label, found "
            f"{_shown(relevances)}"
        )
    for relevance in relevances:
        if type(relevance) not in (int, float) or not relevance >= 0:
            raise ValueError(f"expected a relevance of at least 0, found {_shown(relevance)}")
    return [label for label, relevance in zip(labels, relevances, strict=True) if relevance]


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return shown(json.dumps(value).encode())

"""JSON objects from files that anybody may have written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

LARGEST_FILE = 1 << 26
"""Bytes of a file that is read as one object."""

_DEEPEST = 64


def read_object(path: Path, largest: int = LARGEST_FILE) -> dict[str, Any]:
    """The object that a file consists of.

    Args:
        path: A file of UTF-8.
        largest: Bytes that it may have (default: 64 MiB).

    Raises:
        OSError: The file cannot be read.
        ValueError: It is too large or not a JSON object, with the file's name and the line.
    """
    with path.open("rb") as file:
        text = file.read(largest + 1)
    if len(text) > largest:
        raise ValueError(f"{path}: above {largest:,} bytes: expected one JSON object")
    return parse_object(text, path)


def parse_object(text: bytes, path: Path, line: int = 1) -> dict[str, Any]:
    """The object that a text is, without ``NaN`` and ``Infinity``, which are not JSON.

    Args:
        text: UTF-8.
        path: The file that it is from, for messages.
        line: Of the file, where the text begins (default: 1).

    Raises:
        ValueError: The text is not a JSON object, with the file's name and the line.
    """
    try:
        found = json.loads(text.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        at = line + text.count(b"\n", 0, error.start)
        raise ValueError(f"{path}:{at}: expected JSON in UTF-8, got other bytes") from None
    except json.JSONDecodeError as error:
        at = line - 1 + error.lineno
        raise ValueError(f"{path}:{at}: expected a JSON object: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{path}:{line}: expected a JSON object, got one too deep") from None
    except ValueError as error:
        # A constant that is refused, or a number with too many digits.
        raise ValueError(f"{path}:{line}: expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}:{line}: expected a JSON object, got {kind_of(found)}")
    if not _is_shallow(found):
        raise ValueError(f"{path}:{line}: expected a JSON object, got one too deep")
    return found


def _is_shallow(value: object) -> bool:
    """Whether nothing is nested so deep that going through it could exhaust the stack."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return True
    return False


def is_number(value: object) -> bool:
    """Whether a JSON value is a number that a float can hold; ``true`` is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def kind_of(value: object) -> str:
    """What a JSON value is, for messages."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    found = (noun for kind, noun in _NOUNS.items() if isinstance(value, kind))
    return next(found, "something else")


_NOUNS = {
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

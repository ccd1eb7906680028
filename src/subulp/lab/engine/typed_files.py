"""JSON and TOML files of unknown origin, checked against types by pydantic.

An error names the file, the line where it is known, the key and what was expected there.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from ..data.regular import BYTE_ORDER_MARK, open_regular

LARGEST_JSON = 1 << 26
"""Bytes of a file that is read as one JSON object."""

LARGEST_TOML = 1 << 20
"""Bytes of a TOML file: naming a data set by mistake fails at once."""

Place = tuple[str | int, ...]
"""Keys and indices that lead to a value, from the outermost on."""

T = TypeVar("T")

_LONGEST_SHOWN = 40
_DAMAGES = (
    *(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, RuntimeError),
)


def read_bytes(path: Path, largest: int, expected: str) -> bytes:
    """All bytes of a file, without a byte-order mark.

    Args:
        path: The file.
        largest: How many it may have.
        expected: What the file should be, for the message.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is too large, or no regular file.
    """
    with open_regular(path) as opened, io.BufferedReader(opened) as file:
        # A buffer of what may be there is made before anything is read.
        raw = file.read(min(largest, os.fstat(opened.fileno()).st_size) + 1)
    if len(raw) > largest:
        raise ValueError(f"{path}: above {largest:,} bytes: expected {expected}")
    return raw.removeprefix(BYTE_ORDER_MARK)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file consists of.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is too large, or not one JSON object in UTF-8.
    """
    return parse_json(read_bytes(path, LARGEST_JSON, "one JSON object"), path)


@contextmanager
def saved_json(path: Path, format: str, what: str, remedy: str) -> Iterator[dict[str, Any]]:
    """The fields of a file, and one error for whatever is wrong with them.

    Args:
        path: The file.
        format: What its field ``format`` must be.
        what: What the file is called in the error.
        remedy: What to do, at the end of the error.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file holds something else: it is no JSON object, names another format, or
            the block raised an error about a field.
    """
    try:
        fields = read_json(path)
        if fields["format"] != format:
            raise ValueError(f"its format is {fields['format']!r}")
        yield fields
    except _DAMAGES as error:
        raise ValueError(
            f"{path} is not {what} as {format!r} writes it ({error}): {remedy}"
        ) from None


def parse_json(raw: bytes, path: Path, line: int = 1) -> dict[str, Any]:
    """The JSON object that a text is; ``NaN`` and ``Infinity`` are not JSON.

    Args:
        raw: The text.
        path: The file that it is from, for messages.
        line: Line of the file where the text begins (default: 1).

    Raises:
        ValueError: The text is not one JSON object in UTF-8; the message begins with ``file:line``.
    """
    if line == 1:
        raw = raw.removeprefix(BYTE_ORDER_MARK)
    try:
        found = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        # A path may hold halves of characters, which Python writes and pydantic does not read.
        if b"\\ud" in raw and (found := _lenient(raw)) is not None:
            return found
        problem, _, place = str(error).partition(" at line ")
        at = line - 1 + int(place.split(" ")[0]) if place else line
        raise ValueError(f"{path}:{at}: expected a JSON object: {problem}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}:{line}: expected a JSON object, got {_shown(found)}")
    return found


def _lenient(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw, parse_constant=_refuse)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parse_toml(raw: bytes, path: Path) -> dict[str, Any]:
    """The contents of a TOML file.

    Raises:
        ValueError: The bytes are not TOML; the message begins with ``file:line``.
    """
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: expected TOML in UTF-8, got other bytes") from None
    except RecursionError:
        raise ValueError(f"{path}:1: expected TOML, got values nested too deep") from None
    except ValueError as error:
        at = re.search(r"\(at line (\d+)", str(error))
        line = int(at[1]) if at else raw.count(b"\n") + 1
        raise ValueError(f"{path}:{line}: expected TOML: {error}") from None


def checked(
    adapter: TypeAdapter[T],
    value: object,
    where: Callable[[Place], str],
    *,
    known: Iterable[str] = (),
    inside: Place = (),
) -> T:
    """A value that a file has, as a type has it: an integer is no text, and ``true`` no number.

    Args:
        adapter: The type.
        value: Plain JSON, or what TOML has.
        where: Where in which file a place is, for the message.
        known: Names that an unknown key may have been meant to be (default: none).
        inside: Where in the file the value is (default: at the top).

    Raises:
        ValueError: The value is something else; the message names place, key and what was expected.
    """
    try:
        # As JSON, where an array may become a tuple and a text a path, and nothing else.
        text = json.dumps(value, default=_refuse, ensure_ascii=False).encode("utf-8", "replace")
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = (*inside, *first["loc"])
        raise ValueError(f"{where(place)}: {_problem(first, place, known)}") from None
    except TypeError as error:
        raise ValueError(f"{where(inside)}: {error}") from None


def _refuse(value: object) -> object:
    raise TypeError(
        f"expected a text, a number, true or false, got the {type(value).__name__} {value}"
    )


def _problem(error: Any, place: Place, known: Iterable[str]) -> str:
    key = place_text(place)
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key {key}{did_you_mean(str(place[-1]), known)}"
        case "missing":
            return f"{key} is missing"
    expected = re.sub("^(Input should be|Value error,) ", "to be ", error["msg"])
    expected = re.sub(r"^\w+ should", "to", expected)
    return f"expected {key} {expected}, got {_shown(error['input'])}"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def place_text(place: Place) -> str:
    """A place in words: ``runs[0].seed``."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return text.removeprefix(".") or "it"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``": did you mean ...?"`` with the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, sorted(set(known) - {name}), n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ""

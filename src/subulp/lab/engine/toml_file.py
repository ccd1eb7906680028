"""TOML files that people write: what is wrong in one is told with its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_FILE = 1 << 20
"""Bytes of a file that is read: whoever names a data set by mistake is told at once."""

Place = tuple[str | int, ...]
"""Names of tables and keys from the outermost on; after that of an array of tables, the number of
one of them, from 0."""

# What the last line of a value of several lines has.
_MAY_END = re.compile(r"[\]}]|\"\"\"|'''")


def read_bytes(path: Path, what: str) -> bytes:
    """All bytes of a file.

    Args:
        path: The file.
        what: It is expected to be, for the message.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is too large.
    """
    with path.open("rb") as file:
        raw = file.read(LARGEST_FILE + 1)
    if len(raw) > LARGEST_FILE:
        raise ValueError(f"{path}: above {LARGEST_FILE:,} bytes: expected {what}")
    return raw


def parse_toml(raw: bytes, path: Path) -> dict[str, Any]:
    """What the bytes of a file say.

    Raises:
        ValueError: They are no TOML; the message begins with ``file:line``.
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


def lines_of(text: str) -> dict[Place, int]:
    """The lines, from 1, on which the tables and keys of a document stand.

    What an inline table has stands where the table's key does.

    Args:
        text: TOML without errors.
    """
    found: dict[Place, int] = {}
    sizes: dict[Place, int] = {}
    table: Place = ()
    for line, is_header, parsed in _statements(text):
        if is_header:
            table = _header(parsed, sizes)
            places = [table[:depth] for depth in range(1, len(table) + 1)]
        else:
            places = [(*table, *place) for place in _places(parsed)]
        for place in places:
            found.setdefault(place, line)
    return found


def _statements(text: str) -> Iterator[tuple[int, bool, dict[str, Any]]]:
    """The headers and keys with their values: the first line, whether it is a header, and what it
    says.

    Each is a document of its own, which a part of one is not: so they can be told from lines inside
    a value that look like them.
    """
    first, lines = 1, list[str]()
    for number, line in enumerate(text.split("\n"), 1):
        first = first if lines else number
        lines.append(f"{line}\n")
        # Parsed after each of its lines, a long value would take a time that grows as its square.
        if len(lines) > 1 and not _MAY_END.search(line):
            continue
        try:
            parsed = tomllib.loads("".join(lines))
        except (ValueError, RecursionError):
            continue
        if parsed:
            yield first, lines[0].lstrip().startswith("["), parsed
        lines.clear()


def _header(parsed: Any, sizes: dict[Place, int]) -> Place:
    """The place of a ``[table]``, or of the next one of ``[[tables]]``, which it counts."""
    place: Place = ()
    while parsed:
        [(name, parsed)] = parsed.items()
        place = (*place, name)
        if isinstance(parsed, list):
            number = sizes.get(place, 0)
            sizes[place] = number + 1
            return (*place, number)
        # A table inside the latest one of these.
        if place in sizes:
            place = (*place, sizes[place] - 1)
    return place


def _places(value: Any) -> Iterator[Place]:
    """Of all tables and keys inside a value."""
    if not isinstance(value, dict | list):
        return
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, list) and not isinstance(inner, dict):
            continue
        yield (name,)
        for place in _places(inner):
            yield (name, *place)

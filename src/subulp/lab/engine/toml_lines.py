"""The lines of the keys in a TOML file, which no TOML library for Python reports."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from .typed_files import Place

# What the last line of a value of several lines has.
_MAY_END = re.compile(r"[\]}]|\"\"\"|'''")


def lines_of(text: str) -> dict[Place, int]:
    """The line of each table and key of a document, from 1; keys of an inline table have its line.

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
    """Headers, and keys with their values: the first line, whether it is a header, and its content.

    Each is a TOML document by itself, and no part of one is: this tells them from lines inside a
    value that look like them.
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
    """The places of all tables and keys inside a value."""
    if not isinstance(value, dict | list):
        return
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, list) and not isinstance(inner, dict):
            continue
        yield (name,)
        for place in _places(inner):
            yield (name, *place)


def line_of(lines: dict[Place, int], place: Place) -> int:
    """The line of a place, or of the innermost table around it that has one.

    A single ``[table]`` may stand where an array of tables is expected: then it has no number.
    """
    while place:
        for found in (place, tuple(key for key in place if isinstance(key, str))):
            if found in lines:
                return lines[found]
        place = place[:-1]
    return 1

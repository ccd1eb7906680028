"""The description of a table of one's own: a TOML file that says what its columns are.

::

    separator = ","                     # default
    header = true                       # default; without a header, columns = ["...", ...]
    quote = '"'                         # default; "" for none
    missing = "?"                       # what a missing number is written as, besides nothing

    [label]
    column = "clicked"
    positive = ["1"]                    # default: "1", "1.0"
    negative = ["0"]                    # default: "0", "0.0"

    [[numeric]]
    columns = ["price", "age"]
    transform = "log"                   # default: log(1 + max(x, 0)); or "none"
    standardise = true                  # default: false

    [[categorical]]                     # a table for each column
    columns = ["shop", "country"]
    rows = 10000

    [[cross]]                           # one table for all columns together
    columns = ["shop", "age"]
    rows = 100000
    storage = "int8"                    # this table's precision, whatever the run's is

    [buckets]                           # as a category, a number is its bucket
    age = [18, 25, 35, 50, 65]
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from .layout import Layout, Number, Table, Transform, check_name

_STRINGS, _NUMBERS = "a list of strings", "a list of numbers"
_TOP = {
    "separator": "one ASCII character",
    "header": "true or false",
    "columns": _STRINGS,
    "quote": "at most one ASCII character",
    "missing": "a string",
    "label": "a table",
    "numeric": "tables",
    "categorical": "tables",
    "cross": "tables",
    "buckets": "a table",
}
_LABEL = {"column": "a string", "positive": _STRINGS, "negative": _STRINGS}
_NUMERIC = {"columns": _STRINGS, "transform": "a string", "standardise": "true or false"}
_TABLE = {"columns": _STRINGS, "rows": "an integer", "storage": "a string"}


def read_description(path: Path) -> dict[str, Any]:
    """The contents of a description.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not TOML, or names what is unknown, or a value is of another kind.
    """
    try:
        description = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"columns={path} is not there: give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    try:
        _check("", description, _TOP)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return description


def has_header(description: dict[str, Any]) -> bool:
    """Whether the first line of a file names its columns."""
    return bool(description.get("header", True))


def make_layout(path: Path, description: dict[str, Any], header: Sequence[str] | None) -> Layout:
    """The layout that a description means.

    Args:
        path: Of the description, for messages.
        description: Its contents.
        header: The first line of the file; ``None`` for a file without.

    Raises:
        ValueError: A key or a column is unknown, or a value is not what it must be.
    """
    try:
        return _layout(description, header)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _layout(description: dict[str, Any], header: Sequence[str] | None) -> Layout:
    label = description.get("label", {})
    _check("label.", label, _LABEL)
    if "column" not in label:
        raise ValueError("label.column is missing: name the column to predict")
    columns = description.get("columns", header)
    if columns is None:
        raise ValueError("columns is missing: a file without a header needs the names here")
    if header is not None and list(columns) != list(header):
        raise ValueError(
            f"columns={','.join(columns)}, but the file's header is {','.join(header)}: leave "
            "columns out, or say header = false"
        )
    crosses = [_table(entry) for entry in _entries(description, "cross", _TABLE)]
    singles = [
        _table({**entry, "columns": [column]})
        for entry in _entries(description, "categorical", _TABLE)
        for column in entry["columns"]
    ]
    optional: dict[str, Any] = {
        name: description[name] for name in ("missing", "buckets") if name in description
    } | {name: tuple(label[name]) for name in ("positive", "negative") if name in label}
    for column, bounds in description.get("buckets", {}).items():
        _check_value(f"buckets.{column}", bounds, _NUMBERS)
    return Layout(
        columns=tuple(columns),
        label=label["column"],
        numbers=tuple(_numbers(description)),
        tables=(*singles, *crosses),
        separator=description.get("separator", ","),
        header=header is not None,
        quote=description.get("quote", '"'),
        **optional,
    )


def _numbers(description: dict[str, Any]) -> Iterator[Number]:
    for entry in _entries(description, "numeric", _NUMERIC):
        how = entry.get("transform", "log")
        if how not in get_args(Transform):
            raise ValueError(f"numeric.transform={how!r} is unknown: use 'log' or 'none'")
        for column in entry["columns"]:
            yield Number(column, how, entry.get("standardise", False))


def _table(entry: dict[str, Any]) -> Table:
    if "rows" not in entry:
        raise ValueError(f"the table of {', '.join(entry['columns'])} has no rows: say how many")
    return Table(tuple(entry["columns"]), entry["rows"], entry.get("storage"))


def _entries(
    description: dict[str, Any], name: str, known: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The tables ``[[name]]``; a single ``[name]`` is one of them."""
    found = description.get(name, [])
    for entry in [found] if isinstance(found, dict) else found:
        _check(f"{name}.", entry, known)
        if "columns" not in entry:
            raise ValueError(f"{name}.columns is missing: name at least one column")
        yield entry


def _check(prefix: str, values: dict[str, Any], known: dict[str, str]) -> None:
    for name, value in values.items():
        check_name(prefix.rstrip(".") or "the description", name, known)
        _check_value(f"{prefix}{name}", value, known[name])


def _check_value(name: str, value: Any, kind: str) -> None:
    def items(*types: type) -> bool:
        return isinstance(value, list) and all(
            isinstance(v, types) and not isinstance(v, bool) for v in value
        )

    fits = {
        "a string": isinstance(value, str),
        "one ASCII character": isinstance(value, str) and len(value.encode()) == 1,
        "at most one ASCII character": isinstance(value, str) and len(value.encode()) <= 1,
        "true or false": isinstance(value, bool),
        "an integer": isinstance(value, int) and not isinstance(value, bool),
        "a table": isinstance(value, dict),
        "tables": isinstance(value, dict) or items(dict),
        _STRINGS: items(str),
        _NUMBERS: items(int, float),
    }
    if not fits[kind]:
        raise ValueError(f"{name}={value!r} is not {kind}")

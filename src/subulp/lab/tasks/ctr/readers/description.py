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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ....engine.json_text import is_number
from ....engine.toml_file import Place, lines_of, parse_toml, read_bytes
from .layout import Layout, LayoutError, Number, Precision, Table, Transform, unknown

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


class _WrongError(ValueError):
    """Something in a description is wrong, at a place in it."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class Description:
    """What a file says of the columns of others.

    Attributes:
        path: The file.
        text: All of it.
        values: What it says.
    """

    path: Path
    text: str
    values: dict[str, Any]

    @property
    def has_header(self) -> bool:
        """Whether the first line of a file names its columns."""
        return bool(self.values.get("header", True))

    def error(self, problem: _WrongError) -> ValueError:
        """The same with file and line: of the place, or of what it would be in."""
        lines, place = lines_of(self.text), problem.place
        while place and place not in lines:
            place = place[:-1]
        return ValueError(f"{self.path}:{lines.get(place, 1)}: {problem}")


def read_description(path: Path) -> Description:
    """Read a description.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is not TOML, or names what is unknown, or a value is of another kind; the
            message begins with ``file:line``.
    """
    if not path.is_file():
        what = "is not a file" if path.exists() else "is not there"
        raise FileNotFoundError(f"columns={path} {what}: give a TOML file")
    raw = read_bytes(path, "a description of columns")
    found = Description(path, raw.decode("utf-8", "replace"), parse_toml(raw, path))
    try:
        _check((), found.values, _TOP)
    except _WrongError as problem:
        raise found.error(problem) from None
    return found


def make_layout(description: Description, header: Sequence[str] | None) -> Layout:
    """The layout that a description means.

    Args:
        description: Of a table.
        header: The first line of the file; ``None`` for a file without.

    Raises:
        ValueError: A key or a column is unknown, or a value is not what it must be; the message
            begins with ``file:line``, of the description.
    """
    values = description.values
    try:
        return _layout(values, header)
    except LayoutError as problem:
        place = _place_of(problem, values)
        raise description.error(_WrongError(str(problem), place)) from None
    except _WrongError as problem:
        raise description.error(problem) from None


def _place_of(problem: LayoutError, values: dict[str, Any]) -> Place:
    """Where a description says what a layout finds wrong."""
    match problem.part, problem.column:
        case "label", str():
            return ("label", "column")
        case "buckets", str(column):
            return ("buckets", column)
        case "numeric" | "table" as part, str(column):
            for name in ("numeric",) if part == "numeric" else ("categorical", "cross"):
                for place, entry in _tables(values, name):
                    if column in entry["columns"]:
                        return (*place, "columns")
    return (problem.part,)


def _layout(values: dict[str, Any], header: Sequence[str] | None) -> Layout:
    label = values.get("label", {})
    _check(("label",), label, _LABEL)
    if "column" not in label:
        raise _WrongError("label.column is missing: name the column to predict", ("label",))
    columns = values.get("columns", header)
    if columns is None:
        raise _WrongError(
            "columns is missing: a file without a header needs the names here", ("header",)
        )
    if header is not None and list(columns) != list(header):
        raise _WrongError(
            f"columns={','.join(columns)}, but the file's header is {','.join(header)}: leave "
            "columns out, or say header = false",
            ("columns",),
        )
    crosses = [_table(place, entry) for place, entry in _entries(values, "cross", _TABLE)]
    singles = [
        _table(place, {**entry, "columns": [column]})
        for place, entry in _entries(values, "categorical", _TABLE)
        for column in entry["columns"]
    ]
    optional: dict[str, Any] = {
        name: values[name] for name in ("missing", "buckets") if name in values
    } | {name: tuple(label[name]) for name in ("positive", "negative") if name in label}
    for column, bounds in values.get("buckets", {}).items():
        _check_value(("buckets", column), bounds, _NUMBERS)
    return Layout(
        columns=tuple(columns),
        label=label["column"],
        numbers=tuple(_numbers(values)),
        tables=(*singles, *crosses),
        separator=values.get("separator", ","),
        header=header is not None,
        quote=values.get("quote", '"'),
        **optional,
    )


def _numbers(values: dict[str, Any]) -> Iterator[Number]:
    for place, entry in _entries(values, "numeric", _NUMERIC):
        how = entry.get("transform", "log")
        _check_choice((*place, "transform"), how, get_args(Transform))
        for column in entry["columns"]:
            yield Number(column, how, entry.get("standardise", False))


def _table(place: Place, entry: dict[str, Any]) -> Table:
    if "rows" not in entry:
        named = ", ".join(entry["columns"])
        raise _WrongError(f"the table of {named} has no rows: say how many", place)
    if "storage" in entry:
        _check_choice((*place, "storage"), entry["storage"], get_args(Precision))
    try:
        return Table(tuple(entry["columns"]), entry["rows"], entry.get("storage"))
    except ValueError as error:
        raise _WrongError(str(error), (*place, "rows" if entry["columns"] else "columns")) from None


def _entries(
    values: dict[str, Any], name: str, known: dict[str, str]
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The tables ``[[name]]`` and their places, after a look at their keys."""
    for place, entry in _tables(values, name):
        _check(place, entry, known)
        if "columns" not in entry:
            raise _WrongError(f"{name}.columns is missing: name at least one column", place)
        yield place, entry


def _tables(values: dict[str, Any], name: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The tables ``[[name]]`` and their places; a single ``[name]`` is one of them."""
    found = values.get(name, [])
    if isinstance(found, dict):
        yield (name,), found
    else:
        yield from (((name, number), entry) for number, entry in enumerate(found))


def _check(place: Place, values: dict[str, Any], known: dict[str, str]) -> None:
    for name, value in values.items():
        problem = unknown(_words(place) or "the description", name, known)
        if problem is not None:
            raise _WrongError(problem, (*place, name))
        _check_value((*place, name), value, known[name])


def _check_choice(place: Place, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise _WrongError(f"{_words(place)}={value!r} is unknown: use {', '.join(known)}", place)


def _words(place: Place) -> str:
    return ".".join(name for name in place if isinstance(name, str))


def _check_value(place: Place, value: Any, kind: str) -> None:
    def items(kind: type) -> bool:
        return isinstance(value, list) and all(isinstance(v, kind) for v in value)

    fits = {
        "a string": isinstance(value, str),
        "one ASCII character": isinstance(value, str) and len(value.encode()) == 1,
        "at most one ASCII character": isinstance(value, str) and len(value.encode()) <= 1,
        "true or false": isinstance(value, bool),
        "an integer": isinstance(value, int) and not isinstance(value, bool),
        "a table": isinstance(value, dict),
        "tables": isinstance(value, dict) or items(dict),
        _STRINGS: items(str),
        _NUMBERS: isinstance(value, list) and all(map(is_number, value)),
    }
    if not fits[kind]:
        raise _WrongError(f"{_words(place)}={value!r} is not {kind}", place)

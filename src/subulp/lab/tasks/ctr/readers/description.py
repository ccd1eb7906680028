"""A description of your own table: a TOML file that says what its columns are.

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

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from ....engine.toml_lines import line_of, lines_of
from ....engine.typed_files import LARGEST_TOML, Place, checked, parse_toml, read_bytes
from .layout import Layout, LayoutError, Number, Precision, Table, Transform

_LARGEST = sys.float_info.max


def _ascii(value: str) -> str:
    if len(value.encode()) > 1:
        raise ValueError("one ASCII character")
    return value


def _given(value: str) -> str:
    if not value:
        raise ValueError("one ASCII character")
    return value


def _numbers_of(values: list[Any]) -> list[Any]:
    # As they are written: the digest of a data set covers them, and 1 is not 1.0 there.
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
            raise ValueError("an array of finite numbers")
    return values


_Quote = Annotated[str, AfterValidator(_ascii)]
_Separator = Annotated[_Quote, AfterValidator(_given)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Label(_Part):
    column: str
    positive: tuple[str, ...] | None = None
    negative: tuple[str, ...] | None = None


class _Numeric(_Part):
    columns: tuple[str, ...]
    transform: Transform = "log"
    standardise: bool = False


class _Tables(_Part):
    columns: Annotated[tuple[str, ...], Field(min_length=1)]
    rows: Annotated[int, Field(ge=1, lt=2**31)]
    storage: Precision | None = None


class _Columns(_Part):
    label: _Label
    separator: _Separator = ","
    header: bool = True
    columns: tuple[str, ...] | None = None
    quote: _Quote = '"'
    missing: str | None = None
    numeric: tuple[_Numeric, ...] = ()
    categorical: tuple[_Tables, ...] = ()
    cross: tuple[_Tables, ...] = ()
    buckets: dict[str, Annotated[list[Any], AfterValidator(_numbers_of)]] = {}


_ADAPTER = TypeAdapter(_Columns)
_TABLES = ("numeric", "categorical", "cross")
_KEYS = sorted({key for part in (_Columns, _Label, _Numeric, _Tables) for key in part.model_fields})


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
    values: _Columns

    @property
    def has_header(self) -> bool:
        """Whether the first line of a file names its columns."""
        return self.values.header


def read_description(path: Path) -> Description:
    """Read a description.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is not TOML, or names what is unknown, or a value is of another kind; the
            message begins with ``file:line``.
    """
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"columns={path} {what}: give a TOML file")
    raw = read_bytes(path, LARGEST_TOML, "a description of columns")
    found, text = parse_toml(raw, path), raw.decode("utf-8")
    for name in _TABLES:
        if isinstance(found.get(name), dict):
            found[name] = [found[name]]  # A single [table] is one of them.
    values = checked(_ADAPTER, found, lambda place: _where(path, text, place), known=_KEYS)
    return Description(path, text, values)


def _where(path: Path, text: str, place: Place) -> str:
    return f"{path}:{line_of(lines_of(text), place)}"


def make_layout(
    description: Description, header: Sequence[str] | None, file: Path | None = None
) -> Layout:
    """The layout that a description means.

    Args:
        description: The description of the columns.
        header: The first line of the file; ``None`` for a file without.
        file: The file that has it (default: none).

    Raises:
        ValueError: A column is unknown, or options contradict each other; the message begins with
            ``file:line``, of the description, or of the file whose header is at fault.
    """
    if header is not None and file is not None:
        _check_header(header, file)
    try:
        return _layout(description.values, header)
    except LayoutError as problem:
        place = _place_of(problem, description.values)
        where = _where(description.path, description.text, place)
        raise ValueError(f"{where}: {problem}") from None


def _check_header(header: Sequence[str], file: Path) -> None:
    if not any(header):
        raise ValueError(f"{file} has no header: its first line names the columns")
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise ValueError(f"{file}:1: the header has {twice[0]!r} twice: give each column a name")


def _place_of(problem: LayoutError, values: _Columns) -> Place:
    """Where a description says what a layout finds wrong."""
    match problem.part, problem.column:
        case "label", str():
            return ("label", "column")
        case "buckets", str(column):
            return ("buckets", column)
        case "numeric" | "table" as part, str(column):
            for name in ("numeric",) if part == "numeric" else ("categorical", "cross"):
                for number, entry in enumerate(getattr(values, name)):
                    if column in entry.columns:
                        return (name, number, "columns")
    return (problem.part,)


def _layout(values: _Columns, header: Sequence[str] | None) -> Layout:
    columns = values.columns if values.columns is not None else header
    if columns is None:
        raise LayoutError(
            "columns is missing: a file without a header needs the names here", "header"
        )
    if header is not None and list(columns) != list(header):
        raise LayoutError(
            f"columns={','.join(columns)}, but the file's header is {','.join(header)}: leave "
            "columns out, or say header = false",
            "columns",
        )
    singles = [
        Table((column,), entry.rows, entry.storage)
        for entry in values.categorical
        for column in entry.columns
    ]
    crosses = [Table(entry.columns, entry.rows, entry.storage) for entry in values.cross]
    given: dict[str, Any] = {
        "missing": values.missing,
        "positive": values.label.positive,
        "negative": values.label.negative,
    }
    return Layout(
        columns=tuple(columns),
        label=values.label.column,
        numbers=tuple(_numbers(values)),
        tables=(*singles, *crosses),
        separator=values.separator,
        header=header is not None,
        quote=values.quote,
        buckets=values.buckets,
        **{name: value for name, value in given.items() if value is not None},
    )


def _numbers(values: _Columns) -> Iterator[Number]:
    for entry in values.numeric:
        for column in entry.columns:
            yield Number(column, entry.transform, entry.standardise)

"""Reads a run directory for the report, also one of a run that has not ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    create_model,
    with_config,
)
from typing_extensions import TypedDict

from ...diagnostics.memory import CATEGORIES
from ..engine.metrics import Record, Summary
from ..engine.run_directory import CONFIG, METRICS, SUMMARY, check_sums
from ..engine.task import TASKS
from ..engine.typed_files import Place, checked, parse_json, read_json

_LONGEST_LINE = 1 << 20
# Beyond it, sums and squares of measured values would overflow.
_LARGEST = 1e100


@dataclass(frozen=True)
class Run:
    """What a run directory holds.

    Attributes:
        path: The folder.
        task: Name of the task.
        config: ``config.json``.
        data: The runs' data set, as ``summary.json`` describes it; empty without that file.
        records: Logged steps, one for each variant, seed and step.
        summaries: Summaries of all variants and seeds; empty while the comparison is unfinished.
        cut: The last line of ``metrics.jsonl`` is not whole: it was being written.
    """

    path: Path
    task: str
    config: dict[str, Any]
    data: dict[str, Any]
    records: tuple[Record, ...]
    summaries: tuple[Summary, ...]
    cut: bool = False


def read_run(path: Path) -> Run:
    """Read a run directory.

    Args:
        path: The folder.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no run, or a file in it is damaged: the message names the
            file, the line or key and what was expected there.
    """
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"{path} holds no run: expected a folder with {CONFIG}, as `subulp train` makes it"
        )
    config = read_json(path / CONFIG)
    task = config.get("task")
    if not isinstance(task, str) or task not in TASKS:
        raise ValueError(f"{path / CONFIG}: expected a task, one of {', '.join(TASKS)}")
    check_sums(path)
    records, cut = _read_records(path / METRICS)
    data: dict[str, Any] = {}
    summaries: list[Summary] = []
    if (path / SUMMARY).is_file():
        at = f"{path / SUMMARY}"
        found = checked(_SUMMARY_FILE, read_json(path / SUMMARY), lambda _: at)
        data = found.data
        for index, run in enumerate(found.runs):
            summaries.append(_summary(run, at, ("runs", index), set(config)))
    return Run(path, task, config, data, tuple(records), tuple(summaries), cut)


def _read_records(path: Path) -> tuple[list[Record], bool]:
    """The records, the later one of two of the same step; and whether the last line is cut."""
    found: dict[tuple[str, int, int], Record] = {}
    if not path.is_file():
        return [], False
    for number, line, whole in _lines(path):
        try:
            record = _record(parse_json(line, path, number), f"{path}:{number}")
        except ValueError:
            if whole:
                raise
            return list(found.values()), True
        found[record.name, record.seed, record.step] = record
    return list(found.values()), False


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Line numbers, lines that are not empty, and whether each ends."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                raise ValueError(
                    f"{path}:{number}: above {_LONGEST_LINE:,} bytes: expected a JSON object a line"
                )
            if line.strip():
                yield number, line, line.endswith(b"\n")


# Types of what the files hold --------------------------------------------------------------------


def _measured(value: object) -> object:
    """``null`` is what was not finite, and so is what would overflow in a sum."""
    large = isinstance(value, int | float) and not abs(value) <= _LARGEST
    return math.nan if value is None or large else value


Measured = Annotated[float, BeforeValidator(_measured)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Bytes = Annotated[int | float, Field(ge=0, le=2**53)]
Plain = str | bool | int | float | None


@with_config(ConfigDict(extra="ignore"))
class Operand(TypedDict):
    """What the page shows of the decision about an operand of a linear layer."""

    layer: str
    role: str
    elements: dict[str, Bytes]
    error: Measured


def _with_total(value: Mapping[str, float]) -> Mapping[str, float]:
    if "total" not in value:
        raise ValueError("an object with a total")
    return value


def _with_categories(value: Mapping[str, float]) -> Mapping[str, float]:
    lacking = [name for name in (*CATEGORIES, "total") if name not in value]
    if lacking:
        raise ValueError(f"an object with {', '.join(lacking)}")
    return value


_Peaks = Annotated[dict[str, Bytes], AfterValidator(_with_categories)]
# By name where the type of the dataclass says less.
_TYPES: dict[Any, Any] = {
    int: Count,
    float: Measured,
    int | None: Count | None,
    float | None: Measured | None,
    dict[str, float]: dict[str, Measured],
    list[dict[str, Any]] | None: list[Operand] | None,
    dict[str, Any]: dict[str, Plain],
    "bytes_per_parameter": Annotated[dict[str, Bytes], AfterValidator(_with_total)],
    "peak_bytes": _Peaks,
    "category_peak_bytes": _Peaks,
}


def _adapter(kind: type) -> TypeAdapter[Any]:
    """The check of a dataclass's fields as a file has them."""
    hints = get_type_hints(kind)
    entries: dict[str, Any] = {}
    for field in fields(kind):
        hint = hints[field.name]
        type_ = _TYPES.get(field.name, _TYPES.get(hint, hint))
        default = field.default if field.default is not MISSING else ...
        entries[field.name] = (type_, default)
    return TypeAdapter(create_model(kind.__name__, **entries))


_RECORD, _SUMMARY = _adapter(Record), _adapter(Summary)
_SUMMARY_FILE: TypeAdapter[Any] = TypeAdapter(
    create_model("SummaryFile", runs=(list[dict[str, Any]], ...), data=(dict[str, Any], {}))
)
_OF_RECORD = {field.name for field in fields(Record)}
_OF_SUMMARY = {field.name for field in fields(Summary)}


def _record(found: dict[str, Any], where: str) -> Record:
    own = {name: value for name, value in found.items() if name in _OF_RECORD}
    metrics = {name: value for name, value in found.items() if _is_metric(name, value, _OF_RECORD)}
    record = checked(_RECORD, own | {"metrics": metrics}, lambda _: where)
    return Record(**dict(record))


def _summary(found: dict[str, Any], where: str, place: Place, options: set[str]) -> Summary:
    """A run's summary; what has the name of an option is a setting of its variant."""
    own = {name: value for name, value in found.items() if name in _OF_SUMMARY}
    settings = {name: value for name, value in found.items() if name in options - _OF_SUMMARY}
    known = _OF_SUMMARY | options
    metrics = {name: value for name, value in found.items() if _is_metric(name, value, known)}
    # Files of earlier versions do not count skipped steps.
    whole = {"skipped_steps": 0} | own | {"metrics": metrics, "settings": settings}
    return Summary(**dict(checked(_SUMMARY, whole, lambda _: where, inside=place)))


def _is_metric(name: str, value: object, known: set[str]) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return name not in known and (value is None or number)

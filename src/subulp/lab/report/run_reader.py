"""A run directory as the report needs it, also of runs that have not ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...diagnostics.memory import CATEGORIES
from ..engine.json_text import is_number, kind_of, parse_object, read_object
from ..engine.metrics import Record, Summary
from ..engine.run_directory import CONFIG, METRICS, SUMMARY
from ..engine.task import TASKS

_LONGEST_LINE = 1 << 20
_LARGEST_COUNT = 2**53
# Beyond it, sums and squares of measured values would overflow.
_LARGEST = 1e100


@dataclass(frozen=True)
class Run:
    """What a run directory holds.

    Attributes:
        path: The folder.
        task: Name of the task.
        config: ``config.json``.
        data: What the runs share, as ``summary.json`` describes it; empty while there is none.
        records: Logged steps, one for each variant, seed and step.
        summaries: Of all variants and seeds; empty while the comparison has not ended.
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
            file, the line and what was expected there.
    """
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"{path} holds no run: expected a folder with {CONFIG}, as `subulp train` makes it"
        )
    config = read_object(path / CONFIG)
    task = config.get("task")
    if not isinstance(task, str) or task not in TASKS:
        raise ValueError(f"{path / CONFIG}: expected a task, one of {', '.join(TASKS)}")
    records, cut = _read_records(path / METRICS)
    data: dict[str, Any] = {}
    summaries: list[Summary] = []
    if (path / SUMMARY).is_file():
        found = read_object(path / SUMMARY)
        at = f"{path / SUMMARY}"
        data = _Fields(found, at).get("data", dict, {})
        for index, run in enumerate(_Fields(found, at).get("runs", list)):
            summaries.append(_summary(run, f"{at}: runs[{index}]", set(config)))
    return Run(path, task, config, data, tuple(records), tuple(summaries), cut)


def _read_records(path: Path) -> tuple[list[Record], bool]:
    """The records, the later one of two of the same step; and whether the last line is cut."""
    found: dict[tuple[str, int, int], Record] = {}
    if not path.is_file():
        return [], False
    for number, line, whole in _lines(path):
        try:
            record = _record(parse_object(line, path, number), f"{path}:{number}")
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


class _Fields:
    """The fields of an object, with messages that say where it is."""

    def __init__(self, found: object, where: str) -> None:
        if not isinstance(found, dict):
            raise ValueError(f"{where}: expected an object, got {kind_of(found)}")
        self._found, self._where = found, where

    def get(self, name: str, kind: type | Callable[[object], bool], *default: Any) -> Any:
        """A field of a type or that a test accepts.

        Raises:
            ValueError: It is missing without a default, or something else.
        """
        if name not in self._found and default:
            return default[0]
        value = self._found.get(name)
        right = isinstance(value, kind) if isinstance(kind, type) else kind(value)
        if name not in self._found or not right:
            wanted = _KINDS[kind]
            got = kind_of(value) if name in self._found else "nothing"
            raise ValueError(f"{self._where}: expected {name} to be {wanted}, got {got}")
        if kind is _measured:
            return float(value) if value is not None and abs(value) <= _LARGEST else math.nan
        return value

    def sizes(self, name: str) -> dict[str, float]:
        """A field that is an object of sizes."""
        inner = _Fields(self.get(name, dict), f"{self._where}: {name}")
        return {key: inner.get(key, _size) for key in inner._found}

    def others(self, known: set[str], kind: Callable[[object], bool]) -> dict[str, Any]:
        """The fields that are not known and that a test accepts."""
        names = [n for n, v in self._found.items() if n not in known and kind(v)]
        return {name: self.get(name, kind) for name in names}


def _measured(value: object) -> bool:
    """What was measured is a number, or null where it was not finite."""
    return value is None or is_number(value)


def _size(value: object) -> bool:
    return is_number(value) and 0 <= value <= _LARGEST_COUNT  # type: ignore[operator]


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_COUNT


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | bool) or is_number(value)


_KINDS: dict[Any, str] = {
    str: "a string",
    dict: "an object",
    list: "an array",
    bool: "true or false",
    _size: "a number of at least 0",
    _measured: "a number or null",
    _count: "a whole number of at least 0",
    _plain: "a string, a number, true, false or null",
}
_OF_RECORD = {field.name for field in fields(Record)}
_OF_SUMMARY = {field.name for field in fields(Summary)}
_ENTRIES = ("effective_descent_quality", "update_norm", "descent_share", "lost_arithmetic")


def _record(found: dict[str, Any], where: str) -> Record:
    get = _Fields(found, where).get
    return Record(
        get("precision", str),
        get("seed", _count),
        get("step", _count),
        get("loss", _measured),
        get("lr", _measured),
        get("seconds", _measured),
        _Fields(found, where).others(_OF_RECORD, _measured),
        mix=_mix(get("mix", list, None), f"{where}: mix"),
        variant=get("variant", str, None),
        **{name: get(name, _measured, None) for name in _ENTRIES},
    )


def _mix(found: list[Any] | None, where: str) -> list[dict[str, Any]] | None:
    """What the page shows of decisions about operands."""
    if found is None:
        return None
    operands = []
    for index, operand in enumerate(found):
        entry = _Fields(operand, f"{where}[{index}]")
        operands.append(
            {
                "layer": entry.get("layer", str),
                "role": entry.get("role", str),
                "elements": entry.sizes("elements"),
                "error": entry.get("error", _measured),
            }
        )
    return operands


def _summary(found: Any, where: str, options: set[str]) -> Summary:
    """A run's summary; what has the name of an option is a setting of its variant."""
    entry = _Fields(found, where)
    get = entry.get
    peaks = {name: entry.sizes(name) for name in ("peak_bytes", "category_peak_bytes")}
    for name, peak in peaks.items():
        for category in (*CATEGORIES, "total"):
            _Fields(peak, f"{where}: {name}").get(category, _size)
    _Fields(entry.sizes("bytes_per_parameter"), f"{where}: bytes_per_parameter").get("total", _size)
    return Summary(
        precision=get("precision", str),
        seed=get("seed", _count),
        metrics=entry.others(_OF_SUMMARY | options, _measured),
        train_loss=get("train_loss", _measured),
        bytes_per_parameter=entry.sizes("bytes_per_parameter"),
        peak_bytes=peaks["peak_bytes"],  # type: ignore[arg-type]
        category_peak_bytes=peaks["category_peak_bytes"],  # type: ignore[arg-type]
        seconds_per_step=get("seconds_per_step", _measured),
        effective_descent_quality=get("effective_descent_quality", _measured),
        descent_share=get("descent_share", _measured),
        lost_arithmetic=get("lost_arithmetic", _measured),
        steps=get("steps", _count),
        skipped_steps=get("skipped_steps", _count, 0),
        parameters=get("parameters", _count),
        simulated=get("simulated", bool, False),
        seconds_per_epoch=get("seconds_per_epoch", _measured, None),
        variant=get("variant", str, None),
        rollbacks=get("rollbacks", _count, 0),
        settings={n: get(n, _plain) for n in sorted(options & set(found) - _OF_SUMMARY)},
    )

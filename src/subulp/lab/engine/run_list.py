"""What run directories a folder holds: a line about each."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .lock import LOCK
from .run_directory import CHECKPOINTS, CONFIG, METRICS, REPORT, SUMMARY, check_sums, task_of_run
from .task import TASKS, task_named
from .typed_files import read_json

_LONGEST_LINE = 1 << 20
_LAST_BYTES = 1 << 22


@dataclass(frozen=True)
class ListedRun:
    """A run directory.

    Attributes:
        path: The folder.
        task: Name of the task.
        data: What it trains on.
        metric: The metric of ``quality``: the task's first one.
        quality: Its mean over seeds for each variant that has been evaluated.
        state: ``"complete"``, ``"training"``, ``"can be resumed"``, ``"damaged"``.
        step: The last logged step of the run that is furthest, of an unfinished one.
        problem: What is damaged.
    """

    path: str
    task: str
    data: str = ""
    metric: str = ""
    quality: dict[str, float] = field(default_factory=dict)
    state: str = ""
    step: int | None = None
    problem: str = ""


def list_runs(folder: Path) -> list[ListedRun]:
    """The run directories in a folder, or the folder if it is one, by name.

    Raises:
        FileNotFoundError: There is no such folder.
        OSError: It cannot be read.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"folder={folder} is not a folder: give one that holds run directories"
        )
    if (folder / CONFIG).is_file():
        return [_listed(folder, str(folder))]
    inside = (path for path in sorted(folder.iterdir()) if (path / CONFIG).is_file())
    return [_listed(path, path.name) for path in inside]


def _listed(path: Path, name: str) -> ListedRun:
    task = task_of_run(path)
    if task not in TASKS:
        return ListedRun(name, task or "", state="damaged", problem=f"{CONFIG} names no task")
    try:
        config = read_json(path / CONFIG)
        data = str(config.get("data") or "bundled")
        complete = all((path / each).is_file() for each in (SUMMARY, REPORT))
        if complete:
            check_sums(path)
            found = read_json(path / SUMMARY)
            data = str(_of(found, "data").get("name", data))
            runs = found.get("runs") or []
        else:
            runs = list(_last_records(path / METRICS))
        metric = task_named(task).METRICS[0].name
        quality = _means(runs if isinstance(runs, list) else [], metric)
    except (ValueError, OverflowError, OSError) as error:
        return ListedRun(name, task, state="damaged", problem=" ".join(str(error).split()))
    if complete:
        return ListedRun(name, task, data, metric, quality, "complete")
    steps = [run["step"] for run in runs if isinstance(run.get("step"), int)]
    state = "training" if _in_use(path) else _resumable(path)
    return ListedRun(name, task, data, metric, quality, state, max(steps, default=0))


def _resumable(path: Path) -> str:
    return "can be resumed" if (path / CHECKPOINTS).is_dir() else "stopped before a checkpoint"


def _in_use(path: Path) -> bool:
    """Whether a process trains there."""
    try:
        with (path / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _last_records(path: Path) -> Iterable[dict[str, Any]]:
    """Evaluated steps at the end of the log, whole lines only."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LAST_BYTES))
        if size > _LAST_BYTES:
            file.readline(_LONGEST_LINE)
        for line in file.read(_LAST_BYTES).split(b"\n"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def _means(runs: Iterable[Any], metric: str) -> dict[str, float]:
    """Means over seeds of the last value of each run, by variant."""
    last: dict[str, dict[Any, float]] = {}
    for run in runs:
        value = run.get(metric) if isinstance(run, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            variant = str(run.get("variant") or run.get("precision"))
            last.setdefault(variant, {})[str(run.get("seed"))] = float(value)
    return {name: sum(seeds.values()) / len(seeds) for name, seeds in last.items()}


def _of(found: dict[str, Any], name: str) -> dict[str, Any]:
    value = found.get(name)
    return value if isinstance(value, dict) else {}

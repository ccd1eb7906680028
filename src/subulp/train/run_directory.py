"""The folder that a comparison leaves behind."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any, Self

import torch

from .._version import version
from .config import RunConfig
from .config_json import plain_fields
from .machine import describe_machine
from .metrics import Record, Summary, to_json

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
LOSS_PLOT = "loss.png"
DESCENT_PLOT = "descent_quality.png"
COMPRESSION_PLOT = "compression.png"
ACCESS_PLOT = "accesses.png"
MIXES = "mixes"
MODELS = "models"
_PLOTS = (LOSS_PLOT, DESCENT_PLOT, COMPRESSION_PLOT, ACCESS_PLOT)
_OWN_FILES = (CONFIG, METRICS, SUMMARY, REPORT, *_PLOTS)


class RunDirectory:
    """``config.json``, ``metrics.jsonl``, ``summary.json``, plots and models of one comparison.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, task: str, out: Path | None, *, overwrite: bool = False) -> Self:
        """Make an empty run directory.

        Args:
            task: Name of the task, e.g. ``"lm"``.
            out: Where; ``None`` is ``runs/TASK-TIMESTAMP``.
            overwrite: Replace an earlier run in ``out`` (default: ``False``).

        Raises:
            FileExistsError: ``out`` is a file, holds a run that is not to be overwritten, or holds
                something else than a run.
            PermissionError: ``out`` cannot be made.
        """
        if out is None:
            out = _unused(Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}")
        if out.exists() and not out.is_dir():
            raise FileExistsError(f"out={out} is a file: give a new folder")
        if out.is_dir() and any(out.iterdir()):
            if task_of_run(out) is None:
                raise FileExistsError(
                    f"out={out} is not empty and holds no run: give a new or an empty folder"
                )
            if not overwrite:
                raise FileExistsError(
                    f"out={out} holds an earlier run: give another out, or replace that run with "
                    "overwrite (--overwrite)"
                )
            # Only what a run writes: a note that the user left there is not ours to delete.
            for name in _OWN_FILES:
                (out / name).unlink(missing_ok=True)
            for name in (MIXES, MODELS):
                shutil.rmtree(out / name, ignore_errors=True)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except PermissionError:
            raise PermissionError(
                f"out={out} cannot be made: permission denied; give a folder that you may write to"
            ) from None
        return cls(out)

    def write_config(self, config: RunConfig, *, device: str, jobs: int) -> None:
        """Save what the run is made of, where it runs, and the versions of what runs it."""
        versions = {"subulp": version(), "torch": torch.__version__}
        written = {
            "task": config.task,
            **plain_fields(config),
            "device": device,
            "jobs": jobs,
            "versions": versions,
            "machine": describe_machine(),
        }
        text = to_json(written, indent=2)
        (self.path / CONFIG).write_text(text + "\n", encoding="utf-8")

    def add_record(self, record: Record) -> None:
        """Append one line to ``metrics.jsonl``."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Save the object that ``--json`` prints."""
        (self.path / SUMMARY).write_text(to_json(summary, indent=2) + "\n", encoding="utf-8")


def summary_object(task: str, data: dict[str, Any], summaries: list[Summary]) -> dict[str, Any]:
    """What ``--json`` prints and ``summary.json`` holds."""
    return {"task": task, "data": data, "runs": summaries}


def task_of_run(path: Path) -> str | None:
    """The task whose run a folder holds; ``None`` if it holds none."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(config["task"]) if isinstance(config, dict) and "task" in config else None


def _unused(path: Path) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``, ... that does not exist."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    )
    return next(name for name in names if not name.exists())

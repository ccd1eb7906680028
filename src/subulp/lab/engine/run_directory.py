"""The run directory: the folder that a comparison writes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from ..._version import version
from ..data.regular import NotRegularError, open_regular
from .checkpoint import clear
from .config import RunConfig
from .config_file import RECORDS
from .config_json import config_of, plain_fields
from .event_files import FOLDER as EVENTS
from .files import UnwritableError, remove_unfinished, write_text
from .lock import Lock
from .machine import describe_machine
from .metrics import Record, Summary, to_json
from .ranks import ALONE, Parallel, Ranks
from .run_checkpoints import RunCheckpoints
from .sealed import SUM, fingerprint
from .typed_files import LARGEST_TOML, read_bytes, read_json

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
SUMS = "SHA256SUMS"
"""Sums of the two before it, as ``sha256sum --check`` reads them."""
REPORT = "report.html"
LOSS_PLOT = "loss.png"
DESCENT_PLOT = "descent_quality.png"
COMPRESSION_PLOT = "compression.png"
ACCESS_PLOT = "accesses.png"
MIXES = "mixes"
MODELS = "models"
CHECKPOINTS = "checkpoints"
_PLOTS = (LOSS_PLOT, DESCENT_PLOT, COMPRESSION_PLOT, ACCESS_PLOT)
_OWN_FILES = (CONFIG, METRICS, SUMMARY, SUMS, REPORT, *_PLOTS)

_DAMAGED = "get it again, or remove it and continue with subulp train --resume"
_PAGE = b"<!doctype html>"
_DIGEST = "data_digest"
_MACHINE = ("jobs", "ranks", "parallel")


class RunDirectory:
    """``config.json``, ``metrics.jsonl``, ``summary.json``, plots, models and checkpoints of one
    comparison, for one process at a time.

    Args:
        path: The folder.
        lock: Held on it.

    Attributes:
        path: As above.
    """

    def __init__(self, path: Path, lock: Lock) -> None:
        self.path = path
        self._lock = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    @classmethod
    def create(cls, task: str, out: Path | None, *, overwrite: bool = False) -> Self:
        """Make an empty run directory, and lock it.

        Args:
            task: Name of the task, e.g. ``"lm"``.
            out: Where; ``None`` is ``runs/TASK-TIMESTAMP``.
            overwrite: Replace an earlier run in ``out`` (default: ``False``).

        Raises:
            FileExistsError: ``out`` is a file, holds a run that is not to be overwritten, or holds
                something else than a run.
            BlockingIOError: Another process trains there.
            OSError: ``out`` cannot be made or written.
        """
        if out is None:
            out = _unused(Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}")
        if out.exists() and not out.is_dir():
            raise FileExistsError(f"out={out} is a file: give a new folder")
        _check_free(out, overwrite)
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = Lock(out)
        except BlockingIOError:
            raise
        except OSError as error:
            raise type(error)(
                f"out={out} cannot be made: {_reason(error)}; give a folder that you may write to"
            ) from None
        # Another process may have been there in the meantime.
        _check_free(out, overwrite)
        # Only what a run writes: a note that the user left there is not ours to delete.
        for name in _OWN_FILES:
            (out / name).unlink(missing_ok=True)
        for name in (MIXES, MODELS, CHECKPOINTS, EVENTS):
            clear(out / name)
            if (out / name).is_dir():
                raise OSError(f"{out / name} of an earlier run cannot be removed: remove it")
        return cls(out, lock)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Lock a run directory to resume it.

        Raises:
            FileNotFoundError: There is no such folder, or it holds no run.
            ValueError: ``config.json`` is damaged.
            BlockingIOError: Another process trains there.
            OSError: It cannot be written.
        """
        if task_of_run(path) is None:
            if (path / CONFIG).is_file():
                # If that can be read, it is of something else.
                read_json(path / CONFIG)
            raise FileNotFoundError(
                f"resume={path} holds no run: give the run directory that `subulp train` wrote"
            )
        try:
            opened = cls(path, Lock(path))
        except BlockingIOError:
            raise
        except OSError as error:
            raise type(error)(f"resume={path} cannot be written: {_reason(error)}") from None
        remove_unfinished(path)
        return opened

    def write_config(
        self,
        config: RunConfig,
        *,
        device: str,
        jobs: int,
        ranks: Ranks = ALONE,
        decided: Mapping[str, Any] | None = None,
        digest: str | None = None,
    ) -> None:
        """Save what the run is made of, where it runs, and the versions of what runs it.

        Args:
            config: The comparison.
            device: Where it trains.
            jobs: Runs at a time.
            ranks: Those that make each of them together (default: there is one process).
            decided: Why the machine decided options as it did (default: it decided none).
            digest: Digest of the data; without it the comparison cannot be resumed (default:
                ``None``).
        """
        written = {
            "task": config.task,
            **plain_fields(config),
            "device": device,
            "jobs": jobs,
            **({"ranks": ranks.count, "parallel": ranks.parallel} if ranks.several else {}),
            "versions": _versions(),
            "machine": describe_machine(),
            **({"decided": decided} if decided else {}),
            _DIGEST: digest,
        }
        self._write(CONFIG, to_json(written, indent=2) + "\n")

    def other_versions(self) -> list[str]:
        """Packages whose version differs from that at the run's start, in words."""
        versions = read_json(self.path / CONFIG).get("versions")
        before: dict[str, Any] = versions if isinstance(versions, dict) else {}
        return [
            f"{name} is {now}, and was {before[name]}"
            for name, now in _versions().items()
            if before.get(name, now) != now
        ]

    def checkpoints(self, config: RunConfig, variant: str, seed: int) -> RunCheckpoints:
        """The checkpoints of a run."""
        return RunCheckpoints(self.path / CHECKPOINTS, config, variant, seed)

    def write_records(self, records: Iterable[Record]) -> None:
        """Replace ``metrics.jsonl`` by these records, to which more will be added."""
        (self.path / SUMS).unlink(missing_ok=True)
        self._write(METRICS, "".join(to_json(record) + "\n" for record in records))

    def add_record(self, record: Record) -> None:
        """Append one line to ``metrics.jsonl``.

        Raises:
            UnwritableError: The disk is full, for instance.
        """
        path = self.path / METRICS
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(to_json(record) + "\n")
        except OSError as error:
            raise UnwritableError.of(str(path), error) from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Save the object that ``--json`` prints, and the sums of what it stands beside."""
        self._write(SUMMARY, to_json(summary, indent=2) + "\n")
        sums = (f"{fingerprint(self.path / name)[SUM]}  {name}\n" for name in (METRICS, SUMMARY))
        self._write(SUMS, "".join(sums))

    def read_summary(self) -> dict[str, Any] | None:
        """That object; ``None`` if the comparison is unfinished: its last file is the report.

        Raises:
            ValueError: It is damaged, or ``metrics.jsonl`` is.
        """
        if not all((self.path / name).exists() for name in (SUMMARY, REPORT)):
            return None
        check_sums(self.path)
        return read_json(self.path / SUMMARY)

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        try:
            write_text(path, text)
        except OSError as error:
            raise UnwritableError.of(str(path), error) from error


def read_config(directory: Path) -> tuple[RunConfig, str]:
    """The configuration of a run directory and the digest of its data.

    Raises:
        ValueError: The file is damaged, or another version of subulp wrote it.
    """
    path = directory / CONFIG
    saved = read_json(path)
    digest = saved.get(_DIGEST)
    if not isinstance(digest, str):
        raise ValueError(f"{path} has no {_DIGEST}: this run cannot be resumed")
    fields = {name: value for name, value in saved.items() if name not in (*RECORDS, *_MACHINE)}
    try:
        return config_of(str(saved.get("task")), fields), digest
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_ranks(directory: Path) -> tuple[int, Parallel | None]:
    """How many ranks a comparison was begun with, and how they shared dense parameters.

    Raises:
        ValueError: The file is damaged.
    """
    path = directory / CONFIG
    try:
        saved = read_json(path)
    except FileNotFoundError:
        return 1, None
    match saved.get("ranks"), saved.get("parallel"):
        case None, None:
            return 1, None
        case int(ranks), "ddp" | "fsdp" as parallel if ranks >= 1:
            return ranks, parallel
    raise ValueError(f"{path}: ranks or parallel is damaged")


def check_sums(directory: Path) -> None:
    """Compare the files of a finished run with their sums; those of earlier versions have none.

    Raises:
        ValueError: A file differs, or the sums are damaged.
    """
    path = directory / SUMS
    try:
        lines = read_bytes(path, LARGEST_TOML, "SHA-256 sums").decode("ascii").splitlines()
    except FileNotFoundError:
        return
    except UnicodeDecodeError:
        raise ValueError(f"{path} is damaged: {_DAMAGED}") from None
    sums = dict(line.split("  ", 1)[::-1] for line in lines if "  " in line)
    if set(sums) != {METRICS, SUMMARY}:
        raise ValueError(f"{path} is damaged: {_DAMAGED}")
    for name, expected in sums.items():
        try:
            found = fingerprint(directory / name)[SUM]
        except FileNotFoundError:
            raise ValueError(f"{directory / name} is missing: {_DAMAGED}") from None
        if found != expected:
            raise ValueError(
                f"{directory / name} is damaged: its SHA-256 sum differs from the one in {SUMS}; "
                f"{_DAMAGED}"
            )


def check_output(out: Path, *, page: bool = False) -> None:
    """Refuse to write over a file that is not the user's to lose.

    Args:
        out: The file to write.
        page: It will be a report, and replaces nothing else (default: ``False``).

    Raises:
        ValueError: ``out`` is a folder, a pipe or a device, a file of a run, or, with ``page``, any
            other file than a report.
    """
    if not out.exists() and not out.is_symlink():
        return
    try:
        with open_regular(out) as file:
            is_page = file.read(len(_PAGE)).lower() == _PAGE
    except NotRegularError as error:
        raise ValueError(f"out={error}, or a name that is free") from None
    if is_page and page:
        return
    home = next((folder for folder in out.absolute().parents if task_of_run(folder)), None)
    if home is not None:
        raise ValueError(
            f"out={out} is a file of the run {home}, which would be lost: give another name"
        )
    if page:
        raise ValueError(f"out={out} exists and is no report: give another name, or remove it")


def _check_free(out: Path, overwrite: bool) -> None:
    """Raise FileExistsError unless a folder is free for a run."""
    # A process that was killed while it began has left hidden files.
    if not out.is_dir() or all(path.name.startswith(".") for path in out.iterdir()):
        return
    if task_of_run(out) is None:
        raise FileExistsError(
            f"out={out} is not empty and holds no run: give a new or an empty folder"
        )
    if not overwrite:
        raise FileExistsError(
            f"out={out} holds an earlier run: give another out, or replace that run with "
            "overwrite (--overwrite)"
        )


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _versions() -> dict[str, str]:
    return {"subulp": version(), "torch": torch.__version__}


def summary_object(task: str, data: dict[str, Any], summaries: list[Summary]) -> dict[str, Any]:
    """The object that ``--json`` prints and ``summary.json`` holds."""
    return {"task": task, "data": data, "runs": summaries}


def task_of_run(path: Path) -> str | None:
    """The task whose run a folder holds; ``None`` if it holds none."""
    try:
        config = read_json(path / CONFIG)
    except (OSError, ValueError):
        return None
    return str(config["task"]) if "task" in config else None


def _unused(path: Path) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``, ... that does not exist."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    )
    return next(name for name in names if not name.exists())

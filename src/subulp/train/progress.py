"""Progress on the standard error: one bar per run on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from .config import LMConfig
from .metrics import Record


class Reporter(Protocol):
    """Something that is told every logged step."""

    def on_record(self, record: Record) -> None:
        """Take note of a logged step."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def reporter(config: LMConfig, console: Console) -> Reporter:
    """Bars where they can move, lines where they would pile up (in a file, in a build log)."""
    return Bars(config, console) if console.is_terminal else Lines(config, console)


class _Rates:
    """Steps per second of each run between one record and the next, evaluations included."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[tuple[str, int], tuple[int, float]] = {}

    def __call__(self, record: Record) -> str:
        now = self._clock()
        step, before = self._last.get((record.precision, record.seed), (record.step - 1, None))
        seconds = record.seconds if before is None else now - before
        self._last[record.precision, record.seed] = record.step, now
        return f"{(record.step - step) / max(seconds, 1e-9):.1f} steps/s"


class Bars:
    """One progress bar per run, with the latest loss and the rate."""

    def __init__(
        self, config: LMConfig, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = _Rates(clock)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._tasks: dict[tuple[str, int], TaskID] = {}
        for precision in config.precision:
            for seed in config.seeds:
                self._tasks[precision, seed] = self._progress.add_task(
                    _name(config, precision, seed),
                    total=config.steps,
                    start=False,
                    loss="",
                    rate="",
                )

    def on_record(self, record: Record) -> None:
        """Move the run's bar."""
        task = self._tasks[record.precision, record.seed]
        if not self._progress.tasks[task].started:
            self._progress.start_task(task)
        self._progress.update(
            task,
            completed=record.step,
            loss=f"loss {record.loss:.3f}",
            rate=self._rate(record),
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()


class Lines:
    """A line per evaluation."""

    def __init__(
        self, config: LMConfig, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = _Rates(clock)
        self._config = config
        self._console = console

    def on_record(self, record: Record) -> None:
        """Print the step if it was evaluated."""
        if record.val_loss is None:
            return
        self._console.print(
            f"{_name(self._config, record.precision, record.seed)}: step {record.step}/"
            f"{self._config.steps}, loss {record.loss:.3f}, val loss {record.val_loss:.4f}, "
            f"{self._rate(record)}",
            highlight=False,
            soft_wrap=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


def _name(config: LMConfig, precision: str, seed: int) -> str:
    return precision if len(config.seeds) == 1 else f"{precision}, seed {seed}"

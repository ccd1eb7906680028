"""Progress of training and of reading: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from .metrics import Record, RunProgress


@dataclass(frozen=True)
class Plan:
    """The runs that are about to be trained.

    Attributes:
        runs: Variant and seed of each run.
        steps: Training steps of each.
        shown: Names of the metrics to show (default: none).
        data: Name and sizes of the training data (default: not shown).
        done: Steps that runs have made before (default: none).
        notes: Further lines to print (default: none).
    """

    runs: tuple[tuple[str, int], ...]
    steps: int
    shown: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    done: Mapping[tuple[str, int], int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def name(self, variant: str, seed: int) -> str:
        """Display name of a run: without the seed where all runs have the same."""
        return variant if len({s for _, s in self.runs}) == 1 else f"{variant}, seed {seed}"


class Reporter(Protocol):
    """A receiver of every logged step."""

    def on_record(self, record: Record) -> None:
        """Receive a logged step."""

    def on_progress(self, progress: RunProgress) -> None:
        """Receive how far a run is."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def reporter(plan: Plan, console: Console) -> Reporter:
    """Bars where they can move, lines where they would pile up (in a file, in a build log).

    What is trained on stands above them, in one line.
    """
    if plan.data:
        sizes = (
            f"{size:,} {name.replace('_', ' ')}"
            for name, size in plan.data.items()
            if isinstance(size, int)
        )
        console.print(f"{plan.data['name']}: {', '.join(sizes)}", highlight=False, soft_wrap=True)
    for note in plan.notes:
        console.print(note, highlight=False, soft_wrap=True)
    return Bars(plan, console) if console.is_terminal else Lines(plan, console)


class _Remaining:
    """The steps that all runs have made, and the time that the others will take."""

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        self._clock, self._begun = clock, clock()
        self._steps = plan.steps
        self._before = {name: plan.done.get(name, 0) for name in plan.runs}
        self._made = dict(self._before)
        # Workers take seconds to start, which say nothing about a step.
        self._first: tuple[float, int] | None = None

    def see(self, name: tuple[str, int], step: int) -> None:
        """Note that a run has made so many steps."""
        # A run that has rolled back has fewer than before.
        self._made[name] = step
        if self._first is None:
            self._first = self._clock(), sum(self._made.values())

    @property
    def elapsed(self) -> float:
        """Seconds since the begin."""
        return self._clock() - self._begun

    @property
    def active(self) -> dict[tuple[str, int], int]:
        """Steps of the runs that have begun and not ended."""
        return {
            name: step
            for name, step in self._made.items()
            if self._before[name] < step < self._steps
        }

    def __str__(self) -> str:
        total, made = self._steps * len(self._made), sum(self._made.values())
        share = f"{100 * made // total} % done"
        begun, before = self._first or (self._clock(), made)
        if made <= before:
            return share
        left = (self._clock() - begun) * (total - made) / (made - before)
        return f"{share}, about {duration_text(left)} left"


def duration_text(seconds: float) -> str:
    """A duration with as many digits as an estimate has."""
    seconds = round(seconds)
    if seconds < 100:
        return f"{seconds} s"
    if seconds < 6000:
        return f"{round(seconds / 60)} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


class _Rates:
    """Steps per second of each run between one record and the next, evaluations included."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[tuple[str, int], tuple[int, float]] = {}

    def __call__(self, record: Record) -> str:
        now = self._clock()
        step, before = self._last.get((record.name, record.seed), (record.step - 1, None))
        seconds = record.seconds if before is None else now - before
        self._last[record.name, record.seed] = record.step, now
        return f"{(record.step - step) / max(seconds, 1e-9):.1f} steps/s"


class Bars:
    """One progress bar per run, with the latest loss and the rate."""

    def __init__(
        self, plan: Plan, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = _Rates(clock)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", markup=False),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._tasks: dict[tuple[str, int], TaskID] = {}
        for variant, seed in plan.runs:
            self._tasks[variant, seed] = self._progress.add_task(
                plan.name(variant, seed),
                total=plan.steps,
                start=False,
                completed=plan.done.get((variant, seed), 0),
                loss="",
                rate="",
            )

    def on_record(self, record: Record) -> None:
        """Move the run's bar."""
        task = self._tasks[record.name, record.seed]
        if not self._progress.tasks[task].started:
            self._progress.start_task(task)
        self._progress.update(
            task,
            completed=record.step,
            loss=f"loss {record.loss:.3f}",
            rate=self._rate(record),
        )

    def on_progress(self, progress: RunProgress) -> None:
        """Move the run's bar."""
        task = self._tasks[progress.name, progress.seed]
        if not self._progress.tasks[task].started:
            self._progress.start_task(task)
        self._progress.update(task, completed=progress.step)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()


_FIRST, _LONGEST, _SHARE = 5.0, 60.0, 0.05
_MOST_NAMED = 4


class Lines:
    """A line per evaluation, and one every few seconds about the time that is left.

    The longer it takes, the fewer they are: one in five seconds at first, one a minute after twenty
    minutes.
    """

    def __init__(
        self, plan: Plan, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = _Rates(clock)
        self._remaining = _Remaining(plan, clock)
        self._next = _FIRST
        self._plan = plan
        self._console = console

    def on_progress(self, progress: RunProgress) -> None:
        """Print how far all runs are, if the last line about it is some seconds old."""
        self._remaining.see((progress.name, progress.seed), progress.step)
        elapsed = self._remaining.elapsed
        if elapsed < self._next:
            return
        self._next = elapsed + min(max(_FIRST, _SHARE * elapsed), _LONGEST)
        active = self._remaining.active.items()
        if not active:
            return
        named = [
            f"{self._plan.name(*name)} {step:,}/{self._plan.steps:,}"
            for name, step in list(active)[:_MOST_NAMED]
        ]
        more = len(active) - len(named)
        named += [f"{more} more"] if more else []
        self._console.print(
            f"{self._remaining}: {', '.join(named)}", highlight=False, soft_wrap=True
        )

    def on_record(self, record: Record) -> None:
        """Print the step if it was evaluated."""
        self._remaining.see((record.name, record.seed), record.step)
        if not record.metrics:
            return
        measured = ", ".join(
            f"{name.replace('_', ' ')} {record.metrics[name]:.4g}"
            for name in self._plan.shown
            if name in record.metrics
        )
        self._console.print(
            f"{self._plan.name(record.name, record.seed)}: step {record.step}/"
            f"{self._plan.steps}, loss {record.loss:.3f}, {measured}, {self._rate(record)}",
            highlight=False,
            soft_wrap=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


@contextmanager
def reading(path: Path, console: Console) -> Iterator[Callable[[int], None]]:
    """Show progress while the block runs.

    Args:
        path: The file; one that cannot be read shows nothing, and its reader raises the error.
        console: Where to show it.

    Yields:
        A function to call with the bytes read so far.
    """
    size = path.stat().st_size if path.is_file() else 0
    if not console.is_terminal:
        yield _Tenths(path, size, console)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console) as progress:
        task = progress.add_task(path.name, total=size)
        yield lambda done: progress.update(task, completed=done)


class _Tenths:
    def __init__(self, path: Path, size: int, console: Console) -> None:
        self._path = path
        self._size = max(size, 1)
        self._console = console
        self._shown = 0

    def __call__(self, done: int) -> None:
        tenths = min(10 * done // self._size, 10)
        if tenths > self._shown:
            self._shown = tenths
            self._console.print(
                f"{self._path.name}: {10 * tenths} % read", highlight=False, soft_wrap=True
            )

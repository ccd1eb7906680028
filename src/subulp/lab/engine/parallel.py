"""Several runs at once: worker processes that each take one run after another.

A run computes the same numbers in a worker as in the calling process: it sets its own thread count
and random state.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .config import RunConfig
from .loop import run
from .machine import available_cores
from .metrics import Record, RunProgress, Summary
from .rank_checkpoints import RankCheckpoints
from .ranks import ALONE, Ranks
from .resume_command import resume_command
from .run_directory import MODELS, RunDirectory
from .stopping import Interrupted, Stopped, StopRequest
from .task import task_of

_SECONDS = 0.5
"""Between two reports of how far a run is."""


@dataclass(frozen=True)
class PlannedRun:
    """A run to make.

    Attributes:
        variant: Name of the variant.
        seed: Seed of the run.
        begin: Checkpoint to continue from; ``None`` starts from scratch.
    """

    variant: str
    seed: int
    begin: Path | None = None


def default_jobs(runs: int) -> int:
    """As many as there are cores for this process, at most one per run."""
    return max(1, min(runs, available_cores()))


def run_all(
    config: RunConfig,
    data: Any,
    runs: Sequence[PlannedRun],
    jobs: int,
    directory: RunDirectory,
    stop: StopRequest,
    on_record: Callable[[Record], None],
    on_end: Callable[[PlannedRun, Summary], None],
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
    ranks: Ranks = ALONE,
) -> None:
    """Do all ``runs``, ``jobs`` of them at a time.

    Args:
        config: The comparison.
        data: What the task loaded for ``config``; workers read it again.
        runs: What to do, in this order.
        jobs: Number of worker processes; 1 runs everything in the calling process.
        directory: Where models and checkpoints are written.
        stop: Says when runs are to end before their last step.
        on_record: Called in the calling process with every logged step, in the order of arrival.
        on_end: Called there with every run that finished, after its records.
        on_progress: Called there every now and then with how far a run is (default: does nothing).
        ranks: Those that make each run together, one run at a time; the others :func:`follow`
            (default: none).

    Raises:
        ChildProcessError: A worker died (killed for its memory, for instance).
        Interrupted: Runs were stopped; all of them have written checkpoints.
        Exception: Whatever a run raised; other runs write checkpoints and end.
    """
    comparison = _Comparison(config, directory, stop, on_record, on_end, on_progress, ranks)
    here = jobs == 1
    ended = comparison.run_here(data, runs) if here else comparison.run_in_workers(runs, jobs)
    if ended < len(runs):
        assert stop.signum is not None
        raise Interrupted(directory.path, stop.signum)


@dataclass(frozen=True)
class _Comparison:
    """What all runs share; the fields are the arguments of :func:`run_all`."""

    config: RunConfig
    directory: RunDirectory
    stop: StopRequest
    on_record: Callable[[Record], None]
    on_end: Callable[[PlannedRun, Summary], None]
    on_progress: Callable[[RunProgress], None]
    ranks: Ranks

    def run_here(self, data: Any, runs: Sequence[PlannedRun]) -> int:
        """Make one run after another; returns how many finished."""
        for ended, planned in enumerate(runs):
            if self.stop():
                return ended
            try:
                summary = _run(
                    self.config,
                    data,
                    planned,
                    self.directory,
                    self.stop,
                    self.on_record,
                    self.on_progress,
                    self.ranks,
                )
            except Stopped:
                return ended
            self.on_end(planned, summary)
        return len(runs)

    def run_in_workers(self, runs: Sequence[PlannedRun], jobs: int) -> int:
        """Make the runs in worker processes; returns how many finished."""
        waiting, ended = list(runs), 0
        with _workers(self.config, self.directory, min(jobs, len(runs)), self.stop) as workers:
            busy: dict[Connection, _Worker] = {}
            for worker in workers:
                _give(worker, waiting, busy, self.stop)
            while busy:
                for pipe in connection.wait(list(busy)):
                    assert isinstance(pipe, Connection)
                    worker = busy[pipe]
                    message = worker.receive(self.directory, self.stop)
                    if isinstance(message, Record):
                        self.on_record(message)
                        continue
                    if isinstance(message, RunProgress):
                        self.on_progress(message)
                        continue
                    del busy[pipe]
                    if isinstance(message, Stopped):
                        # The worker alone may have been asked.
                        self.stop.request(signal.SIGTERM)
                        continue
                    assert worker.planned is not None
                    ended += 1
                    self.on_end(worker.planned, message)
                    _give(worker, waiting, busy, self.stop)
        return ended


def _run(
    config: RunConfig,
    data: Any,
    planned: PlannedRun,
    directory: RunDirectory,
    stop: Callable[[], bool],
    on_record: Callable[[Record], None],
    on_progress: Callable[[RunProgress], None],
    ranks: Ranks = ALONE,
) -> Summary:
    last = -math.inf

    def on_step(step: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS:
            last = now
            on_progress(RunProgress(planned.variant, planned.seed, step))

    own = directory.checkpoints(config, planned.variant, planned.seed)
    return run(
        config,
        data,
        planned.variant,
        planned.seed,
        on_record,
        models=directory.path / MODELS,
        checkpoints=RankCheckpoints(own, ranks) if ranks.several else own,
        begin=planned.begin,
        stop=stop,
        on_step=on_step,
        ranks=ranks,
    )


def follow(
    config: RunConfig,
    data: Any,
    runs: Sequence[PlannedRun],
    directory: Path,
    stop: StopRequest,
    ranks: Ranks,
) -> None:
    """Do all ``runs`` with rank 0, which alone writes.

    Args:
        config: The comparison.
        data: What the task loaded for ``config``.
        runs: Those of rank 0.
        directory: Its run directory.
        stop: Says when runs are to end before their last step.
        ranks: The ranks.

    Raises:
        Interrupted: Runs were stopped.
    """
    for planned in runs:
        try:
            if stop():
                raise Stopped(0)
            run(
                config,
                data,
                planned.variant,
                planned.seed,
                models=directory / MODELS,
                checkpoints=RankCheckpoints(None, ranks),
                begin=planned.begin,
                stop=stop,
                ranks=ranks,
            )
        except Stopped:
            assert stop.signum is not None
            raise Interrupted(directory, stop.signum) from None


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    planned: PlannedRun | None = None

    def receive(
        self, directory: RunDirectory, stop: StopRequest
    ) -> Record | RunProgress | Summary | Stopped:
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            # A worker that is asked to stop before it listens ends at once.
            if stop() and self.process.exitcode == -signal.SIGTERM:
                return Stopped(0)
            assert self.planned is not None
            raise ChildProcessError(
                f"the process that trained precision={self.planned.variant}, "
                f"seed={self.planned.seed} died with exit code "
                f"{self.process.exitcode}; if memory ran out, use fewer jobs or a smaller model; "
                f"continue with {resume_command(directory.path)}"
            ) from None
        if isinstance(message, Exception) and not isinstance(message, Stopped):
            raise message
        assert isinstance(message, Record | RunProgress | Summary | Stopped)
        return message


def _give(
    worker: _Worker, waiting: list[PlannedRun], busy: dict[Connection, _Worker], stop: StopRequest
) -> None:
    """Give a worker the next run, if there is one and no stop was requested."""
    if not waiting or stop():
        return
    worker.planned = waiting.pop(0)
    worker.pipe.send(worker.planned)
    busy[worker.pipe] = worker


@contextmanager
def _workers(
    config: RunConfig, directory: RunDirectory, count: int, stop: StopRequest
) -> Iterator[list[_Worker]]:
    # Fork would copy torch's threads in an unknown state.
    context = get_context("spawn")
    workers: list[_Worker] = []

    def end() -> None:
        for worker in workers:
            worker.process.terminate()

    stop.on_request = end
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(config, directory, theirs), daemon=True)
            with _interrupts_ignored():
                process.start()
            theirs.close()
            workers.append(_Worker(process, ours))
        if stop():
            end()
        yield workers
    except KeyboardInterrupt:
        # A second Ctrl-C does not wait.
        for worker in workers:
            worker.process.kill()
        raise
    finally:
        for worker in workers:
            worker.pipe.close()
        end()
        for worker in workers:
            worker.process.join()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Children born inside ignore Ctrl-C: the parent ends them, without a traceback from each."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(config: RunConfig, directory: RunDirectory, pipe: Connection) -> None:
    """Body of a worker: trains what it is sent until the parent closes the pipe."""
    stop = StopRequest()
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.request(signum))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    data = task_of(config).load(config)
    while True:
        try:
            planned = pipe.recv()
        except EOFError:
            return
        try:
            message: Any = _run(config, data, planned, directory, stop, pipe.send, pipe.send)
        except BrokenPipeError:
            return
        except Stopped as stopped:
            message = stopped
        except Exception as error:
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            message = error
        try:
            pipe.send(message)
        except BrokenPipeError:
            return


def _end_with_parent() -> None:
    """End when the parent is killed: nothing may write into its run directory after it."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

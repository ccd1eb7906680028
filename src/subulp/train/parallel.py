"""Several runs at once: worker processes that take one run after the other.

A run computes the same numbers in a worker as in the calling process: it sets its own thread count
and random state.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .config import RunConfig
from .loop import run
from .metrics import Record, Summary
from .task import task_of

Runs = Sequence[tuple[str, int]]
"""Variant and seed of each run."""


def default_jobs(runs: int) -> int:
    """As many as there are cores for this process, at most one per run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(runs, cores or 1))


def run_all(
    config: RunConfig,
    data: Any,
    runs: Runs,
    jobs: int,
    on_record: Callable[[Record], None],
    models: Path | None = None,
) -> list[Summary]:
    """Do all ``runs``, ``jobs`` of them at a time.

    Args:
        config: The comparison.
        data: What the task loaded for ``config``; workers read it again.
        runs: What to do, in this order.
        jobs: Number of worker processes; 1 runs everything in the calling process.
        on_record: Called in the calling process with every logged step, in the order of arrival.
        models: Folder for the trained models, if the task saves any (default: not saved).

    Returns:
        The summaries, in the order of ``runs``.

    Raises:
        ChildProcessError: A worker died (killed for its memory, for instance).
        Exception: Whatever a run raised; other runs are stopped.
    """
    if jobs == 1:
        return [run(config, data, variant, seed, on_record, models) for variant, seed in runs]
    summaries: dict[int, Summary] = {}
    waiting = list(enumerate(runs))
    with _workers(config, models, min(jobs, len(runs))) as workers:
        busy: dict[Connection, _Worker] = {}
        for worker in workers:
            _give(worker, waiting.pop(0), busy)
        while busy:
            for pipe in connection.wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker = busy[pipe]
                message = worker.receive()
                if isinstance(message, Record):
                    on_record(message)
                    continue
                assert worker.run is not None
                summaries[worker.run[0]] = message
                del busy[pipe]
                if waiting:
                    _give(worker, waiting.pop(0), busy)
    return [summaries[index] for index in range(len(runs))]


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    run: tuple[int, tuple[str, int]] | None = None

    def receive(self) -> Record | Summary:
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            assert self.run is not None
            variant, seed = self.run[1]
            raise ChildProcessError(
                f"the process that trained precision={variant}, seed={seed} died with exit code "
                f"{self.process.exitcode}; if memory ran out, use fewer jobs or a smaller model"
            ) from None
        if isinstance(message, Exception):
            raise message
        assert isinstance(message, Record | Summary)
        return message


def _give(
    worker: _Worker, run: tuple[int, tuple[str, int]], busy: dict[Connection, _Worker]
) -> None:
    worker.run = run
    worker.pipe.send(run[1])
    busy[worker.pipe] = worker


@contextmanager
def _workers(config: RunConfig, models: Path | None, count: int) -> Iterator[list[_Worker]]:
    # Fork would copy torch's threads in an unknown state.
    context = get_context("spawn")
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(config, models, theirs), daemon=True)
            with _interrupts_ignored():
                process.start()
            theirs.close()
            workers.append(_Worker(process, ours))
        yield workers
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
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


def _work(config: RunConfig, models: Path | None, pipe: Connection) -> None:
    """Body of a worker: trains what it is sent until the parent closes the pipe."""
    data = task_of(config).load(config)
    while True:
        try:
            variant, seed = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(run(config, data, variant, seed, pipe.send, models))
        except Exception as error:
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            pipe.send(error)

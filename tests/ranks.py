"""Functions run by several ranks at once: processes that stay, a new process group each time."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MOST = 4
# Long enough for a loaded machine; a rank that waits in vain ends its test, not the suite.
_SECONDS = 120


class Ranks:
    """Processes that take part in process groups of gloo, up to four at a time."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(MOST):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returns on each of ``count`` ranks.

        Args:
            count: Number of ranks, the size of the default process group.
            function: A module's, so that the processes can import it.
            args: Sent to each.

        Raises:
            AssertionError: A rank failed; the message holds the traceback of each that did.
        """
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for end in self._ends[:count]:
                end.send((store, count, function, args))
            results, failures = [], []
            for rank, end in enumerate(self._ends[:count]):
                if not end.poll(_SECONDS + 60):
                    raise AssertionError(f"rank {rank} of {count} does not answer")
                good, value = end.recv()
                (results if good else failures).append(value)
        if failures:
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, end: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        store, count, function, args = end.recv()
        try:
            with _group(store, rank, count):
                value = function(*args)
            end.send((True, value))
        except BaseException:
            end.send((False, f"rank {rank} of {count}:\n{traceback.format_exc()}"))


@contextlib.contextmanager
def _group(store: str, rank: int, count: int) -> Iterator[None]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=_SECONDS),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()

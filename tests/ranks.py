"""Functions run by several ranks at once, in processes that stay."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Long enough for a loaded machine; a rank that waits in vain ends its test, not the suite.
_SECONDS = 180
_DEVICE = "SUBULP_TEST_MESH_DEVICE"


class Ranks:
    """Teams of processes, one of each size that is asked for, each with one process group.

    A group stays as long as its team does: DTensor remembers meshes that compare equal to those of
    a group that is gone.

    Args:
        device: ``"cpu"``, or ``"cuda"`` for a GPU each: where meshes are (default: ``"cpu"``).
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._teams: dict[int, _Team] = {}

    def run(self, count: int, function: Callable[..., Any], *args: Any, **named: Any) -> list[Any]:
        """What ``function(*args, **named)`` returns on each of ``count`` ranks.

        Args:
            count: Number of ranks, the size of the default process group.
            function: A module's, so that the processes can import it.
            args: Sent to each.
            named: Sent to each.

        Raises:
            AssertionError: A rank failed; the message holds the traceback of each that did.
        """
        if self._device == "cuda" and torch.cuda.device_count() < count:
            pytest.skip(f"there are fewer than {count} GPUs")
        if count not in self._teams:
            self._teams[count] = _Team(count, self._device)
        try:
            return self._teams[count].run(partial(function, **named), args)
        except BaseException:
            # Others may still be waiting for the rank that failed.
            self._teams.pop(count).close()
            raise

    def close(self) -> None:
        """End all processes."""
        for team in self._teams.values():
            team.close()
        self._teams.clear()


class _Team:
    def __init__(self, count: int, device: str) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, store, device, theirs), daemon=True
            )
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for end in self._ends:
            end.send((function, args))
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + _SECONDS
        while len(results) < len(self._ends):
            waiting = [end for i, end in enumerate(self._ends) if i not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(set(range(len(self._ends))) - set(results))
                failures.append(f"no answer from ranks {silent}")
                break
            for end in ready:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                good, results[rank] = self._ends[rank].recv()
                if not good:
                    failures.append(results[rank])
                    # What the others say about it, if they say it soon.
                    deadline = min(deadline, time.monotonic() + 2)
        if failures:
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def device() -> str:
    """Where the ranks of this one's team train; the CPU outside of any."""
    return os.environ.get(_DEVICE, "cpu")


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh, in a rank; the same for the same arguments, for its groups have threads."""
    return init_device_mesh(device(), shape, mesh_dim_names=names)


def _serve(rank: int, count: int, store: str, device: str, end: Connection) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ[_DEVICE] = device
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=_SECONDS),
    )
    while True:
        function, args = end.recv()
        try:
            end.send((True, function(*args)))
        except BaseException:
            end.send((False, f"rank {rank} of {count}:\n{traceback.format_exc()}"))

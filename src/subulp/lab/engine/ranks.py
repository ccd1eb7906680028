"""Processes that make one run together: ranks, as ``torchrun`` starts them.

All ranks do the same in the same order: each draws every batch, and takes its own part of it. Rank
0 alone decides, writes and speaks.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from .launched import Silent, speak, started
from .resume_command import resume_command

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parallel = Literal["ddp", "fsdp"]
"""How ranks share dense parameters: every one has all of them, as under
``DistributedDataParallel``, or its shard, as under ``fully_shard``."""

T = TypeVar("T")
R = TypeVar("R")

# A rank evaluates, or writes a checkpoint, while others wait.
_PATIENCE = timedelta(hours=2)
_ENDED, _SPEAKING = "subulp: rank 0 has ended", "subulp: ranks that speak for it"
_SECONDS_TO_SPEAK = timedelta(seconds=2)


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, seen from one of them; by default the only one.

    Attributes:
        rank: Number of this one.
        count: How many there are.
        parallel: How they share dense parameters.
        mesh: A mesh of all of them, after :meth:`on`; ``None`` for a single one.
        local: How many of them are on this machine.
    """

    rank: int = 0
    count: int = 1
    parallel: Parallel = "ddp"
    mesh: DeviceMesh | None = None
    local: int = 1

    @property
    def several(self) -> bool:
        """Whether there is more than this one."""
        return self.count > 1

    def on(self, device: torch.device) -> Ranks:
        """The same with a mesh, each rank on its own GPU where they train on GPUs.

        Raises:
            ValueError: This machine has fewer GPUs than ranks.
        """
        if not self.several:
            return self
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

        if device.type == "cuda":
            if self.local > torch.cuda.device_count():
                raise ValueError(
                    f"device={device} has {torch.cuda.device_count()} GPUs here for {self.local} "
                    "ranks: start fewer, or use cpu"
                )
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", self.rank)))
        return replace(self, mesh=init_device_mesh(device.type, (self.count,)))

    # ------------------------------------------------------------------------ parts of a batch

    def part(self, count: int) -> slice:
        """Which of ``count`` examples are this rank's; parts differ by one example at most."""
        return slice(
            self.rank * count // self.count,
            (self.rank + 1) * count // self.count,
        )

    def weight(self, count: int) -> float:
        """Factor on the mean over this rank's part; the mean over ranks is then that of all."""
        own: int = self.part(count).stop - self.part(count).start
        return own * self.count / count

    def each(self, compute: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """``compute`` of all items, dealt out to the ranks; all of them get all results.

        All ranks compute equally often, so that they meet in the collectives inside.
        """
        own, count, left = [], 0, iter(items)
        while turn := list(islice(left, self.count)):
            own.append(compute(turn[min(self.rank, len(turn) - 1)]))
            count += len(turn)
        found = self.gather(own)
        return [found[i % self.count][i // self.count] for i in range(count)]

    # ----------------------------------------------------------------------------- agreements

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on each of them."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes; the others do not call it."""
        if not self.several:
            return make()
        made = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(made, src=0)
        value: Any = made[0]
        return value  # type: ignore[no-any-return]

    def mean(self, value: float) -> float:
        """The mean over the ranks, of the same bits on all of them."""
        return value if not self.several else math.fsum(self._numbers(value)) / self.count

    def highest(self, value: int) -> int:
        """The highest of the ranks' values."""
        return value if not self.several else int(max(self._numbers(value)))

    def _numbers(self, value: float) -> list[float]:
        own = torch.tensor([value], dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(found, own)
        return [each.item() for each in found]

    def agree(self, name: str, value: object) -> None:
        """Raise unless a value is the same on all ranks.

        Raises:
            ValueError: Rank 0 has another one than this rank, or than one of the others.
        """
        found = self.gather(value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ValueError(
                    f"{name} differs between ranks: rank {rank} has {other}, and rank 0 has "
                    f"{found[0]}"
                )


ALONE = Ranks()
"""One process."""


@contextmanager
def join(parallel: Parallel | None) -> Iterator[Ranks]:
    """The ranks that this process belongs to, connected inside the block.

    Args:
        parallel: How they share dense parameters; ``None`` is ``"ddp"``.

    Raises:
        ValueError: ``parallel`` is given for one process.
        ChildProcessError: Another rank has ended.
        Silent: On another rank than the first: rank 0 has ended too, and says why.
    """
    if started() == 1:
        if parallel is not None:
            raise ValueError(
                f"parallel={parallel} has no effect on one process: start several with ranks, or "
                "with torchrun"
            )
        yield ALONE
        return
    if dist.is_initialized():
        # Whoever has made the group ends it.
        yield _joined(parallel)
        return
    store, rank, count = next(rendezvous("env://"))
    _end_with_launcher()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_PATIENCE)
    try:
        yield _joined(parallel)
        dist.destroy_process_group()
    except BaseException as error:
        lost = ChildProcessError("another rank has ended") if _is_lost(error) else error
        _speak_or_be_silent(store, rank, lost)


def _joined(parallel: Parallel | None) -> Ranks:
    count = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    return Ranks(dist.get_rank(), count, parallel or "ddp", None, local)


@contextmanager
def naming_lost_ranks(directory: Path) -> Iterator[None]:
    """Say what to do when a collective fails because a rank is gone.

    Args:
        directory: The run directory.

    Raises:
        ChildProcessError: One is.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        raise ChildProcessError(
            f"another rank has ended; continue with {resume_command(directory)}"
        ) from error


def _is_lost(error: BaseException) -> bool:
    # gloo's errors have no class of their own.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


def _speak_or_be_silent(store: Any, rank: int, error: BaseException) -> NoReturn:
    """End this rank; one that is not the first is silent if another says why all end."""
    if dist.is_torchelastic_launched() and threading.current_thread() is threading.main_thread():
        # The launcher ends all ranks when it finds that one is gone, and would cut this one's last
        # words short; it kills what does not end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 0:
        with suppress(dist.DistError):
            store.set(_ENDED, "")
        raise error
    try:
        store.wait([_ENDED], _SECONDS_TO_SPEAK)
        raise Silent(error)
    except dist.DistError:
        # Rank 0 goes on, or is gone: the first of the others to find that out says so.
        if isinstance(error, ChildProcessError) and _somebody_speaks(store):
            raise Silent(error) from None
    speak(error, rank)
    raise error


def _somebody_speaks(store: Any) -> bool:
    with suppress(dist.DistError):
        return int(store.add(_SPEAKING, 1)) > 1
    # The launcher, which kept the store, is gone too.
    return False


def _end_with_launcher() -> None:
    """End when the launcher is killed: nothing may write into a run directory after it."""
    if not dist.is_torchelastic_launched():
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

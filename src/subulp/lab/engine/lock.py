"""One process at a time in a run directory, with its workers."""

from __future__ import annotations

import fcntl
import os
import time
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Self

LOCK = ".lock"

# A process that was killed a moment ago may have workers that are about to notice.
_PATIENCE = 5.0


class Lock:
    """A lock on a folder, held until it is released and every process that has it is dead.

    The operating system releases it when its holders end, however they end. A worker process
    that is given it as an argument holds it too: nobody else writes while one is left over.

    Args:
        folder: The folder; it gets a file that is never removed.
        patience: Seconds to wait for another process (default: 5).

    Raises:
        BlockingIOError: Another process holds it.
    """

    def __init__(self, folder: Path, patience: float = _PATIENCE) -> None:
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    holder = os.pread(self._file, 100, 0).decode("ascii", "replace").strip()
                    os.close(self._file)
                    raise BlockingIOError(
                        f"{folder} is in use: the process {holder or '(unknown)'} trains there; "
                        "wait for it, or stop it"
                    ) from None
            time.sleep(0.1)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release it; workers that have it still hold it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Into a worker process, while it is started."""
        return _inherited, (reduction.DupFd(self._file),)


def _inherited(handle: Any) -> Lock:
    lock = object.__new__(Lock)
    lock._file = handle.detach()
    return lock

# mypy: allow-untyped-calls, allow-untyped-decorators
"""Faults that only a GPU sees, told to the host without its waiting.

A kernel that finds bad numbers writes what it found into memory of the host, and those that would
change something look first whether any was found. The host reads that memory whenever it launches
something: an error is raised by a later call than the one it is about, or by that one if launches
are waited for (``CUDA_LAUNCH_BLOCKING=1``), and where kernels are interpreted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
import triton
import triton.language as tl

WORDS, NUMBERS = 8, 5
"""int64 words of a record, of which so many are used: what was found, 0 for nothing, and what the
message needs."""

_LATE = "a GPU found it in an earlier call: CUDA_LAUNCH_BLOCKING=1 has that call raise it"

Describe = Callable[[int, Sequence[int]], Exception]
"""From what was found, and its numbers, to the error."""

_DESCRIBE: dict[int, Describe] = {}


def tell(kinds: Iterable[int], describe: Describe) -> None:
    """Have ``describe`` make the errors of some kinds of faults, which no other operation has.

    One record serves all operations of a device: one may come by a fault that another has found.
    """
    for kind in kinds:
        assert kind not in _DESCRIBE, f"two operations have faults of kind {kind}"
        _DESCRIBE[kind] = describe


class Record:
    """The first fault of a device that no error has told of yet.

    Attributes:
        words: int64 ``(8,)``, in memory of the host that the device writes to.
        found: int32 ``(1,)`` on the device: not 0 from the fault on until the host has raised it.
        is_late: Whether launches are not waited for, so that a later call raises it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        launches_wait = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        self.is_late = device.type == "cuda" and not launches_wait
        self.words = torch.zeros(WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.found = torch.zeros(1, dtype=torch.int32, device=device)
        # Read without torch, whose tensors cost a microsecond.
        self._words = self.words.numpy()

    def check(self) -> None:
        """Raise the error of a fault that was found.

        Nothing is waited for, unless there is one.
        """
        if not self._words[0]:
            return
        if self.device.type == "cuda":
            # Until all of its words are written.
            torch.cuda.synchronize(self.device)
        kind, *numbers = self._words[:NUMBERS].tolist()
        self._words[:] = 0
        self.found.zero_()
        error = _DESCRIBE[kind](kind, numbers)
        if self.is_late:
            error = type(error)(f"{error} ({_LATE})")
        raise error

    def check_launched(self) -> None:
        """Raise the error of a fault of the launches just made, if they were waited for."""
        if not self.is_late:
            self.check()


@cache
def record(device: torch.device) -> Record:
    """The record of a device."""
    return Record(device)


@triton.jit
def report(words, found, kind, a, b, c, d):  # type: ignore[no-untyped-def]
    """Tell of a fault, with four numbers, unless one is told of already."""
    if tl.atomic_cas(found, 0, 1) == 0:
        word = tl.arange(0, 8)
        number = tl.where(word == 0, kind, tl.where(word == 1, a, b)).to(tl.int64)
        number = tl.where(word == 3, c, tl.where(word == 4, d, number))
        # One store: a record is never half another's.
        tl.store(words + word, number)

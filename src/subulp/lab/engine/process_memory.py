"""Memory of processes: a fresh one for each measurement, and what Linux says of them."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def kib(file: str, field: str) -> int:
    """A number of Linux's process or memory information, in KiB."""
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise ValueError(f"{file} has no {field}")


def alone(function: Callable[..., Any], *arguments: object) -> Any:
    """Call in a fresh process, which gives all of its memory back at its end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def give_back_at_once() -> None:
    """From now on the process gives freed memory back, from a mebibyte on, when it is freed.

    Else glibc keeps blocks of up to 32 MiB, and activations come to gigabytes that nothing uses.
    Without effect where there is no glibc.
    """
    mmap_threshold = -3
    _set_allocator(mmap_threshold, 1 << 20)


def keep_freed() -> None:
    """From now on freed memory stays with the process, as with an allocator that caches.

    Or else each large result pays for its pages anew, which can take longer than what fills them:
    some results and not others, by where in memory they come to lie. Without effect where there is
    no glibc.
    """
    trim_threshold, mmap_max = -1, -4
    _set_allocator(trim_threshold, -1)
    _set_allocator(mmap_max, 0)


def _set_allocator(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(option, value)

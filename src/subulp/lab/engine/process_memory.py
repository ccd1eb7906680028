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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mmap_threshold = -3
        mallopt(mmap_threshold, 1 << 20)

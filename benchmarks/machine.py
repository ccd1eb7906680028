"""What a benchmark's record says about where it ran, and what it asks of the process."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from subulp.ops.native import isa_name


def describe(packages: tuple[str, ...] = ("torch-optimi", "torchao")) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "processor": _processor("model name") or platform.processor(),
        # Clouds name processors of several generations alike: the family and model tell them apart.
        "family": _processor("cpu family"),
        "model": _processor("model"),
        "instructions": isa_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("subulp", "torch", *packages)},
    }


def keep_memory() -> None:
    """Freed memory stays with the process, as with an allocator that caches.

    Or else each large result pays for its pages anew, which can take longer than what fills them:
    some methods' results and not others', by where in memory they come to lie, while the target of
    a copy is there from the start. Without effect where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4
        mallopt(trim_threshold, -1)
        mallopt(mmap_max, 0)


def _processor(field: str) -> str | None:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

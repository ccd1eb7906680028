"""The machine of a run, for its record."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from ...ops.backend import choose
from ...ops.native import isa_name, library


def available_cores() -> int:
    """Cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def check_kernels(device: torch.device) -> None:
    """Load the kernels that a run will use, before it begins.

    Raises:
        ValueError: They do not load, or ``SUBULP_BACKEND`` is unknown; the message has the remedy.
    """
    if choose(device).backend != "cpu":
        return
    try:
        library()
    except RuntimeError as error:
        chosen = os.environ.get("SUBULP_LIBRARY")
        named = "" if chosen is None else f"SUBULP_LIBRARY={chosen}: "
        raise ValueError(f"{named}{error}") from error


def describe_machine() -> dict[str, Any]:
    """What a run is computed with and by, as plain JSON, without a host's name."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": _processor(),
        "instructions": _instructions(),
        "cores": available_cores(),
        "memory_bytes": _memory(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _instructions() -> str | None:
    """The instruction set of the kernels; ``None`` where there are none."""
    try:
        return isa_name()
    except (RuntimeError, ValueError):
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None

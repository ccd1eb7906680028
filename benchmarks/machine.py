"""What a benchmark's record says about where it ran."""

from __future__ import annotations

import datetime
import os
import platform
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

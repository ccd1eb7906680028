# mypy: allow-untyped-calls
"""Which configuration a kernel is launched with: measured once where that is asked for.

A kernel has a small table of configurations, which change how long it takes and none of its bits:
tiles along axes that nothing is summed over, warps, stages. The first one of a table runs unless
another has been measured to be faster: in this process, or in an earlier one that has kept it on
disk. With ``SUBULP_TUNE=1`` a kernel is measured when it is first launched with new sizes or flags,
on scratch tensors: what a launch changes is nobody's.

On AMD's GPUs the units that multiply are chosen by the tile, so that bits would depend on it: there
the first one runs always.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from . import choices
from .choices import Configuration

Table = tuple[Configuration, ...]
Run = Callable[[Configuration], None]
"""A launch on scratch tensors."""
Timer = Callable[[Callable[[], None], torch.device], float]
"""Seconds of a call, on a device."""

_ROUNDS = 20
_FLUSHED_BYTES = 256 << 20

# What is faster by less than this may be slower next time.
_WORTH = 0.97


class TooLargeError(Exception):
    """There is no memory for scratch tensors."""


@dataclass(frozen=True)
class Choice:
    """A configuration and where it comes from.

    Attributes:
        name: The kernel, its flags and sizes, the device and Triton's version.
        configuration: The one that is launched.
        source: Where it comes from.
        is_final: Whether it stays, also when measuring is asked for.
    """

    name: str
    configuration: Configuration
    source: Literal["default", "file", "measured"]
    is_final: bool = True


_chosen: dict[Hashable, Choice] = {}
_files: dict[Path, dict[str, Configuration]] = {}
_fixed: dict[str, Configuration] = {}
# Autograd has a thread for each device.
_lock = threading.RLock()


def is_wanted() -> bool:
    """Whether kernels are to be measured: ``SUBULP_TUNE`` is 1.

    Raises:
        ValueError: It is neither empty nor 0 nor 1.
    """
    value = os.environ.get("SUBULP_TUNE", "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"SUBULP_TUNE={value!r} is unknown: 1 measures kernels when they are first launched, 0 "
            "or nothing measures none"
        )
    return value == "1"


def choose(
    kernel: str,
    table: Table,
    flags: Mapping[str, Hashable],
    device: torch.device,
    scratch: Callable[[], Run],
) -> Configuration:
    """The configuration to launch a kernel with.

    Nothing is read from disk and nothing is waited for once the same has been asked before.

    Args:
        kernel: Its name.
        table: Its configurations, the default first.
        flags: What else decides how fast it is: constexpr arguments, and sizes, see
            :func:`rounded`.
        device: Of the launch.
        scratch: Makes a launch on scratch tensors, each time with a given configuration; may raise
            :class:`TooLargeError`. Not called unless the kernel is measured.

    Raises:
        ValueError: ``SUBULP_TUNE`` is unknown, or ``SUBULP_CACHE`` is a file.
    """
    if kernel in _fixed:
        return _fixed[kernel]
    if device.type != "cuda" or torch.version.hip is not None:
        return table[0]
    key = kernel, tuple(flags.items()), device
    choice = _chosen.get(key)
    if choice is None or (not choice.is_final and is_wanted()):
        with _lock:
            # Unless another thread has done it meanwhile.
            if _chosen.get(key) is choice:
                _chosen[key] = _look_up(kernel, table, flags, device, scratch)
            choice = _chosen[key]
    return choice.configuration


def chosen() -> list[Choice]:
    """What this process has launched so far, by name."""
    return sorted(_chosen.values(), key=lambda choice: choice.name)


def forget() -> None:
    """Forget what this process knows, not what is on disk."""
    with _lock:
        _chosen.clear()
        _files.clear()


@contextlib.contextmanager
def fixed(kernel: str, configuration: Configuration) -> Iterator[None]:
    """Launch a kernel with a configuration whatever is chosen: for tests of what it changes."""
    before = dict(_fixed)
    _fixed[kernel] = configuration
    try:
        yield
    finally:
        _fixed.clear()
        _fixed.update(before)


def rounded(size: int, most: int = 1 << 40) -> int:
    """A size as names have it: the next power of two. Sizes from ``most`` on are one."""
    return min(1 << max(size - 1, 0).bit_length(), most)


def share_of_memory(device: torch.device) -> int:
    """Bytes that scratch tensors may take: half of what is free."""
    free, _ = torch.cuda.mem_get_info(device)
    return free // 2


def _look_up(
    kernel: str,
    table: Table,
    flags: Mapping[str, Hashable],
    device: torch.device,
    scratch: Callable[[], Run],
) -> Choice:
    wanted, file = is_wanted(), choices.path()
    name = _name(kernel, flags, device)
    if file not in _files:
        _files[file] = choices.read(file)
    kept = _files[file].get(name)
    if kept in table:
        return Choice(name, table[table.index(kept)], "file")
    # A graph that is being captured would replay the measurement.
    if not wanted or torch.cuda.is_current_stream_capturing():
        return Choice(name, table[0], "default", is_final=False)
    try:
        best = _fastest(table, device, scratch)
    except (TooLargeError, torch.OutOfMemoryError):
        warnings.warn(
            f"{kernel} is not measured: there is no memory for scratch tensors; it runs in its "
            "default configuration",
            RuntimeWarning,
            stacklevel=2,
        )
        return Choice(name, table[0], "default")
    _files[file][name] = best
    choices.add(file, name, best)
    return Choice(name, best, "measured")


def _name(kernel: str, flags: Mapping[str, Hashable], device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    gpu = f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"
    written = ", ".join(f"{flag}={value}" for flag, value in flags.items())
    return f"{kernel}: {written}; {gpu}; Triton {triton.__version__}"


def _fastest(table: Table, device: torch.device, scratch: Callable[[], Run]) -> Configuration:
    """The fastest configuration of a table, unless the first one is nearly as fast."""
    seconds: list[float] = []
    with torch.no_grad():
        run = scratch()
        for configuration in table:
            try:
                seconds.append(timer(partial(run, configuration), device))
            except (OutOfResources, PTXASError):
                # This device has too few registers or too little shared memory.
                seconds.append(float("inf"))
    best = min(range(len(table)), key=seconds.__getitem__)
    return table[best if seconds[best] < _WORTH * seconds[0] else 0]


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """The median of some rounds, by the device's own clock."""
    with torch.cuda.device(device):
        # Compiled, and at the clock rates that it will have.
        for _ in range(3):
            call()
        # Between rounds caches are emptied; it takes longer than the host to launch the next one.
        flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_ROUNDS)]
        for first, last in pairs:
            flushed.zero_()
            first.record()
            call()
            last.record()
        torch.cuda.synchronize(device)
        milliseconds = [float(first.elapsed_time(last)) for first, last in pairs]
        return statistics.median(milliseconds) / 1e3


timer: Timer = _seconds
"""What measures; tests replace it."""

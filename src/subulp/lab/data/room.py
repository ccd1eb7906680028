"""Memory: how much there is, and one error for what would not fit, before it is allocated."""

from __future__ import annotations

import os
from pathlib import Path

_MEMORY_INFO = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_GROUP_ROOT = Path("/sys/fs/cgroup")
# A limit that says that there is none.
_NO_LIMIT = 1 << 60


def available_memory() -> int | None:
    """Bytes that this process can still allocate: the machine's, or what its group may have.

    Returns:
        The bytes; ``None`` where the system does not say.
    """
    found = [n for n in (_of_machine(), _of_group()) if n is not None]
    return min(found, default=None)


def check_room(what: str, needed: int, remedy: str, there: int | None = None) -> None:
    """Refuse what would not fit into memory.

    Args:
        what: What needs the memory, the beginning of the message.
        needed: Bytes that it needs, at the very least.
        remedy: What to do, the end of the message.
        there: Bytes that are there; ``None`` asks the system (default: ``None``).

    Raises:
        ValueError: They are not there; the message has both numbers of bytes.
    """
    there = available_memory() if there is None else there
    if there is None or needed <= there:
        return
    raise ValueError(
        f"{what} needs at least {needed:,} bytes of memory ({size_text(needed)}), and {there:,} "
        f"({size_text(there)}) are available: {remedy}"
    )


def size_text(count: float) -> str:
    """Bytes in the unit that suits them, as in ``3.2 GiB``."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:,.0f} {units[0]}" if not power else f"{count:,.1f} {units[power]}"


def _of_machine() -> int | None:
    try:
        for line in _MEMORY_INFO.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _of_group() -> int | None:
    """What the process's control group, of either version, leaves below its limit."""
    try:
        lines = _GROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        controllers, _, name = line.partition(":")[2].partition(":")
        if controllers not in ("", "memory"):
            continue
        files = (
            (_GROUP_ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else (_GROUP_ROOT, "memory.max", "memory.current")
        )
        root, limit_file, usage_file = files
        folder = root / name.lstrip("/")
        # A container may see its group as the root.
        for place in (folder, root):
            limit, usage = _number(place / limit_file), _number(place / usage_file)
            if limit is not None and usage is not None and limit < _NO_LIMIT:
                left.append(max(0, limit - usage + _reclaimable(place)))
                break
    return min(left, default=None)


def _reclaimable(group: Path) -> int:
    """Bytes of files in the group's memory, which it gives up when it needs them."""
    try:
        for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

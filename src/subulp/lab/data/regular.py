"""Opening files that somebody else has named: regular files, never pipes or devices.

Reading a pipe may wait for ever, and a device such as ``/dev/zero`` has no end.
"""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some editors begin a text in UTF-8 with: it belongs to no line, and is left out."""


class NotRegularError(ValueError):
    """A path names a pipe, a device, a socket or a folder."""


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> FileIO:
    """Open a file to read it, unbuffered.

    Raises:
        NotRegularError: It is a pipe, a device, a socket or a folder.
        OSError: There is no such file, or it cannot be read.
    """
    # Opening a pipe without a writer would wait for one.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(handle).st_mode)
        os.set_blocking(handle, True)
        return FileIO(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(path: Path) -> None:
    """Raise what :func:`open_regular` would raise, for those who open by name."""
    open_regular(path).close()


def read_regular(path: Path) -> bytes:
    """All bytes of a file.

    Raises:
        NotRegularError, OSError: See :func:`open_regular`.
    """
    with open_regular(path) as file:
        return file.readall()


def _check(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "no regular file")
    raise NotRegularError(f"{path} is {kind}: give a regular file")

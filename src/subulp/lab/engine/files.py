"""Files that are complete or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

_UNFINISHED = ".unfinished"


class UnwritableError(OSError):
    """A file of an unfinished run could not be written; what was there is unchanged."""

    def __str__(self) -> str:
        return str(self.strerror)

    @classmethod
    def of(cls, what: str, error: OSError) -> Self:
        """The error about a file from that of the system."""
        code = error.errno or errno.EIO
        return cls(code, f"{what} cannot be written: {error.strerror or error}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a file that becomes ``path`` when the block ends well.

    Whatever ends the block early, ``path`` is what it was before. A killed process leaves the file
    under the other name, which nothing reads.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: The folder of ``path`` is missing.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: {path.parent} is not a folder")
    # Several processes may write the same path: each its own copy, and the last one stays.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, all of it or nothing."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def remove_unfinished(folder: Path) -> None:
    """Remove what processes that were killed have left of :func:`replacing` in a folder."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink()

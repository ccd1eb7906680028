"""The terminal: what is printed is text, whatever brackets and colons a path or a line has.

Nothing that is printed ends a run. Nobody may be there to read it: the reader of a pipe is gone,
the log's disk is full, or the stream was closed before the program began.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import IO, cast

from rich.console import Console


class _Stream(io.TextIOBase):
    """A standard stream, whichever that is at the time, without an error where nobody reads.

    Args:
        name: ``"stdout"`` or ``"stderr"``.
        full: Whether a full disk is no error either.
    """

    def __init__(self, name: str, *, full: bool) -> None:
        super().__init__()
        self._name = name
        self._forgiven = (errno.EPIPE, *((errno.ENOSPC, errno.EIO) if full else ()))

    @property
    def _stream(self) -> IO[str] | None:
        stream: IO[str] | None = getattr(sys, self._name)
        # While bars move, rich has put a stream of its own there, which writes to the console.
        stream = getattr(stream, "rich_proxied_file", stream)
        return None if stream is None or stream.closed else stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream; UTF-8 of one that is closed."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether somebody sits there."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor."""
        if self._stream is None:
            raise io.UnsupportedOperation("the stream is closed")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write, or do without."""
        stream = self._stream
        if stream is not None:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                narrow = text.encode(self.encoding, "backslashreplace")
                stream.write(narrow.decode(self.encoding))
            except OSError as error:
                self._forgive(error, stream)
        return len(text)

    def flush(self) -> None:
        """Flush, or do without."""
        stream = self._stream
        if stream is not None:
            try:
                stream.flush()
            except OSError as error:
                self._forgive(error, stream)

    def _forgive(self, error: OSError, stream: IO[str]) -> None:
        if error.errno not in self._forgiven:
            raise error
        # Nothing is left for the interpreter to flush at its end.
        with open(os.devnull, "w", encoding="utf-8") as null:
            os.dup2(null.fileno(), stream.fileno())


STDOUT = cast(IO[str], _Stream("stdout", full=False))
"""Results: a reader that has gone, such as ``head``, has seen enough; a full disk is an error."""

STDERR = cast(IO[str], _Stream("stderr", full=True))
"""Progress and messages, which no training has to fail for."""


def errors(*, quiet: bool = False) -> Console:
    """Standard error, for progress and messages."""
    return Console(
        file=STDERR, highlight=False, soft_wrap=True, markup=False, emoji=False, quiet=quiet
    )


def output() -> Console:
    """Standard output; a file has no width, so a table there gets the width that it needs."""
    console = Console(file=STDOUT, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(file=STDOUT, width=200, markup=False, emoji=False)


def pages() -> Console:
    """Standard output for texts such as those of ``--help``, which are broken into lines."""
    return Console(file=STDOUT)


def show(text: str) -> None:
    """A line of results, whole; one may be a document."""
    print(text, file=STDOUT, flush=True)


def say(text: str) -> None:
    """A line for whoever waits, such as an error."""
    print(text, file=STDERR, flush=True)

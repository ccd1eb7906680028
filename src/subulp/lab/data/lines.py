"""Large files line by line: whole lines in blocks, and single lines by their number.

Lines end with ``\\n`` alone or ``\\r\\n``, and the last one may lack its end. A byte-order mark
before the first one is left out.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NoReturn, cast, overload

import numpy as np
from numpy.typing import NDArray

from .regular import BYTE_ORDER_MARK, open_regular

Int64s = NDArray[np.int64]
Indices = Sequence[int] | Int64s


BLOCK = 4 << 20
"""Bytes read at a time: large enough to be parsed fast, small beside everything else."""

LONGEST_LINE = 16 << 20
"""Bytes of a line. A longer one is no text but damage, and would have to fit into memory."""

_SHOWN = 40
_ITERATED = 4096


def checked_indices(indices: Indices, count: int) -> Int64s:
    """Instances as int64 ``(batch,)``.

    Raises:
        IndexError: One is negative or not below ``count``.
    """
    chosen = np.asarray(indices, dtype=np.int64)
    wrong = chosen[(chosen < 0) | (chosen >= count)]
    if len(wrong):
        raise IndexError(f"instance {wrong[0]} is out of range: there are {count}, from 0")
    return chosen


def fail(path: Path, line: int, message: str) -> NoReturn:
    """Raise ValueError with the place ``file:line``."""
    raise ValueError(f"{path}:{line}: {message}")


def shown(raw: bytes) -> str:
    """A piece of a file for a message: quoted, short and without control characters."""
    text = raw[:_SHOWN].decode("utf-8", "replace")
    return repr(text) + (" ..." if len(raw) > _SHOWN else "")


def find(folder: Path, *names: str) -> Path | None:
    """The first of the files that exists, plain or with ``.gz`` appended, in this order."""
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """A file, decompressed if it is named ``.gz``, in blocks that end where a line ends.

    Yields:
        The number of the first line, from 1, and the lines with their ends; never empty.

    Raises:
        ValueError: A line is longer than ``LONGEST_LINE``, or the file is not whole gzip, or no
            regular file.
    """
    line, rest, begun = 1, b"", False
    with _opened(path) as file:
        while True:
            try:
                read = file.read(BLOCK)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                fail(
                    path,
                    line,
                    f"from here on not a complete gzip file ({error}): get it again, or give it a "
                    "name without .gz",
                )
            text, begun = read if begun else read.removeprefix(BYTE_ORDER_MARK), True
            cut = text.rfind(b"\n") + 1
            if cut:
                block = rest + text[:cut]
                # A block is at most one such line longer than what was read.
                if block.index(b"\n") > LONGEST_LINE:
                    _too_long(path, line)
                yield line, block
                line += block.count(b"\n")
                rest = text[cut:]
            else:
                rest += text
            if len(rest) > LONGEST_LINE:
                _too_long(path, line)
            if not read:
                break
    if rest:
        yield line, rest


def count_lines(block: bytes) -> int:
    """Lines of a block, empty ones included; the last one may lack its end."""
    return block.count(b"\n") + (not block.endswith(b"\n"))


def single_lines(block: bytes) -> list[bytes]:
    """The lines of a block, at least one, without ``\\n`` at their ends."""
    # Not splitlines(), which also splits at \r, \v and \f.
    return block.removesuffix(b"\n").split(b"\n")


def _too_long(path: Path, line: int) -> NoReturn:
    fail(path, line, f"the line is longer than {LONGEST_LINE >> 20} MiB: is the file damaged?")


def _opened(path: Path) -> BinaryIO:
    file = open_regular(path)
    return cast(BinaryIO, _Unzipped(file) if path.suffix == ".gz" else file)


class _Unzipped(gzip.GzipFile):
    """A compressed file that closes what it reads."""

    def __init__(self, file: FileIO) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


class TextLines(Sequence[str]):
    """The lines of a UTF-8 file as texts, read from the disk when they are asked for.

    Memory holds 8 bytes a line. A compressed file cannot be read from its middle, so it is
    decompressed once into a temporary file without a name: whatever ends the process, the disk
    gets its space back.

    Args:
        path: The file, plain or ``.gz``.
        cache: Folder for the temporary file; ``None`` is the system's (default: ``None``).
        limit: Lines at which reading stops, so that a wrong file is not read to its end for
            nothing; ``None`` reads all (default: ``None``).

    Attributes:
        digest: SHA-256 of what was read, in hexadecimal digits.

    Raises:
        ValueError: The file is not UTF-8 or not whole gzip, or a line is too long.
        OSError: The disk has no room for the decompressed file.
    """

    def __init__(self, path: Path, cache: Path | None = None, limit: int | None = None) -> None:
        self._path = path
        self._file = _temporary(cache) if path.suffix == ".gz" else _handle(path)
        weakref.finalize(self, os.close, self._file)
        # A temporary copy begins behind the mark.
        marked = os.pread(self._file, len(BYTE_ORDER_MARK), 0) == BYTE_ORDER_MARK
        position = len(BYTE_ORDER_MARK) if marked else 0
        ends = [np.full(1, position, np.int64)]
        lines = 0
        total = hashlib.sha256()
        for line, block in whole_lines(path):
            _check_utf8(path, line, block)
            total.update(block)
            if path.suffix == ".gz":
                self._keep(block, cache)
            found = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
            if not block.endswith(b"\n"):
                found = np.append(found, len(block))
            ends.append(found + position)
            position += len(block)
            lines += len(found)
            if limit is not None and lines >= limit:
                break
        self._starts: Int64s = np.concatenate(ends)
        self.digest = total.hexdigest()

    @property
    def path(self) -> Path:
        """Where the lines come from."""
        return self._path

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _ITERATED):
            stop = min(start + _ITERATED, len(self))
            raw = self._span(start, stop)
            cuts = (self._starts[start : stop + 1] - self._starts[start]).tolist()
            for begin, end in pairwise(cuts):
                yield _text(raw[begin:end])

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        chosen = range(len(self))[index]
        return self.read([chosen])[0] if isinstance(chosen, int) else self.read(chosen)

    def read(self, indices: Indices) -> list[str]:
        """The texts of the lines ``indices``, from 0, without their ends."""
        return [_text(raw) for raw in self.read_bytes(indices)]

    def read_bytes(self, indices: Indices) -> list[bytes]:
        """The same, with their ends and undecoded."""
        chosen = checked_indices(indices, len(self)).tolist()
        return [self._span(index, index + 1) for index in chosen]

    def _span(self, start: int, stop: int) -> bytes:
        begin, end = int(self._starts[start]), int(self._starts[stop])
        # Not seek and read: the position of a descriptor is shared with forked processes.
        raw = os.pread(self._file, end - begin, begin)
        if len(raw) != end - begin:
            fail(self._path, start + 1, "the file has become shorter since it was opened")
        return raw

    def _keep(self, block: bytes, cache: Path | None) -> None:
        view = memoryview(block)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                error.errno,
                f"no room to decompress {self._path} in {cache or tempfile.gettempdir()}: "
                "decompress it by hand, or give a cache folder on a larger disk",
            ) from None


def _handle(path: Path) -> int:
    with open_regular(path) as file:
        return os.dup(file.fileno())


def _temporary(folder: Path | None) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _check_utf8(path: Path, line: int, block: bytes) -> None:
    try:
        block.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(
            path,
            line + block.count(b"\n", 0, error.start),
            f"not UTF-8: byte {block[error.start]:#04x}; convert the file to UTF-8",
        )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")

"""The objects of a JSON file of any size, one after the other.

The file is one array of objects, or objects alone (JSON lines); commas between them may be missing.
An object may span lines, and only one at a time is in memory. The standard library decodes an
object from the middle of a text at the speed of C, so no streaming parser is needed.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from ..data.regular import open_regular

BLOCK = 1 << 20
"""Bytes read at a time."""

LONGEST = 16 << 20
"""Characters of an object: a longer one is damage, and would have to fit into memory."""

_DECODE = json.JSONDecoder().raw_decode
_WHITESPACE = " \t\r\n"
_SHOWN = 40


class JsonObjects:
    """The objects of a file, to go through once.

    Args:
        path: The file, plain or ``.gz``.
        on_read: Called after each block with the bytes of the file read so far, compressed ones if
            it is compressed (default: nothing).
    """

    def __init__(self, path: Path, on_read: Callable[[int], None] = lambda _: None) -> None:
        self._path = path
        self._on_read = on_read
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        # A window on the text, and the place in it.
        self._text = ""
        self._at = 0
        self._ended = False
        # Where the window begins.
        self._line, self._byte = 1, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Decode one object after the other.

        Raises:
            ValueError: The file is not JSON, holds something other than objects, is not UTF-8, or
                is not whole; the message begins with ``file:line``.
        """
        with open_regular(self._path) as raw:
            compressed = self._path.suffix == ".gz"
            self._raw = raw
            self._file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if compressed else raw
            array = self._take("[")
            while self._peek() and not (array and self._peek() == "]"):
                if self._peek() != "{":
                    self.fail("expected a JSON object")
                value, end = self._decode()
                yield value
                self._at = end
                self._take(",")
            if array and not self._take("]"):
                self.fail("the file ends inside its array: it is incomplete")
            if self._peek():
                self.fail("expected nothing after the end of the array")

    def fail(self, message: str) -> NoReturn:
        """Raise ValueError with the place where the present object begins.

        The place is ``file:line``, with the byte offset from 0: a file may be one long line.
        """
        before = self._text[: self._at]
        line, byte = self._line + before.count("\n"), self._byte + len(before.encode())
        found = repr(self._text[self._at : self._at + _SHOWN])
        raise ValueError(f"{self._path}:{line}: {message}, at byte {byte}: {found}") from None

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self._at < len(self._text):
                character = self._text[self._at]
                if character not in _WHITESPACE:
                    return character
                self._at += 1
            if not self._more():
                return ""

    def _take(self, character: str) -> bool:
        """Move past ``character`` if it comes next."""
        found = self._peek() == character
        self._at += found
        return found

    def _decode(self) -> tuple[dict[str, Any], int]:
        """The object that begins here, and where it ends."""
        while True:
            try:
                return cast(tuple[dict[str, Any], int], _DECODE(self._text, self._at))
            except RecursionError as error:
                self.fail(f"expected a JSON object ({error})")
            except ValueError as error:
                # A truncated object looks like a wrong one until the file ends.
                if len(self._text) - self._at > LONGEST or not self._more():
                    # The line and column in the error's own text are those of the window.
                    self.fail(f"expected a complete JSON object ({getattr(error, 'msg', error)})")

    def _more(self) -> bool:
        """Move the window on, and read a block into it; False at the end of the file."""
        if self._ended:
            return False
        used, self._text, self._at = self._text[: self._at], self._text[self._at :], 0
        self._line += used.count("\n")
        self._byte += len(used.encode())
        try:
            block = self._file.read(BLOCK)
            self._ended = not block
            self._text += self._decoder.decode(block, final=self._ended)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            self.fail(f"from here on not a complete gzip file ({error})")
        except UnicodeDecodeError as error:
            self.fail(f"from here on not UTF-8 ({error.reason})")
        self._on_read(self._raw.tell())
        return True

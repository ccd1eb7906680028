"""Text as tokens: characters or bytes, a training part and a validation part."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.regular import BYTE_ORDER_MARK, NotRegularError, open_regular
from ...data.room import available_memory, check_room

Level = Literal["char", "byte", "bpe"]

BUNDLED = "tinyshakespeare.txt.gz"
DEFINITIONS = "definitions"
"""The name of the second bundled text: the training texts of ``subulp train xmc``."""

VALIDATION_SHARE = 0.1

_CODE_POINTS = 0x110000
_AT_ONCE = 1 << 24
# The text twice while it is decompressed, then with its tokens.
_BYTES_OF_ONE = 4


@dataclass(frozen=True)
class Text:
    """A tokenised text.

    Attributes:
        name: What it is called in tables and files.
        train: The first 90 % of the tokens, int16 or int32, one dimension.
        validation: The rest.
        vocabulary: The number of different tokens.
        unit: ``"characters"``, ``"bytes"`` or ``"tokens"``, for messages.
        characters: The character of each token; ``None`` where tokens are something else.
        tokenizer: What the tokens were made by, see :mod:`.bpe`; ``None`` for characters and bytes.
    """

    name: str
    train: Tensor
    validation: Tensor
    vocabulary: int
    unit: str
    characters: str | None = None
    tokenizer: str | None = None

    def check_context(self, context: int) -> None:
        """Raise ValueError unless both parts hold one context and the token that follows it."""
        shortest = min(self.train.numel(), self.validation.numel())
        if shortest > context:
            return
        total = self.train.numel() + self.validation.numel()
        needed = int((context + 1) / VALIDATION_SHARE) + 1
        raise ValueError(
            f"data={self.name} has {total} {self.unit}, the last 10 % of them ({shortest}) for "
            f"validation: too short for one context={context} and the {self.unit[:-1]} after it; "
            f"give a text of at least {needed} {self.unit}, or a smaller context"
        )


def load_text(
    path: str | Path | None = None, level: Level = "char", vocabulary: int | None = None
) -> Text:
    """Read and tokenise a text.

    Args:
        path: A text file, also gzip-compressed (``.gz``); ``None`` is the bundled text, one
            megabyte of Shakespeare, and the string ``"definitions"`` another one, WordNet's
            definitions of words. A file of that name is given as a ``Path`` (default: ``None``).
        level: ``"char"`` numbers the different characters of a UTF-8 text, ``"byte"`` takes the
            256 byte values, ``"bpe"`` learns pairs from the first 90 % of a UTF-8 text (default:
            ``"char"``).
        vocabulary: Number of tokens to learn at the level ``"bpe"`` (default: ``None``).

    Returns:
        The tokens: the first 90 % to train, the rest to validate.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is a folder, a pipe or a device, is empty, does not fit into memory, is
            not gzip despite its name, or is not UTF-8 at the ``"char"`` level.
    """
    name, raw = read_text(path)
    if level == "byte":
        return _split(name, byte_tokens(raw), 256, "bytes")
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    if level == "bpe":
        return _pairs(name, raw, vocabulary or 0)
    characters = characters_of(raw, f"data={name}")
    tokens = character_tokens(raw, characters, f"data={name}")
    return _split(name, tokens, len(characters), "characters", characters)


def _split(
    name: str, tokens: Tensor, vocabulary: int, unit: str, characters: str | None = None
) -> Text:
    cut = tokens.numel() - int(tokens.numel() * VALIDATION_SHARE)
    return Text(name, tokens[:cut], tokens[cut:], vocabulary, unit, characters)


def _pairs(name: str, raw: bytes, vocabulary: int) -> Text:
    # A second to import, which other levels need not wait for.
    from . import bpe  # noqa: PLC0415

    text = decoded(raw, f"data={name}")
    # Nothing is learned from what validates.
    cut = len(text) - int(len(text) * VALIDATION_SHARE)
    learned = bpe.learn(text[:cut], vocabulary)
    train, validation = (bpe.tokens_of(part, learned) for part in (text[:cut], text[cut:]))
    return Text(name, train, validation, bpe.size_of(learned), "tokens", tokenizer=learned)


def decoded(raw: bytes, name: str) -> str:
    """A UTF-8 text.

    Raises:
        ValueError: It is not UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}; "
            "use level=byte (--level byte) or convert the file to UTF-8"
        ) from None


# Tokens -----------------------------------------------------------------------------------------


def byte_tokens(raw: bytes) -> Tensor:
    """Bytes as int16."""
    return torch.from_numpy(np.frombuffer(raw, np.uint8).astype(np.int16))


def characters_of(raw: bytes, name: str) -> str:
    """The different characters of a UTF-8 text in their order: a character's place is its token.

    Raises:
        ValueError: The text is not UTF-8.
    """
    seen = np.zeros(_CODE_POINTS, bool)
    for points in _code_points(raw, name):
        seen[points] = True
    return "".join(map(chr, np.flatnonzero(seen).tolist()))


def character_tokens(raw: bytes, characters: str, name: str) -> Tensor:
    """The tokens of a UTF-8 text, int16 or int32.

    Args:
        raw: The text.
        characters: The characters that there are, ascending.
        name: What the text is called in messages.

    Raises:
        ValueError: The text is not UTF-8, or has another character.
    """
    # Short integers: a megabyte of text should not take eight in memory.
    dtype = np.int16 if len(characters) <= np.iinfo(np.int16).max else np.int32
    numbers = np.full(_CODE_POINTS, -1, dtype)
    numbers[[ord(character) for character in characters]] = np.arange(len(characters), dtype=dtype)
    found = [np.zeros(0, dtype)]
    for points in _code_points(raw, name):
        tokens = numbers[points]
        unknown = tokens == -1
        if unknown.any():
            character = chr(int(points[np.argmax(unknown)]))
            raise ValueError(
                f"{name} has the character {character!r} (U+{ord(character):04X}), which the text "
                "that the model was trained on has not: leave it out"
            )
        found.append(tokens)
    return torch.from_numpy(np.concatenate(found))


def _code_points(raw: bytes, name: str) -> Iterator[NDArray[np.uint32]]:
    """The code points of a text, some at a time: memory holds the text once, and little more."""
    start = 0
    while start < len(raw):
        stop = min(start + _AT_ONCE, len(raw))
        # Not inside a character.
        while stop < len(raw) and raw[stop] & 0xC0 == 0x80 and stop > start + 1:
            stop -= 1
        try:
            part = raw[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            at = start + error.start
            raise ValueError(
                f"{name} is not UTF-8: byte {raw[at]:#04x} at offset {at}; "
                "use level=byte (--level byte) or convert the file to UTF-8"
            ) from None
        yield np.frombuffer(part.encode("utf-32-le"), np.uint32)
        start = stop


# Files ------------------------------------------------------------------------------------------


def read_text(path: str | Path | None) -> tuple[str, bytes]:
    """What a text is called in messages, and its bytes, decompressed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: See :func:`load_text`.
    """
    if path is None:
        name, raw = _bundled("tinyshakespeare", resources.files(__package__) / BUNDLED)
    elif path == DEFINITIONS:
        # What subulp train xmc ships with: each definition is a line.
        texts = resources.files(__package__.rpartition(".")[0]) / "xmc" / "readers"
        name, raw = _bundled(DEFINITIONS, texts / "wordnet_small" / "trn_X.txt.gz")
    else:
        name, raw = _read(Path(path))
    if not raw:
        raise ValueError(f"data={name} is empty: give a file with text")
    return name, raw


def _bundled(name: str, file: Traversable) -> tuple[str, bytes]:
    return f"{name} (bundled)", gzip.decompress(file.read_bytes())


def _read(path: Path) -> tuple[str, bytes]:
    try:
        with open_regular(path) as file:
            _check_room(path, os.fstat(file.fileno()).st_size, available_memory(), "")
            raw = file.readall() if path.suffix != ".gz" else _decompressed(path, file)
    except NotRegularError as error:
        reason = str(error).removesuffix("give a regular file")
        raise ValueError(f"data={reason}give a text file") from None
    except FileNotFoundError:
        raise FileNotFoundError(
            f"data={path} does not exist: give an existing text file, or leave data out for the "
            "bundled text"
        ) from None
    except PermissionError:
        raise PermissionError(
            f"data={path} cannot be read: permission denied; make the file readable"
        ) from None
    return str(path), raw


def _decompressed(path: Path, file: FileIO) -> bytes:
    there, found = available_memory(), bytearray()
    try:
        with gzip.GzipFile(fileobj=file) as unzipped:
            while part := unzipped.read(_AT_ONCE):
                found += part
                _check_room(path, len(found), there, " decompressed so far")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"data={path} is not a complete gzip file ({error}): decompress it, or give it a name "
            "without .gz"
        ) from None
    return bytes(found)


def _check_room(path: Path, size: int, there: int | None, state: str) -> None:
    what = f"data={path}, of {size:,} bytes{state},"
    check_room(what, _BYTES_OF_ONE * size, "give a smaller text", there)


class Batches:
    """Training batches in an order that the seed alone decides.

    Every precision of a seed draws from its own ``Batches``, so all of them see the same text in
    the same order.

    Args:
        tokens: The training part.
        batch_size: Sequences of a batch.
        context: Tokens of a sequence.
        seed: Seed of the generator that draws the offsets.
    """

    def __init__(self, tokens: Tensor, batch_size: int, context: int, seed: int) -> None:
        self._tokens = tokens
        self._batch_size = batch_size
        self._window = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, int64 ``(batch_size, context)`` each."""
        sequences = self.sequences()
        return sequences[:, :-1], sequences[:, 1:]

    def sequences(self) -> Tensor:
        """The next sequences, each with the token after it, int64 ``(batch_size, context + 1)``."""
        last = self._tokens.numel() - self._window.numel()
        offsets = torch.randint(last + 1, (self._batch_size, 1), generator=self._generator)
        return self._tokens[offsets + self._window].long()

    def state_dict(self) -> dict[str, Any]:
        """The place in the order."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a place."""
        self._generator.set_state(state_dict["generator"].clone())


def evaluation_batches(
    tokens: Tensor, batch_size: int, context: int
) -> list[tuple[Tensor, Tensor]]:
    """All of ``tokens`` once, in consecutive sequences: the same batches in every evaluation.

    The last tokens, which do not fill a sequence, are dropped.

    Returns:
        Inputs and targets, int64 ``(at most batch_size, context)`` each.
    """
    count = (tokens.numel() - 1) // context
    inputs = tokens[: count * context].long().view(count, context)
    targets = tokens[1 : count * context + 1].long().view(count, context)
    return list(zip(torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True))

"""Text as tokens: characters or bytes, a training part and a validation part."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Level = Literal["char", "byte"]

BUNDLED = "tinyshakespeare.txt.gz"
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """A tokenised text.

    Attributes:
        name: What it is called in tables and files.
        train: The first 90 % of the tokens, int16 or int32, one dimension.
        validation: The rest.
        vocabulary: The number of different tokens.
        unit: ``"characters"`` or ``"bytes"``, for messages.
    """

    name: str
    train: Tensor
    validation: Tensor
    vocabulary: int
    unit: str

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


def load_text(path: str | Path | None = None, level: Level = "char") -> Text:
    """Read and tokenise a text.

    Args:
        path: A text file, also gzip-compressed (``.gz``); ``None`` is the bundled text, one
            megabyte of Shakespeare (default: ``None``).
        level: ``"char"`` numbers the different characters of a UTF-8 text, ``"byte"`` takes the
            256 byte values (default: ``"char"``).

    Returns:
        The tokens: the first 90 % to train, the rest to validate.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is a folder, is empty, is not gzip despite its name, or is not UTF-8
            at the ``"char"`` level.
    """
    name, raw = _read_bundled() if path is None else _read(Path(path))
    if not raw:
        raise ValueError(f"data={name} is empty: give a file with text")
    if level == "byte":
        tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(torch.int16)
        return _split(name, tokens, 256, "bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data={name} is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}; "
            "use level=byte (--level byte) or convert the file to UTF-8"
        ) from None
    code_points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    characters, tokens = torch.unique(code_points, return_inverse=True)
    # Short integers: a megabyte of text should not take eight in memory.
    dtype = torch.int16 if characters.numel() <= torch.iinfo(torch.int16).max else torch.int32
    return _split(name, tokens.to(dtype), characters.numel(), "characters")


def _split(name: str, tokens: Tensor, vocabulary: int, unit: str) -> Text:
    cut = tokens.numel() - int(tokens.numel() * VALIDATION_SHARE)
    return Text(name, tokens[:cut], tokens[cut:], vocabulary, unit)


def _read_bundled() -> tuple[str, bytes]:
    compressed = resources.files(__package__).joinpath(BUNDLED).read_bytes()
    return "tinyshakespeare (bundled)", gzip.decompress(compressed)


def _read(path: Path) -> tuple[str, bytes]:
    if path.is_dir():
        raise ValueError(f"data={path} is a folder: give a text file")
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"data={path} does not exist: give an existing text file, or leave data out for the "
            "bundled text"
        ) from None
    except PermissionError:
        raise PermissionError(
            f"data={path} cannot be read: permission denied; make the file readable"
        ) from None
    if path.suffix != ".gz":
        return str(path), raw
    try:
        return str(path), gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(
            f"data={path} is not a complete gzip file ({error}): decompress it, or give it a name "
            "without .gz"
        ) from None


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
        last = self._tokens.numel() - self._window.numel()
        offsets = torch.randint(last + 1, (self._batch_size, 1), generator=self._generator)
        sequences = self._tokens[offsets + self._window].long()
        return sequences[:, :-1], sequences[:, 1:]

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

"""From texts to what an encoder takes: all that runs share of their encoders, and can be saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from ..data.xmc.dataset import TextPart
from ..files import replacing
from .config import XMCConfig
from .encoder import BagEncoder, Bags
from .features import Vocabulary
from .transformer import Tokens, TransformerEncoder, TransformerReader

Batch = Bags | Tokens
Encoder = BagEncoder | TransformerEncoder

SETTINGS = "encoder.json"
_VOCABULARY = "vocabulary.json"


class Reader(Protocol):
    """Texts to batches, and the encoder that takes them."""

    kind: ClassVar[str]
    """What the saved settings call it."""

    def read(self, texts: Sequence[str]) -> Batch:
        """A batch of texts, on the CPU."""

    def encoder(self, device: torch.device) -> Encoder:
        """A new encoder in FP32; what is random about it comes from torch's random state."""

    def settings(self) -> dict[str, Any]:
        """What :meth:`load` needs besides the files of :meth:`save`, as plain JSON."""

    def save(self, folder: Path) -> None:
        """Write files into a folder that exists."""

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError, TypeError: A file or a setting is not what was written.
        """


@dataclass(frozen=True, eq=False)
class BagReader:
    """Bags of the words and word pairs that the training texts have.

    Attributes:
        vocabulary: Known terms.
        width: See :class:`BagEncoder`, like what follows.
        layers: Residual layers.
        dropout: Share of the vector that is dropped while training.
    """

    vocabulary: Vocabulary
    width: int
    layers: int
    dropout: float

    kind: ClassVar[str] = "bag"

    @cached_property
    def weights(self) -> Tensor:
        """Inverse document frequency of each term, FP32 ``(terms,)``."""
        return torch.from_numpy(self.vocabulary.inverse_document_frequency())

    def read(self, texts: Sequence[str]) -> Bags:
        """Texts as bags."""
        ids, offsets = self.vocabulary.encode(texts)
        return Bags(torch.from_numpy(ids), torch.from_numpy(offsets))

    def encoder(self, device: torch.device) -> BagEncoder:
        """A new :class:`BagEncoder`."""
        return BagEncoder(self.weights, self.width, self.layers, self.dropout).to(device)

    def settings(self) -> dict[str, Any]:
        """Sizes of the encoder."""
        return {"width": self.width, "layers": self.layers, "dropout": self.dropout}

    def save(self, folder: Path) -> None:
        """Write the vocabulary."""
        with replacing(folder / _VOCABULARY) as path:
            self.vocabulary.save(path)

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Self:
        """Read the vocabulary."""
        return cls(Vocabulary.load(folder / _VOCABULARY), **settings)


_LOADERS: dict[str, Callable[[Path, dict[str, Any]], Reader]] = {
    BagReader.kind: BagReader.load,
    TransformerReader.kind: TransformerReader.load,
}


def make_reader(config: XMCConfig, train: TextPart) -> Reader:
    """The reader of a configuration, from the training texts alone.

    Raises:
        ValueError: The encoder is neither the bag nor a folder that can be used.
    """
    if config.encoder != BagReader.kind:
        return TransformerReader.open(
            Path(config.encoder),
            max_length=config.max_length,
            pooling=config.pooling,
            dropout=config.dropout,
        )
    vocabulary = Vocabulary.build(train.source, max_terms=config.max_terms)
    return BagReader(vocabulary, config.width, config.layers, config.dropout)


def save_reader(reader: Reader, folder: Path) -> None:
    """Write a reader into a folder, its settings last: with them, everything is there."""
    reader.save(folder)
    text = json.dumps({"encoder": reader.kind, **reader.settings()}, indent=2)
    with replacing(folder / SETTINGS) as path:
        path.write_text(text + "\n", encoding="utf-8")


def load_reader(folder: Path) -> Reader:
    """Read what :func:`save_reader` wrote.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file holds something else.
    """
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kind = settings.pop("encoder")
        return _LOADERS[kind](folder, settings)
    except (TypeError, KeyError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} holds no settings of an encoder ({error!r}): train again"
        ) from None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device."""
    return type(batch)(*(tensor.to(device) for tensor in batch))

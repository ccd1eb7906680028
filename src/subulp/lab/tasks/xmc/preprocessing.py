"""From texts or features to what an encoder takes: all that runs share, and can be saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from ...data.lines import Indices, TextLines
from ...engine.files import write_text
from ...engine.typed_files import read_json
from .config import XMCConfig
from .encoder import BagEncoder, Bags
from .presets import OutputLayer
from .readers.bags import BagLines, Features, read_feature_file
from .readers.dataset import BagSplit, TextSplit
from .transformer import Tokens, TransformerEncoder, TransformerPreprocessor
from .vocabulary import PLACES, KnownFeatures, Vocabulary

Batch = Bags | Tokens
Encoder = BagEncoder | TransformerEncoder

SETTINGS = "encoder.json"

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Known = TypeVar("Known", Vocabulary, KnownFeatures)


class Lines(Protocol[T_co]):
    """The instances of a file, checked, and read when they are asked for."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> T_co:
        """The instances of the lines ``indices``, from 0."""


class Preprocessor(Protocol[T]):
    """Instances to batches, and the encoder that takes them: texts, or :class:`Features`."""

    kind: ClassVar[str]
    """What the saved settings call it."""

    reads_features: ClassVar[bool]
    """Whether instances are features that the data set gives; otherwise they are texts."""

    def lines(self, path: Path) -> Lines[T]:
        """A file of new instances, one a line, plain or ``.gz``.

        Raises:
            ValueError: A line is not what the encoder reads; the message begins with ``file:line``.
        """

    def read(self, instances: T) -> Batch:
        """A batch of instances, on the CPU."""

    def sizes(self) -> tuple[int, int]:
        """Size of the encoder's output, and how many numbers its parameters are."""

    def encoder(self, device: torch.device) -> Encoder:
        """A new encoder in FP32; what is random about it comes from torch's random state."""

    def sources(self) -> list[str]:
        """Digests of the files that it is made of, besides the data."""

    def settings(self) -> dict[str, Any]:
        """What :meth:`load` needs besides the files of :meth:`save`, as plain JSON."""

    def save(self, folder: Path) -> None:
        """Write files into a folder that exists."""

    def files(self, folder: Path) -> list[str]:
        """Names of the files that :meth:`save` has written into a folder."""

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError, TypeError: A file or a setting is not what was written.
        """


@dataclass(frozen=True, eq=False)
class _KnownPreprocessor(Generic[Known]):
    """Bags of what occurs in the training instances.

    Attributes:
        known: Terms or features.
        width: See :class:`BagEncoder`, like the other two.
        layers: Residual layers.
        dropout: Share of the vector that is dropped while training.
        output_layer: See :class:`.encoder.ClassifierInput` (default: ``"normalized"``).
    """

    known: Known
    width: int
    layers: int
    dropout: float
    output_layer: OutputLayer = "normalized"

    places: ClassVar[int]
    known_type: ClassVar[type[Vocabulary | KnownFeatures]]
    file: ClassVar[str]

    def sizes(self) -> tuple[int, int]:
        """Those of :class:`BagEncoder`."""
        return BagEncoder.sizes(*self._shape(), self.output_layer)

    def encoder(self, device: torch.device) -> BagEncoder:
        """A new :class:`BagEncoder`."""
        return BagEncoder(*self._shape(), self.dropout, self.output_layer).to(device)

    def _shape(self) -> tuple[int, int, int, int]:
        return len(self.known), self.places, self.width, self.layers

    def sources(self) -> list[str]:
        """None: it is made of the training instances."""
        return []

    def settings(self) -> dict[str, Any]:
        """Sizes of the encoder."""
        return {
            "width": self.width,
            "layers": self.layers,
            "dropout": self.dropout,
            "output_layer": self.output_layer,
        }

    def save(self, folder: Path) -> None:
        """Write what is known."""
        self.known.save(folder / self.file)

    def files(self, folder: Path) -> list[str]:
        """The name of that file."""
        return [self.file]

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Self:
        """Read what is known."""
        known: Any = cls.known_type.load(folder / cls.file)
        return cls(known, **settings)


class BagPreprocessor(_KnownPreprocessor[Vocabulary]):
    """Bags of the words and word pairs that the training texts have."""

    kind: ClassVar[str] = "bag"
    reads_features: ClassVar[bool] = False
    places = PLACES
    known_type = Vocabulary
    file = "vocabulary.json"

    @cached_property
    def weights(self) -> Tensor:
        """Inverse document frequency of each term, FP32 ``(terms,)``."""
        return torch.from_numpy(self.known.inverse_document_frequency())

    def lines(self, path: Path) -> TextLines:
        """A text a line."""
        return TextLines(path)

    def read(self, instances: Sequence[str]) -> Bags:
        """Texts as bags."""
        ids, offsets, places = map(torch.from_numpy, self.known.encode(instances))
        return Bags(ids, offsets, self.weights[ids], places)


class FeaturePreprocessor(_KnownPreprocessor[KnownFeatures]):
    """Bags of the features that a data set gives, weighted by their values."""

    kind: ClassVar[str] = "features"
    reads_features: ClassVar[bool] = True
    places = 1
    known_type = KnownFeatures
    file = "features.json"

    def lines(self, path: Path) -> BagLines:
        """Lines ``feature:value feature:value ...``; unknown features are ignored."""
        return read_feature_file(path, self.known.num_features)

    def read(self, instances: Features) -> Bags:
        """Features as bags."""
        ids, offsets, weights = map(torch.from_numpy, self.known.encode(instances))
        return Bags(ids, offsets, weights, torch.zeros_like(ids))


_LOADERS: dict[str, Callable[[Path, dict[str, Any]], Preprocessor[Any]]] = {
    kind.kind: kind.load for kind in (BagPreprocessor, FeaturePreprocessor, TransformerPreprocessor)
}


def make_preprocessor(config: XMCConfig, train: TextSplit | BagSplit) -> Preprocessor[Any]:
    """The preprocessing of a configuration, from the training instances alone.

    Raises:
        ValueError: The encoder is neither the bag nor a folder that can be used, or is one that
            reads texts and there are none.
    """
    if config.encoder == BagPreprocessor.kind:
        return _bag_preprocessor(config, train)
    if isinstance(train, BagSplit):
        raise ValueError(
            f"data={config.data} is a bag of words, and encoder={config.encoder} reads texts: "
            "use --encoder bag, or give a data set with texts"
        )
    assert config.max_length is not None
    assert config.pooling is not None
    return TransformerPreprocessor.open(
        Path(config.encoder),
        max_length=config.max_length,
        pooling=config.pooling,
        dropout=config.dropout,
        output_layer=config.output_layer,
    )


def _bag_preprocessor(config: XMCConfig, train: TextSplit | BagSplit) -> Preprocessor[Any]:
    assert config.width is not None
    assert config.layers is not None
    assert config.max_terms is not None
    settings = config.width, config.layers, config.dropout, config.output_layer
    if isinstance(train, BagSplit):
        known = KnownFeatures.build(train.source, config.max_terms)
        return FeaturePreprocessor(known, *settings)
    vocabulary = Vocabulary.build(train.source, max_terms=config.max_terms)
    return BagPreprocessor(vocabulary, *settings)


def save_preprocessor(preprocessor: Preprocessor[Any], folder: Path) -> None:
    """Write a preprocessor into a folder, its settings last: with them, everything is there."""
    preprocessor.save(folder)
    text = json.dumps({"encoder": preprocessor.kind, **preprocessor.settings()}, indent=2)
    write_text(folder / SETTINGS, text + "\n")


def load_preprocessor(folder: Path) -> Preprocessor[Any]:
    """Read what :func:`save_preprocessor` wrote.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file holds something else.
    """
    path = folder / SETTINGS
    try:
        settings = read_json(path)
        kind = settings.pop("encoder")
        return _LOADERS[kind](folder, settings)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no settings of an encoder ({error!r}): train again"
        ) from None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device."""
    return type(batch)(*(tensor.to(device) for tensor in batch))

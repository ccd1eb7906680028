"""Texts to vectors: any Hugging Face transformer from a local folder."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from ....nn import Embedding, LayerNorm, Linear
from ...data.lines import TextLines
from ...engine.files import replacing
from .encoder import ClassifierInput, constants_of
from .presets import OutputLayer

if TYPE_CHECKING:
    from ....integrations.transformers import MoRConfig

Pooling = Literal["mean", "cls"]

_SAVED = "transformer"
_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)


_READ = (
    *("config.json", *_TOKENIZER_FILES, "*tokenizer*.json", "*vocab*"),
    *("merges.txt", "special_tokens_map.json", "added_tokens.json"),
)
"""Files that say what a transformer and its tokenizer are."""


class Tokens(NamedTuple):
    """Texts as tokens.

    Attributes:
        ids: int64 ``(texts, length of the longest)``.
        mask: int64 of the same shape: 1 for a token, 0 for padding, which stands at the end.
    """

    ids: Tensor
    mask: Tensor


class TransformerEncoder(torch.nn.Module):
    """Tokens of ``batch`` texts to FP32 ``(batch, dim)``.

    Args:
        transformer: Gives ``last_hidden_state`` for ``input_ids`` and ``attention_mask``.
        width: Hidden size of the transformer.
        pooling: ``"mean"`` of a text's tokens, or ``"cls"``, its first one.
        dropout: Share of the vector that is dropped while training.
        output_layer: See :class:`.encoder.ClassifierInput` (default: ``"normalized"``).
    """

    def __init__(
        self,
        transformer: torch.nn.Module,
        width: int,
        pooling: Pooling,
        dropout: float,
        output_layer: OutputLayer = "normalized",
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.pooling = pooling
        self.output = ClassifierInput(width, dropout, output_layer)

    @property
    def dim(self) -> int:
        """Size of the output."""
        return self.output.dim

    def checkpoint_activations(self) -> None:
        """Keep the inputs of layers alone, and compute the rest again in the backward pass.

        Raises:
            ValueError: The transformer cannot do so.
        """
        # A fused step may run the backward pass twice.
        transformer: Any = self.transformer
        transformer.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens: Tokens) -> Tensor:
        """The vectors of a batch of texts."""
        hidden = self.transformer(input_ids=tokens.ids, attention_mask=tokens.mask)
        states = hidden.last_hidden_state.float()
        if self.pooling == "cls":
            x = states[:, 0]
        else:
            mask = tokens.mask[..., None].float()
            x = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        y: Tensor = self.output(x)
        return y


@dataclass(frozen=True, eq=False)
class TransformerPreprocessor:
    """A tokenizer, and the folder that it and the transformer come from.

    Attributes:
        folder: Holds the transformer, the tokenizer and both their configurations.
        tokenizer: A tokenizer of ``transformers``.
        max_length: Tokens of a text that are read.
        pooling: See :class:`TransformerEncoder`, like what follows.
        dropout: Share of the vector that is dropped while training.
        pretrained: Whether the folder has weights; a run directory keeps each run's own instead
            (default: ``True``).
        output_layer: See :class:`.encoder.ClassifierInput` (default: ``"normalized"``).
    """

    folder: Path
    tokenizer: Any
    max_length: int
    pooling: Pooling
    dropout: float
    pretrained: bool = True
    output_layer: OutputLayer = "normalized"

    kind: ClassVar[str] = "transformer"
    reads_features: ClassVar[bool] = False

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        max_length: int,
        pooling: Pooling,
        dropout: float,
        pretrained: bool = True,
        output_layer: OutputLayer = "normalized",
    ) -> Self:
        """Read the tokenizer of a folder.

        Raises:
            ValueError: There is no such folder, ``transformers`` is not installed or does not
                understand what the folder holds, or the transformer cannot be used.
        """
        config = _config(folder)
        if config.is_encoder_decoder:
            raise ValueError(
                f"encoder={folder} holds an encoder with a decoder: give an encoder such as BERT"
            )
        tokenizer = _tokenizer(folder)
        tokenizer.padding_side = "right"
        positions = getattr(config, "max_position_embeddings", max_length)
        most = min(positions, tokenizer.model_max_length)
        if max_length > most:
            raise ValueError(
                f"max_length={max_length} is above the {most} tokens that encoder={folder} reads: "
                "give at most as many"
            )
        return cls(folder, tokenizer, max_length, pooling, dropout, pretrained, output_layer)

    def lines(self, path: Path) -> TextLines:
        """A text a line."""
        return TextLines(path)

    def read(self, instances: Sequence[str]) -> Tokens:
        """Texts as tokens, each cut at ``max_length``."""
        encoded = self.tokenizer(
            list(instances),
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        return Tokens(encoded["input_ids"], encoded["attention_mask"])

    def sizes(self) -> tuple[int, int]:
        """Size of the output; the transformer's own parameters are not counted."""
        return _config(self.folder).hidden_size + constants_of(self.output_layer), 0

    def encoder(self, device: torch.device) -> TransformerEncoder:
        """A new :class:`TransformerEncoder` in FP32, in ``train()``."""
        config = _config(self.folder)
        mixture = _mixture(config)
        model_class = _transformers().AutoModel
        model = _read(
            "transformer",
            self.folder,
            lambda: (
                model_class.from_pretrained(self.folder, local_files_only=True)
                if self.pretrained
                else model_class.from_config(config)
            ),
        )
        if mixture is not None and not self.pretrained:
            mixture.convert(model)
        if getattr(model, "pooler", None) is not None:
            # Nothing reads it, so it would be carried along untrained.
            model.pooler = None
        if device.type == "cpu":
            _widen_activations(model)
        encoder = TransformerEncoder(
            model.float(), config.hidden_size, self.pooling, self.dropout, self.output_layer
        )
        return encoder.train().to(device)

    def sources(self) -> list[str]:
        """Digests of the configuration and of the tokenizer; runs have weights of their own."""
        found = []
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and any(map(path.match, _READ)):
                with path.open("rb") as file:
                    found.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}")
        return found

    def settings(self) -> dict[str, Any]:
        """How texts are read."""
        return {
            "max_length": self.max_length,
            "pooling": self.pooling,
            "dropout": self.dropout,
            "output_layer": self.output_layer,
        }

    def save(self, folder: Path) -> None:
        """Write the tokenizer and both configurations."""
        (folder / _SAVED).mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
            written = Path(temporary) / _SAVED
            _config(self.folder).save_pretrained(written)
            self.tokenizer.save_pretrained(written)
            for file in sorted(written.iterdir()):
                with replacing(folder / _SAVED / file.name) as unfinished:
                    file.rename(unfinished)

    def files(self, folder: Path) -> list[str]:
        """Names of these files."""
        return sorted(f"{_SAVED}/{file.name}" for file in (folder / _SAVED).iterdir())

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Self:
        """Read the tokenizer."""
        return cls.open(folder / _SAVED, pretrained=False, **settings)


# The layers that compute in FP32 whatever their parameters are stored in, by those they replace.
_WIDE: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.Linear: Linear,
    torch.nn.Embedding: Embedding,
    torch.nn.LayerNorm: LayerNorm,
}


def _widen_activations(model: torch.nn.Module) -> None:
    """Let narrow layers compute in FP32: processors without BF16 units take many times as long."""
    for module in model.modules():
        wide = _WIDE.get(type(module))
        # Some have a gain and no bias, which ours has not.
        plain = wide is LayerNorm and getattr(module, "bias", None) is None
        if wide is not None and not plain:
            module.__class__ = wide


def _config(folder: Path) -> Any:
    if not folder.is_dir():
        raise ValueError(
            f"encoder={folder} is neither bag nor a folder: give bag, or the local folder of a "
            "Hugging Face transformer"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"encoder={folder} holds no config.json: give the folder of a Hugging Face transformer"
        )
    read = _transformers().AutoConfig.from_pretrained
    return _read("config.json", folder, lambda: read(folder, local_files_only=True))


def _mixture(config: Any) -> MoRConfig | None:
    """The mixture of representations that a transformer was saved with."""
    kept = getattr(config, "quantization_config", None)
    if not isinstance(kept, dict) or kept.get("quant_method") != "subulp_mor":
        return None
    # Transformers finds the method once this is imported, which takes long.
    from ....integrations.transformers import MoRConfig  # noqa: PLC0415

    return MoRConfig(**kept)


def _tokenizer(folder: Path) -> Any:
    # Without its files transformers makes a tokenizer that knows no word.
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"encoder={folder} holds no tokenizer: expected one of {', '.join(_TOKENIZER_FILES)}"
        )
    read = _transformers().AutoTokenizer.from_pretrained
    tokenizer = _read("tokenizer", folder, lambda: read(folder, local_files_only=True))
    if tokenizer.pad_token is None:
        raise ValueError(
            f"encoder={folder} has a tokenizer without a padding token: give an encoder such as "
            "BERT"
        )
    return tokenizer


def _read(what: str, folder: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    # transformers raises whatever the code behind a file's reader raises.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"encoder={folder} holds no {what} that transformers can read: {reason}"
        ) from error


def _transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise ValueError(
            f"a transformer as encoder needs the package transformers ({error}): "
            "pip install transformers"
        ) from None
    # Its bar would run through that of the training.
    transformers.utils.logging.disable_progress_bar()
    return transformers

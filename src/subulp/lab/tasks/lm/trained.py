"""Trained language models: they continue texts and are measured on others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ...data.regular import BYTE_ORDER_MARK
from ...engine.config import check_range
from ...engine.linear_operands import Variant
from ...engine.saved_model import SavedModel, Weights
from ...engine.trained import TrainedModel
from .config import ActivationDtype, LMConfig
from .models import LanguageModel, Shape, build, use_bf16
from .task import convert_blocks, evaluate, evaluated, measures
from .text import byte_tokens, character_tokens, decoded, load_text, read_text

_MOST_TOKENS = 10_000_000


@dataclass(frozen=True)
class Built:
    """What a model is built from.

    Attributes:
        shape: Its sizes.
        characters: The characters of its vocabulary in their order; ``None`` for other tokens.
        variant: What its linear layers multiply: the rounding of their products is part of what
            was measured.
        activations: Dtype of its activations, which is part of it too; earlier versions had FP32
            alone (default: ``"fp32"``).
        tokenizer: What made its tokens, see :mod:`.bpe`; ``None`` for characters and bytes
            (default: ``None``).
    """

    shape: Shape
    characters: str | None
    variant: Variant
    activations: ActivationDtype = "fp32"
    tokenizer: str | None = None

    @property
    def vocabulary(self) -> int:
        """Number of tokens that texts have.

        Raises:
            ValueError: The tokenizer is none.
        """
        if self.tokenizer is not None:
            from . import bpe  # noqa: PLC0415

            return bpe.size_of(self.tokenizer)
        return 256 if self.characters is None else len(self.characters)


_BUILT = TypeAdapter(Built)


@dataclass(frozen=True, eq=False)
class Trained(TrainedModel):
    """A language model.

    Attributes:
        built: What it was built from.
    """

    built: Built

    uses: ClassVar[str] = "sample"

    @classmethod
    def of(cls, saved: SavedModel, weights: Weights, device: torch.device) -> Self:
        """Build a model."""
        built = saved.settings(_BUILT)
        try:
            vocabulary = built.vocabulary + (built.shape.model == "bert")
        except ValueError as error:
            raise saved.damaged(error) from None
        if vocabulary != built.shape.vocabulary:
            raise saved.damaged("its vocabulary is of another size")
        _check_shape(saved, built.shape, len(saved.tensors(weights)))
        try:
            with torch.device("meta"):
                model = build(built.shape)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise saved.damaged(error) from None
        saved.fill(model, weights)
        convert_blocks(model, built.variant)
        if built.activations == "bf16":
            use_bf16(model)
        return cls(saved, model.to(device), device, built)

    def measure(self, config: LMConfig, data: str | None) -> dict[str, float]:
        """Loss and perplexity: of the run's validation part, or of all of another text."""
        if data is None:
            text = load_text(config.data, config.level, config.tokens)
            tokens = text.validation
        else:
            name, raw = read_text(data)
            tokens = self._tokens(raw, f"data={name}")
        context = self.built.shape.context
        if len(tokens) <= context:
            raise ValueError(
                f"data={data} has {len(tokens)} tokens: too few for one context of {context} and "
                f"the token after it; give a text of at least {context + 1}"
            )
        batches = evaluated(tokens, self.built.shape)
        return measures(
            evaluate(self._lm, [(x.to(self.device), y.to(self.device)) for x, y in batches])
        )

    @torch.no_grad()
    def sample(
        self,
        prompt: str,
        length: int,
        *,
        temperature: float = 1.0,
        top: int | None = None,
        seed: int = 0,
    ) -> bytes:
        """Continue a text; beyond the context, the earliest tokens are forgotten."""
        check_range("length", length, 0, _MOST_TOKENS)
        check_range("temperature", temperature, 0)
        # torch's generators on CPUs take no more bits.
        check_range("sampling_seed", seed, 0, 2**32 - 1)
        if top is not None:
            check_range("top", top, 1)
        if self.built.shape.model == "bert":
            raise ValueError(
                "run has a model=bert, which predicts tokens that are masked and does not continue "
                "a text: choose a run of gpt or llama"
            )
        if not prompt:
            raise ValueError("prompt is empty: give at least one character to continue")
        tokens = self._tokens(prompt.encode("utf-8", "surrogateescape"), "prompt").long()
        generator = torch.Generator().manual_seed(seed)
        known, context = tokens.tolist(), self.built.shape.context
        for _ in range(length):
            window = torch.tensor([known[-context:]], device=self.device)
            logits = self._lm(window)[0, -1].double().cpu()
            known.append(_drawn(logits, temperature, top, generator))
        return self._bytes(known[len(tokens) :])

    @property
    def _lm(self) -> LanguageModel:
        assert isinstance(self.model, LanguageModel)
        return self.model

    def _tokens(self, raw: bytes, name: str) -> Tensor:
        if self.built.tokenizer is None and self.built.characters is None:
            return byte_tokens(raw)
        raw = raw.removeprefix(BYTE_ORDER_MARK)
        if self.built.tokenizer is not None:
            from . import bpe  # noqa: PLC0415

            return bpe.tokens_of(decoded(raw, name), self.built.tokenizer)
        assert self.built.characters is not None
        return character_tokens(raw, self.built.characters, name)

    def _bytes(self, tokens: list[int]) -> bytes:
        if self.built.tokenizer is not None:
            from . import bpe  # noqa: PLC0415

            return bpe.text_of(tokens, self.built.tokenizer).encode()
        if self.built.characters is None:
            return bytes(tokens)
        return "".join(self.built.characters[token] for token in tokens).encode()


def _check_shape(saved: SavedModel, shape: Shape, tensors: int) -> None:
    """Refuse sizes that no model has; others are compared with its tensors."""
    if shape.model == "llama" and shape.width // max(shape.heads, 1) % 2:
        raise saved.damaged(f"width={shape.width} has no pairs in heads={shape.heads}")
    try:
        for name in ("context", "width", "heads"):
            check_range(name, getattr(shape, name), 1)
        check_range("layers", shape.layers, 1, tensors)
        check_range("dropout", shape.dropout, 0, 1, top_included=False)
    except ValueError as error:
        raise saved.damaged(error) from None
    if shape.width % shape.heads:
        raise saved.damaged(f"width={shape.width} is no multiple of heads={shape.heads}")


def _drawn(logits: Tensor, temperature: float, top: int | None, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not finite: its training diverged; choose another")
    if temperature == 0:
        return int(logits.argmax())
    best = logits.topk(min(top or len(logits), len(logits)))
    # The highest one is 0: no temperature makes it overflow.
    scaled = (best.values - best.values[0]) / temperature
    place = torch.multinomial(scaled.softmax(0), 1, generator=generator)
    return int(best.indices[place])

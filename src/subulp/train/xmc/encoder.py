"""Texts to vectors: a bag of words and word pairs, and a residual network on their sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nn import Embedding, LayerNorm, Linear
from .output import ClassifierInput

_EMBEDDING_STD = 0.05
_HIDDEN = 2


class Bags(NamedTuple):
    """Texts as bags of terms.

    Attributes:
        ids: int64 ``(terms of all texts,)``.
        offsets: int64 ``(texts + 1,)``: where the terms of each text begin.
    """

    ids: Tensor
    offsets: Tensor


class BagEncoder(torch.nn.Module):
    """Bags of ``batch`` texts to FP32 ``(batch, width + CONSTANTS)``.

    A text's terms are summed up with their inverse document frequencies, divided by the length that
    the sum of as many independent vectors has.

    Args:
        weights: Inverse document frequency of each term, FP32 ``(terms,)``.
        width: Size of the vector.
        layers: Residual layers.
        dropout: Share of the vector that is dropped while training.
    """

    def __init__(self, weights: Tensor, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("weights", weights, persistent=False)
        self.terms = Embedding(len(weights), width)
        torch.nn.init.normal_(self.terms.weight, std=_EMBEDDING_STD)
        self.layers = torch.nn.ModuleList(Residual(width) for _ in range(layers))
        self.output = ClassifierInput(width, dropout)

    @property
    def dim(self) -> int:
        """Size of the output."""
        return self.output.dim

    def forward(self, bags: Bags) -> Tensor:
        """The vectors of a batch of texts; an empty text has that of no terms."""
        count = len(bags.offsets) - 1
        text = torch.repeat_interleave(
            torch.arange(count, device=bags.ids.device), bags.offsets.diff()
        )
        weights = self.get_buffer("weights").float()[bags.ids]
        terms = self.terms(bags.ids) * weights[:, None]
        x = torch.zeros(count, self.width, device=terms.device).index_add(0, text, terms)
        squares = torch.zeros(count, device=terms.device).index_add(0, text, weights.square())
        x = x / (_EMBEDDING_STD * squares.sqrt().clamp(min=1e-3))[:, None]
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.output(x)
        return y


class Residual(torch.nn.Module):
    """A feed-forward network on a normalised copy of its input, added to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        self.up = Linear(width, _HIDDEN * width)
        self.down = Linear(_HIDDEN * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, width)`` to the same shape."""
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y

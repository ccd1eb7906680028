"""Bags of terms to vectors, and the last layer of every encoder: what the classifier takes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....nn import Embedding, LayerNorm, Linear
from .presets import OutputLayer

# The classifier's weights move with the size of its inputs.
OUTPUT_NORM = 4.0
# Several, because a narrow weight is off by a sixteenth of itself, and these would be all that is
# known of most labels: their errors average out.
CONSTANTS = 16
_CONSTANT = OUTPUT_NORM / math.sqrt(CONSTANTS)
_EMBEDDING_STD = 0.05
_HIDDEN = 2


class Bags(NamedTuple):
    """Instances as bags of weighted terms.

    Attributes:
        ids: int64 ``(terms of all instances,)``.
        offsets: int64 ``(instances + 1,)``: where the terms of each instance begin.
        weights: FP32 ``(terms of all instances,)``.
        places: int64 ``(terms of all instances,)``: where in its instance a term stands; all 0
            where that is not known.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor
    places: Tensor


class BagEncoder(torch.nn.Module):
    """Bags of ``batch`` instances to FP32 ``(batch, dim)``.

    An instance's terms are summed up with their weights, divided by the length that the sum of as
    many independent vectors has: a factor on all of its weights changes nothing. What a term counts
    for depends on where it stands (the first words of a definition say what it is about) and on the
    term itself: a gate between 0 and 2, which begins at 1, and a factor for each number of the
    vector.

    Args:
        terms: Number of terms.
        places: Number of places that a term may stand at.
        width: Size of the vector.
        layers: Residual layers.
        dropout: Share of the vector that is dropped while training.
        output_layer: See :class:`ClassifierInput` (default: ``"normalized"``).
    """

    def __init__(
        self,
        terms: int,
        places: int,
        width: int,
        layers: int,
        dropout: float,
        output_layer: OutputLayer = "normalized",
    ) -> None:
        super().__init__()
        self.width = width
        self.terms = Embedding(terms, width)
        torch.nn.init.normal_(self.terms.weight, std=_EMBEDDING_STD)
        self.gate = torch.nn.Parameter(torch.zeros(width))
        self.place_gate = torch.nn.Parameter(torch.zeros(places))
        self.place_factor = torch.nn.Parameter(torch.zeros(places, width))
        self.layers = torch.nn.ModuleList(Residual(width) for _ in range(layers))
        self.output = ClassifierInput(width, dropout, output_layer)

    @staticmethod
    def sizes(
        terms: int, places: int, width: int, layers: int, output_layer: OutputLayer = "normalized"
    ) -> tuple[int, int]:
        """Size of the output, and how many numbers the parameters are."""
        # Two matrices, their biases and a norm.
        layer = width * (2 * _HIDDEN * width + _HIDDEN + 1 + 2)
        gates = width + places + places * width
        norm = 2 * width if output_layer == "normalized" else 0
        dim = width + constants_of(output_layer)
        return dim, terms * width + gates + layers * layer + norm

    @property
    def dim(self) -> int:
        """Size of the output."""
        return self.output.dim

    def forward(self, bags: Bags) -> Tensor:
        """The vectors of a batch; an empty instance has that of no terms."""
        count = len(bags.offsets) - 1
        bag = torch.repeat_interleave(
            torch.arange(count, device=bags.ids.device), bags.offsets.diff()
        )
        terms = self.terms(bags.ids)
        score = terms.float() @ self.gate.float() / _EMBEDDING_STD
        gate = 2 * torch.sigmoid(score + self.place_gate[bags.places])
        terms = terms * (1 + self.place_factor[bags.places]) * (bags.weights * gate)[:, None]
        x = torch.zeros(count, self.width, device=terms.device).index_add(0, bag, terms)
        squares = torch.zeros(count, device=terms.device).index_add(0, bag, bags.weights.square())
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


def prior_weight(share: float) -> float:
    """The weight of each constant with which every label has the probability ``share``.

    A classifier that begins there need not first learn that labels are rare, in steps so large that
    momentum carries it far beyond.
    """
    return math.log(share / (1 - share)) / (CONSTANTS * _CONSTANT)


def constants_of(output_layer: OutputLayer) -> int:
    """How many constants an output layer puts after a vector."""
    return CONSTANTS if output_layer == "normalized" else 0


class ClassifierInput(torch.nn.Module):
    """Vectors ``(batch, width)`` to FP32 ``(batch, width + constants)``.

    ``"normalized"``: a vector is normalised to norm 4, then dropped out. The constants after it
    have norm 4 too: the classifier has no bias, and learns there how rare each label is.
    ``"plain"``: a vector is dropped out, and nothing else, as the authors of ELMO have it.

    Args:
        width: Size of a vector.
        dropout: Share of it that is dropped while training.
        output_layer: One of the two.
    """

    def __init__(self, width: int, dropout: float, output_layer: OutputLayer) -> None:
        super().__init__()
        self.width, self.dropout = width, dropout
        self.constants = constants_of(output_layer)
        self.norm = LayerNorm(width) if self.constants else None

    @property
    def dim(self) -> int:
        """Size of the output."""
        return self.width + self.constants

    def forward(self, x: Tensor) -> Tensor:
        """The classifier's input for each vector."""
        if self.norm is None:
            return F.dropout(x, self.dropout, self.training)
        x = self.norm(x) * (OUTPUT_NORM / math.sqrt(self.width))
        x = F.dropout(x, self.dropout, self.training)
        return torch.cat([x, torch.full((len(x), CONSTANTS), _CONSTANT, device=x.device)], 1)

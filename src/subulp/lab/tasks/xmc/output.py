"""The last layer of every encoder: what the classifier takes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ....nn import LayerNorm

# The classifier's weights move with the size of its inputs.
OUTPUT_NORM = 4.0
# Several, because a narrow weight is off by a sixteenth of itself, and these would be all that is
# known of most labels: their errors average out.
CONSTANTS = 16


_CONSTANT = OUTPUT_NORM / math.sqrt(CONSTANTS)


def prior_weight(share: float) -> float:
    """The weight of each constant with which every label has the probability ``share``.

    A classifier that begins there need not first learn that labels are rare, in steps so large that
    momentum carries it far beyond.
    """
    return math.log(share / (1 - share)) / (CONSTANTS * _CONSTANT)


class ClassifierInput(torch.nn.Module):
    """Vectors ``(batch, width)`` to FP32 ``(batch, width + CONSTANTS)``.

    A vector is normalised to norm 4, then dropped out. The constants after it have norm 4 too: the
    classifier has no bias, and learns there how rare each label is.

    Args:
        width: Size of a vector.
        dropout: Share of it that is dropped while training.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.width, self.dropout = width, dropout
        self.norm = LayerNorm(width)

    @property
    def dim(self) -> int:
        """Size of the output."""
        return self.width + CONSTANTS

    def forward(self, x: Tensor) -> Tensor:
        """The classifier's input for each vector."""
        x = self.norm(x) * (OUTPUT_NORM / math.sqrt(self.width))
        x = F.dropout(x, self.dropout, self.training)
        return torch.cat([x, torch.full((len(x), CONSTANTS), _CONSTANT, device=x.device)], 1)

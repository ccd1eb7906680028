"""Arguments of the mixture ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics.mixture import Mixture, Recipe
from ...numerics.scaling import Scaling


@dataclass(frozen=True)
class EncodeJob:
    """A matrix to encode.

    Attributes:
        x: FP32, BF16 or FP16 (rows, k), contiguous.
        recipe: One of ``numerics.mixture.RECIPES``.
        block: Rows and columns of a block.
        groups: Rows and columns of blocks in a group.
        scaling: Where mantissas come from.
        threshold: The tensor's error must stay below it.
    """

    x: Tensor
    recipe: Recipe
    block: tuple[int, int]
    groups: tuple[int, int]
    scaling: Scaling
    threshold: float

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.x.device


@dataclass(frozen=True)
class DecodeJob:
    """A mixture to decode."""

    mixture: Mixture

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.mixture.codes.device


Job = EncodeJob | DecodeJob

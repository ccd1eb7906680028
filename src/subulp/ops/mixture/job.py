"""Arguments of the mixture ops."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics.metrics import RELATIVE_ERROR, TILE_COLUMNS, TILE_ROWS
from ...numerics.mixture import RECIPES, Mixture, Recipe
from ...numerics.scaling import Scaling
from .kept import KeptEncoding


@dataclass(frozen=True)
class EncodeJob:
    """A matrix to encode.

    Attributes:
        x: FP32, BF16 or FP16 (rows, k), contiguous where C++ reads it.
        recipe: Formats and tests.
        block: Rows and columns of a block.
        groups: Rows and columns of blocks in a group.
        scaling: Where mantissas come from.
        threshold: What ``below_threshold`` compares with where it has no number of its own.
        metric: One of ``numerics.metrics.KNOWN``.
        kept: What Triton's kernels leave as it is while ``x`` has the same bytes, ``None`` for
            nothing.
    """

    x: Tensor
    recipe: Recipe
    block: tuple[int, int]
    groups: tuple[int, int]
    scaling: Scaling
    threshold: float
    metric: str = RELATIVE_ERROR
    kept: KeptEncoding | None = None

    @property
    def fused(self) -> Recipe | None:
        """The recipe of the papers that decides the same, for which there is one fused pass."""
        if self.metric != RELATIVE_ERROR:
            return None
        return _fused(self.recipe)

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.x.device


@dataclass(frozen=True)
class DecodeJob:
    """A mixture to decode.

    Attributes:
        mixture: The mixture.
        room: FP32, BF16 or, for Triton, FP16 of the matrix's shape, contiguous, which the result
            lies in; ``None`` for memory of its own, FP32.
    """

    mixture: Mixture
    room: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.mixture.codes.device

    def result(self) -> Tensor:
        """Memory for the matrix."""
        if self.room is not None:
            return self.room
        return torch.empty(self.mixture.shape, dtype=torch.float32, device=self.device)


Job = EncodeJob | DecodeJob


def part_of(block: tuple[int, int]) -> int:
    """Blocks whose numbers a program of Triton's adds up: fewer where they have many tiles."""
    return 128 if block[0] <= TILE_ROWS and block[1] <= TILE_COLUMNS else 8


@functools.cache
def _fused(recipe: Recipe) -> Recipe | None:
    # What a recipe is called decides nothing.
    return next((known for known in RECIPES.values() if known.rules == recipe.rules), None)

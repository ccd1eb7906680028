"""Arguments of the mixture ops."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics.metrics import LANES, RELATIVE_ERROR, TILE_COLUMNS, TILE_ROWS
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
class EncodeBothJob:
    """A matrix to encode along its rows and along its columns.

    Attributes:
        along_rows: The matrix.
        along_columns: Its transpose, with the same recipe, scaling, threshold and metric.
    """

    along_rows: EncodeJob
    along_columns: EncodeJob

    @property
    def side(self) -> int | None:
        """Rows and columns of the blocks of both, those that end earlier at the matrix's end
        included; ``None`` where no tile of Triton's holds whole blocks of both.
        """
        blocks = [job.block for job in (self.along_rows, self.along_columns)]
        longest = max(columns for _rows, columns in blocks)
        side = max(_LEAST_SIDE, 1 << (longest - 1).bit_length())
        fit = all(
            job.block[0] == 1 and job.block[1] in (side, job.x.shape[1])
            for job in (self.along_rows, self.along_columns)
        )
        return side if fit and side <= _MOST_SIDE else None

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.along_rows.device


# Lanes whose sums are apart, and columns of a tile.
_LEAST_SIDE, _MOST_SIDE = LANES, 128


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

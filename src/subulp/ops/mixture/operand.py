"""A factor of a product: a mixture, and the dimension that is contracted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics.mixture import Mixture
from . import decode


@dataclass(frozen=True)
class Operand:
    """A factor of a product, ``(rows, k)`` after its transposition.

    Attributes:
        mixture: The matrix.
        sole: Name of the format that all of it is in, ``None`` for several.
        transposed: The contraction runs over the rows of ``mixture`` instead of its columns.
    """

    mixture: Mixture
    sole: str | None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and contracted size."""
        return self._turn(self.mixture.shape)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and contracted size of a block."""
        return self._turn(self.mixture.block)

    def values(self) -> Tensor:
        """FP32 (rows, k)."""
        found = decode(self.mixture)
        return found.t() if self.transposed else found

    def codes(self) -> Tensor:
        """The narrow values, uint8 (rows, k), contiguous; for operands wholly in one format."""
        codes = self.mixture.codes
        return codes.t().contiguous() if self.transposed else codes

    def inverse_scales(self) -> Tensor:
        """FP32 (block rows, blocks along k); of operands whose narrow values are all in FP8.

        E4M3 and E5M2 have the same, for their largest values have the same mantissa.
        """
        found = self.mixture.scales(0).inverse_per_block()
        return found.t() if self.transposed else found

    def _turn(self, pair: tuple[int, int] | torch.Size) -> tuple[int, int]:
        first, second = pair
        return (second, first) if self.transposed else (first, second)

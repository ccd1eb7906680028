"""Factors of products of mixtures, and a product that kernels are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics import Format
from ...numerics.mixture import Mixture, Summary
from .. import backend
from . import decode
from .job import DecodeJob

_STEPS = (128, 64, 32)
# Codes that are read at once.
_MULTIPLE = 16


@dataclass(frozen=True)
class Operand:
    """A factor of a product, ``(rows, k)`` after its transposition.

    Attributes:
        mixture: The matrix.
        summary: What was decided about it, ``None`` where its blocks are of several formats.
        transposed: The contraction runs over the rows of ``mixture`` instead of its columns.
    """

    mixture: Mixture
    summary: Summary | None
    transposed: bool = False

    @property
    def sole(self) -> str | None:
        """Name of the format that all of it is in, ``None`` for several; a GPU's host waits."""
        return None if self.summary is None else self.summary.sole

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and contracted size."""
        return self._turn(self.mixture.shape)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and contracted size of a block."""
        return self._turn(self.mixture.block)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(rows, k), in FP32 or rounded to BF16 or, by Triton, FP16 (default: FP32)."""
        if dtype == torch.float32:
            found = decode(self.mixture)
        else:
            room = torch.empty(self.mixture.shape, dtype=dtype, device=self.mixture.codes.device)
            found = backend.run("mixture", DecodeJob(self.mixture, room))
        return self.turned(found)

    def turned(self, matrix: Tensor) -> Tensor:
        """What lies as the mixture does, as (rows, k)."""
        return matrix.t() if self.transposed else matrix

    @property
    def format(self) -> Format | None:
        """The narrow format that all of it is in, ``None`` for several or a wide one."""
        return next((fmt for fmt in self.mixture.formats if fmt.name == self.sole), None)

    def _turn(self, pair: tuple[int, int] | torch.Size) -> tuple[int, int]:
        first, second = pair
        return (second, first) if self.transposed else (first, second)


def steps_of(transposed: tuple[bool, bool]) -> tuple[int, ...]:
    """Values of the contraction that a step of the kernel may have, the most first."""
    # Transposing takes registers.
    return _STEPS[1:] if any(transposed) else _STEPS


@dataclass(frozen=True)
class ProductJob:
    """``a @ b.T + bias``, of mixtures as they are stored.

    Attributes:
        a: (rows, k).
        b: (columns, k).
        dtype: Dtype of the result, FP32, BF16 or FP16, to which decoded values are rounded.
        bias: (columns,), FP32, BF16 or FP16, or ``None``.
        units: Whether units of FP8 multiply blocks in E4M3.
    """

    a: Operand
    b: Operand
    dtype: torch.dtype
    bias: Tensor | None
    units: bool

    @property
    def device(self) -> torch.device:
        """Device of the factors."""
        return self.a.mixture.codes.device

    def result(self) -> Tensor:
        """Memory for the product."""
        shape = self.a.shape[0], self.b.shape[0]
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @property
    def step(self) -> int | None:
        """Values of the contraction in which no scale changes; ``None`` if they are too few."""
        widths = [o.block[1] for o in (self.a, self.b) if o.block[1] < o.shape[1]]
        steps = steps_of((self.a.transposed, self.b.transposed))
        return next((step for step in steps if all(w % step == 0 for w in widths)), None)

    @property
    def is_constant(self) -> bool:
        """Whether no scale changes along the contraction."""
        return all(o.block[1] == o.shape[1] for o in (self.a, self.b))

    @property
    def is_aligned(self) -> bool:
        """Whether units of FP8 find whole vectors of codes."""
        sizes = (*self.a.shape, self.b.shape[0])
        return all(size % _MULTIPLE == 0 for size in sizes)

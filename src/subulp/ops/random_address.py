"""Where in the stream of random bits the elements of a part of a table lie."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..numerics import random_bits


@dataclass(frozen=True)
class RandomAddress:
    """An address of :mod:`subulp.numerics.random_bits`.

    Attributes:
        seed: Philox key word.
        stream: Philox key word of the table.
        step: Philox counter word.
        offset: Index of the part's first element in the whole table.
    """

    seed: int
    stream: int
    step: int
    offset: int

    def after(self, elements: int) -> RandomAddress:
        """The address of what lies ``elements`` further on."""
        return replace(self, offset=self.offset + elements)

    def draw(
        self,
        shape: torch.Size | tuple[int, ...],
        device: torch.device,
        *,
        slot: int = 0,
        width: int = 32,
    ) -> Tensor:
        """The bits of a run of elements, see :func:`subulp.numerics.random_bits.draw`."""
        return random_bits.draw(
            shape,
            seed=self.seed,
            stream=self.stream,
            step=self.step,
            slot=slot,
            offset=self.offset,
            width=width,
            device=device,
        )

"""Batches in an order that the seed alone decides, whatever is trained on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ShuffledBatches:
    """Numbers of the examples of each batch: every epoch is a new permutation.

    Args:
        count: Examples.
        batch_size: Examples of a batch; those that do not fill an epoch's last batch are
            dropped from that epoch.
        seed: Seed of the permutations.

    Attributes:
        generator: Draws the permutations, and whatever else is random about a batch.
    """

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self._count, self._batch_size = count, batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.int64)

    def draw(self) -> Tensor:
        """The next batch, int64 ``(batch_size,)``."""
        if len(self._order) < self._batch_size:
            self._order = torch.randperm(self._count, generator=self.generator)
        chosen, self._order = self._order.tensor_split([self._batch_size])
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """The place in the order."""
        return {"generator": self.generator.get_state(), "order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a place."""
        self.generator.set_state(state_dict["generator"].clone())
        self._order = state_dict["order"].clone()

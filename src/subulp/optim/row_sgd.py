"""SGD for tables of rows that update themselves in their own backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .row_optimizer import RowModule, RowOptimizer


class RowSGD(RowOptimizer):
    """Plain SGD for :class:`subulp.nn.ExtremeClassifier` and :class:`subulp.nn.CachedEmbeddingBag`.

    There is no momentum, no gradient and no copy of the rows. The module updates them while it
    computes their gradient; this object holds what the update reads: learning rate and weight decay
    of each group, and the step that random bits are counted by. :meth:`step` does nothing, so that
    training loops and schedulers of torch work as with any optimizer. ELMO, section 4.2.

    Args:
        modules: One module, several, or a list of groups ``{"modules": [...], "lr": ...}``.
        lr: Learning rate (default: 0.05).
        weight_decay: Of the rows, times the learning rate; of an embedding, of the rows that are
            looked up (default: 0).

    Raises:
        ValueError: A number is out of range, or a module has no rows or another optimizer.
    """

    def __init__(
        self,
        modules: RowModule | Sequence[RowModule] | Sequence[dict[str, Any]],
        lr: float = 0.05,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(modules, {"lr": lr, "weight_decay": weight_decay})

    def next_step(self, rows: Tensor) -> int:
        """Count one more update of a table, and return its number, from 1."""
        state = self.state[rows]
        state["step"] = int(state.get("step", 0)) + 1
        return int(state["step"])

"""SGD for modules that update their own rows."""

from __future__ import annotations

import torch

from .base import Modules, RowOptimizer


class RowSGD(RowOptimizer):
    """Plain SGD for :class:`subulp.nn.ExtremeClassifier` and :class:`subulp.nn.CachedEmbeddingBag`.

    There is no momentum, no gradient and no copy of the rows. The module updates them while it
    computes their gradient; this object holds what the update reads: learning rate and weight decay
    of each group. :meth:`step` does nothing, so that training loops and schedulers of torch work as
    with any optimizer. ELMO, section 4.2.

    Args:
        modules: One module, several, or a list of groups ``{"modules": [...], "lr": ...}``.
        lr: Learning rate (default: 0.05).
        weight_decay: Weight decay of the rows, times the learning rate; embeddings decay the rows
            that are looked up (default: 0).
        scaler: The ``torch.amp.GradScaler`` that scales the loss, if one does: embeddings step by
            unscaled gradients then (default: ``None``).

    Raises:
        ValueError: A number is out of range, or a module has no rows or another optimizer.
    """

    def __init__(
        self,
        modules: Modules,
        lr: float = 0.05,
        weight_decay: float = 0.0,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(modules, {"lr": lr, "weight_decay": weight_decay}, scaler)

"""SGD for tables of rows that update themselves in their own backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class RowModule(Protocol):
    """A module whose rows an optimizer of this kind updates."""

    row_optimizer: Any

    @property
    def row_parameters(self) -> Sequence[nn.Parameter]:
        """The stored rows, one tensor a table."""


class RowSGD(torch.optim.Optimizer):
    """Plain SGD for :class:`subulp.nn.ExtremeClassifier`: no momentum, no gradient, no copy.

    The module updates its rows while it computes their gradient; this object holds what the update
    reads: learning rate and weight decay of each group, and the step that random bits are counted
    by. :meth:`step` counts the steps and does nothing else, so that training loops and schedulers
    of torch work as with any optimizer. ELMO, section 4.2.

    Args:
        modules: One module, several, or a list of groups ``{"modules": [...], "lr": ...}``.
        lr: Learning rate (default: 0.05).
        weight_decay: Of the rows, times the learning rate (default: 0).

    Raises:
        ValueError: A number is out of range, or a module has no rows or another optimizer.
    """

    def __init__(
        self,
        modules: RowModule | Sequence[RowModule] | Sequence[dict[str, Any]],
        lr: float = 0.05,
        weight_decay: float = 0.0,
    ) -> None:
        self._modules: list[RowModule] = []
        given = list(modules) if isinstance(modules, Sequence) else [modules]
        groups = [g if isinstance(g, dict) else {"modules": [g]} for g in given]
        super().__init__(
            [self._group(group) for group in groups], {"lr": lr, "weight_decay": weight_decay}
        )
        for group in self.param_groups:
            for name in ("lr", "weight_decay"):
                if not group[name] >= 0:
                    raise ValueError(f"{name}={group[name]} is out of range: give at least 0")
        for module in self._modules:
            module.row_optimizer = self

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in group.items() if name != "modules"}
        parameters: list[nn.Parameter] = []
        for module in group["modules"]:
            if not hasattr(module, "row_parameters"):
                raise ValueError(
                    f"{type(module).__name__} has no rows that update themselves: RowSGD is for "
                    "modules such as nn.ExtremeClassifier"
                )
            if module.row_optimizer is not None:
                raise ValueError("a module has an optimizer already: give each to one")
            self._modules.append(module)
            parameters += module.row_parameters
        return {**options, "params": parameters}

    def group_of(self, rows: Tensor) -> dict[str, Any]:
        """The group that a table's stored rows belong to, as it is now."""
        return next(g for g in self.param_groups if any(p is rows for p in g["params"]))

    def next_step(self, rows: Tensor) -> int:
        """Count one more update of a table, and return its number, from 1."""
        state = self.state[rows]
        state["step"] = int(state.get("step", 0)) + 1
        return int(state["step"])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do nothing: the rows have been updated in the forward and backward pass."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

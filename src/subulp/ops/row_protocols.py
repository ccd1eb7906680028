"""What a module that updates its own rows and the optimizer of its rows ask of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


class RowRule(Protocol):
    """The rule by which rows are updated: the options of a table, and what is kept beside it."""

    def groups_of(self, tables: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The options of tables as they are now: ``lr``, ``weight_decay``, and ``eps`` if any.

        Args:
            tables: The stored rows of each.
        """

    def unscaled(self, grad: Tensor) -> Tensor | None:
        """The gradient of the loss from that of the scaled loss; ``None`` leaves the step out."""

    def factor(self) -> float:
        """What :meth:`unscaled` multiplies gradients by; 1 where nobody scales the loss."""

    def accumulator(self, rows: Tensor, group: dict[str, Any] | None = None) -> Tensor | None:
        """What is kept of a table's gradients: FP32 ``(rows,)`` or ``(rows, dim)``; or nothing.

        Args:
            rows: The stored rows.
            group: The table's options, which it has to fit; ``None`` does not compare
                (default: ``None``).
        """


class RowModule(Protocol):
    """A module that updates its own rows, in its forward or backward pass.

    It counts its updates itself: random bits and LRU's time stamps are counted by them, so they
    belong to the rows and outlive a change of the optimizer.

    Attributes:
        row_optimizer: The rule, set by the optimizer that is made for the module.
        steps: Updates so far, saved in the module's state dict.
    """

    row_optimizer: RowRule | None
    steps: int

    @property
    def row_parameters(self) -> Sequence[nn.Parameter]:
        """The stored rows, one tensor a table."""


@runtime_checkable
class SplitRows(Protocol):
    """A module whose tables are split over ranks, and with them what is kept for each row."""

    def save_rows(self, rows: Tensor, tensor: Tensor) -> Tensor | None:
        """What is kept for each row of a table, as a checkpoint has it; ``None`` on other ranks.

        Args:
            rows: The table's stored rows on this rank.
            tensor: ``(rows, ...)``.
        """

    def load_rows(self, rows: Tensor, saved: Tensor | None, own: Tensor) -> Tensor:
        """What this rank has of it.

        Args:
            rows: The table's stored rows on this rank.
            saved: What was saved.
            own: What there is now.
        """

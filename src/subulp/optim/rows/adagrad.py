"""Adagrad for embedding tables that update their own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.big_memory import full, zeros
from ...ops.row_protocols import RowModule
from .base import Modules, RowOptimizer


class RowAdagrad(RowOptimizer):
    """Adagrad for :class:`subulp.nn.CachedEmbeddingBag` and ``CachedEmbeddingBags``.

    With ``rowwise``, a row has one FP32 number: the sum of its gradients' mean squares. Otherwise
    every element has its own sum, as in ``torch.optim.Adagrad``, which takes the memory of an FP32
    table.
    The module updates its rows while it computes their gradient; :meth:`step` does nothing.

    Args:
        modules: One module, several, or a list of groups ``{"modules": [...], "lr": ...}``.
        lr: Learning rate (default: 0.01).
        eps: Added to the root (default: 1e-10).
        weight_decay: L2 penalty of the rows that are looked up (default: 0).
        rowwise: One sum per row (default: ``True``).
        initial_accumulator_value: Initial value of the sums (default: 0).
        scaler: The ``torch.amp.GradScaler`` that scales the loss, if one does: the rows step by
            unscaled gradients then (default: ``None``).

    Raises:
        ValueError: A number is out of range, or a module has no such rows or another optimizer.
    """

    def __init__(
        self,
        modules: Modules,
        lr: float = 0.01,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        rowwise: bool = True,
        initial_accumulator_value: float = 0.0,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(
            modules,
            {
                "lr": lr,
                "eps": eps,
                "weight_decay": weight_decay,
                "rowwise": rowwise,
                "initial_accumulator_value": initial_accumulator_value,
            },
            scaler,
        )
        self._begin(self._modules)

    def _begin(self, modules: Sequence[RowModule]) -> None:
        tables = [rows for module in modules for rows in module.row_parameters]
        shapes = [shape for module in modules for shape in module.row_shapes]  # type: ignore[attr-defined]
        for rows, shape, group in zip(tables, shapes, self.groups_of(tables), strict=True):
            self.state[rows]["sum"] = full(
                shape[:1] if group["rowwise"] else shape,
                group["initial_accumulator_value"],
                torch.float32,
                rows.device,
            )

    def _check_options(self, group: dict[str, Any]) -> None:
        super()._check_options(group)
        # Those of torch's Adagrad have none.
        rowwise = group.setdefault("rowwise", self.defaults["rowwise"])
        if not isinstance(rowwise, bool):
            raise ValueError(f"rowwise={rowwise!r} is unknown: use True or False")

    def _check_module(self, module: RowModule) -> None:
        super()._check_module(module)
        if not hasattr(module, "row_shapes"):
            raise ValueError(
                f"{type(module).__name__} is trained with RowSGD: RowAdagrad is for embeddings"
            )

    def accumulator(self, rows: Tensor, group: dict[str, Any] | None = None) -> Tensor:
        """The sums of a table: FP32 ``(rows,)`` row-wise, else ``(rows, dim)``.

        Args:
            rows: The stored rows.
            group: The table's, for a step; ``None`` takes the sums as they are (default: ``None``).

        Raises:
            RuntimeError: They are gone.
            ValueError: They are not those of the group's ``rowwise``, or of as many rows.
        """
        state = self.state[rows]
        if "sum" not in state:
            raise RuntimeError(
                f"the sums of rows of shape {tuple(rows.shape)} are gone from the state of this "
                "RowAdagrad: nothing was updated; set row_optimizer = None of the module, and make "
                "a new one"
            )
        if state["sum"].device != rows.device:
            state["sum"] = state["sum"].to(rows.device)
        total: Tensor = state["sum"]
        if group is None:
            return total
        if group["rowwise"] != (total.dim() == 1):
            raise ValueError(
                f"rowwise={group['rowwise']} was set after the sums were made, which have shape "
                f"{tuple(total.shape)}: make a new optimizer"
            )
        if total.shape[:1] != rows.shape[:1]:
            raise ValueError(
                f"the sums have shape {tuple(total.shape)} for {rows.shape[0]} rows: nothing was "
                "updated; make a new optimizer"
            )
        return total

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore options and sums; the sums stay FP32 whatever the rows are.

        Raises:
            ValueError: A table's sums are missing, have another shape, or are no sums of squares;
                nothing was changed.
        """
        state_dict = self.local(state_dict)
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = self._rows()
        if len(indices) != len(mine):
            raise ValueError(f"state_dict has {len(indices)} tables, the optimizer {len(mine)}")
        sums = []
        for index, rows in zip(indices, mine, strict=True):
            saved = state_dict["state"].get(index, {}).get("sum")
            expected = tuple(self.state[rows]["sum"].shape)
            if saved is None or tuple(saved.shape) != expected:
                has = "none" if saved is None else f"sums of shape {tuple(saved.shape)}"
                raise ValueError(
                    f"state_dict has {has} for a table, RowAdagrad keeps {expected}: make the "
                    "optimizer as it was saved; save it by itself, for "
                    "torch.distributed.checkpoint.state_dict leaves out the states of parameters "
                    "without a gradient"
                )
            # Infinite is what large gradients leave.
            if saved.numel() and not saved.is_meta and not bool(saved.min() >= 0):
                raise ValueError(
                    "state_dict has sums that are negative or NaN, which no sum of squares is: it "
                    "was changed since it was saved"
                )
            sums.append(zeros(expected, torch.float32, rows.device).copy_(saved.detach()))
        super().load_state_dict(state_dict)
        for rows, total in zip(mine, sums, strict=True):
            self.state[rows]["sum"] = total

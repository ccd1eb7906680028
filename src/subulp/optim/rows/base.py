"""The base of optimizers for modules that update their own rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn

from ...ops.row_protocols import RowModule, SplitRows
from ..loss_scaling import ScalerLink, unscale
from ..options import check_number, check_torch_options
from ..torch_optimizer import TorchOptimizer

Modules = RowModule | Sequence[RowModule] | Sequence[dict[str, Any]]
"""One module, several, or a list of groups ``{"modules": [...], "lr": ...}``."""


class _RowScaler(ScalerLink):
    """A scaler that a copy of its optimizer goes on with, and that a saved one does without."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_NUMBERS = ("lr", "weight_decay", "eps", "initial_accumulator_value")
_NEEDED = ("lr", "weight_decay")
_OF_TORCH = {
    **dict.fromkeys(("momentum", "dampening", "lr_decay", "weight_decay"), 0),
    **dict.fromkeys(("nesterov", "maximize", "differentiable"), False),
    **dict.fromkeys(("foreach", "fused"), None),
}


_PLAIN = {str, float, int, bool, type(None)}
"""Types of options that stay what they are."""


def _options_of(group: dict[str, Any]) -> list[object]:
    return [part for name, value in group.items() if name != "params" for part in (name, value)]


class RowOptimizer(TorchOptimizer):
    """Groups of modules that update their own rows, with the options that they read.

    :meth:`step` does nothing, so training loops and torch's schedulers work as with any optimizer.

    Args:
        modules: One module, several, or a list of groups ``{"modules": [...], "lr": ...}``.
        defaults: Options of groups that do not set them.
        scaler: The ``torch.amp.GradScaler`` that scales the loss. The rows step by gradients that
            are unscaled in FP32; a gradient that is not finite steps nothing, and is reported to
            the scaler (default: ``None``).

    Raises:
        ValueError: A number is out of range, or a module has no rows or another optimizer.
    """

    #: So that a gradient scaler tells :meth:`step` that it scales.
    _step_supports_amp_scaling: ClassVar[bool] = True

    # Not copied or pickled: of torch.optim's optimizers only groups and states are.
    _modules: Sequence[RowModule] = ()
    _scaler: _RowScaler | None = None

    def __init__(
        self,
        modules: Modules,
        defaults: dict[str, Any],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ValueError(
                f"scaler is {type(scaler).__name__}: pass a torch.amp.GradScaler or None"
            )
        self._scaler = None if scaler is None else _RowScaler(scaler)
        self._modules = []
        given = list(modules) if isinstance(modules, Sequence) else [modules]
        groups = [g if isinstance(g, dict) else {"modules": [g]} for g in given]
        super().__init__([self._group(group) for group in groups], defaults)
        for group in self.param_groups:
            self._check_options(group)
        for module in self._modules:
            module.row_optimizer = self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_scaler": self._scaler}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group ``{"modules": [...], "lr": ...}``.

        Raises:
            ValueError: It names parameters instead of modules, a number is out of range, or a
                module has no such rows or another optimizer.
        """
        if "modules" not in param_group:
            # The constructor's own groups, whose modules are known, come by here.
            known = self._owners()
            given = param_group.get("params", ())
            if not all(id(p) in known for p in ((given,) if isinstance(given, Tensor) else given)):
                raise ValueError(
                    f"{type(self).__name__} is for modules that update their own rows: add "
                    '{"modules": [...]}, and other parameters to a dense optimizer'
                )
            super().add_param_group(param_group)
            return
        modules, count = self._modules, len(self.param_groups)
        try:
            super().add_param_group(self._group(param_group))
            self._check_options(self.param_groups[-1])
        except Exception:
            del self.param_groups[count:]
            self._modules = modules
            raise
        added = self._modules[len(modules) :]
        self._begin(added)
        for module in added:
            module.row_optimizer = self

    def _begin(self, modules: Sequence[RowModule]) -> None:
        """Make the states of modules that have been added: here there are none."""

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in group.items() if name != "modules"}
        parameters: list[nn.Parameter] = []
        if "modules" not in group:
            raise ValueError(
                f"a group is of modules with rows, and has {sorted(group)}: give "
                "{'modules': [...]}"
            )
        for module in group["modules"]:
            self._check_module(module)
            self._modules = [*self._modules, module]
            parameters += module.row_parameters
        return {**options, "params": parameters}

    def _check_options(self, group: dict[str, Any]) -> None:
        for name in _NUMBERS:
            if name in group:
                check_number(name, group[name])
            elif name in _NEEDED:
                raise ValueError(f"a group of {type(self).__name__} has no {name}: set it")
        own = {n: group[n] for n in _OF_TORCH if n in group and n not in self.defaults}
        check_torch_options(type(self).__name__, _OF_TORCH, own)

    def _check_module(self, module: RowModule) -> None:
        if not hasattr(module, "row_parameters"):
            raise ValueError(
                f"{type(module).__name__} has no rows that update themselves: "
                f"{type(self).__name__} is for modules such as nn.ExtremeClassifier and "
                "nn.CachedEmbeddingBag"
            )
        if module.row_optimizer is not None:
            raise ValueError("a module has an optimizer already: give each to one")

    def register_step_pre_hook(self, hook: Any) -> NoReturn:
        """Raise RuntimeError: rows step in the backward pass, before there is a call of step()."""
        raise RuntimeError(
            f"a hook of register_step_pre_hook of {type(self).__name__}, whose rows step in the "
            "backward pass: it would be called after the step that it is for; set options before"
        )

    def state_dict(self) -> dict[str, Any]:
        """Options and states; those of tables that are split over ranks as DTensors."""
        saved: dict[str, Any] = super().state_dict()
        states = {}
        for index, (rows, split) in enumerate(zip(self._rows(), self._split(), strict=True)):
            state = saved["state"].get(index)
            if state is not None and split is not None:
                shown = {name: split.save_rows(rows, tensor) for name, tensor in state.items()}
                state = {name: tensor for name, tensor in shown.items() if tensor is not None}
            if state:
                states[index] = state
        return {**saved, "state": states}

    def _split(self) -> list[SplitRows | None]:
        """For each table the module that has it, if its rows are split over ranks."""
        owners = self._owners()
        found = [owners.get(id(rows)) for rows in self._rows()]
        return [module if isinstance(module, SplitRows) else None for module in found]

    def local(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict with this rank's entries of the states of tables that are split."""
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        states = dict(state_dict["state"])
        for index, rows, split in zip(indices, self._rows(), self._split(), strict=False):
            if split is not None and self.state[rows]:
                saved = states.get(index, {})
                states[index] = {
                    **saved,
                    **{
                        name: split.load_rows(rows, saved.get(name), own)
                        for name, own in self.state[rows].items()
                        if name in saved or not own.numel()
                    },
                }
        return {**state_dict, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the options; the modules restore their rows and their number of updates.

        A state dict that counts the updates of its tables itself, as those of RowSGD once did,
        hands the count to the modules.

        Raises:
            ValueError: Groups or tables differ, or this is a copy that lacks the modules.
        """
        state, counts = {}, {}
        for index, saved in state_dict["state"].items():
            state[index] = {name: value for name, value in saved.items() if name != "step"}
            if "step" in saved:
                counts[index] = int(saved["step"])
        super().load_state_dict({**state_dict, "state": {i: s for i, s in state.items() if s}})
        # Of groups that are no more.
        self.__dict__.pop("_checked", None)
        indices = (i for group in state_dict["param_groups"] for i in group["params"])
        owners = self._owners()
        for index, rows in zip(indices, self._rows(), strict=True):
            if index not in counts:
                continue
            if id(rows) not in owners:
                raise ValueError(
                    "state_dict counts the updates of its tables, and this copy of an optimizer "
                    "knows no modules: load it into the optimizer that was made for them"
                )
            owners[id(rows)].steps = counts[index]

    def _rows(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _owners(self) -> dict[int, RowModule]:
        """The module of each table, by the table's id; none in a copy of an optimizer."""
        return {id(rows): module for module in self._modules for rows in module.row_parameters}

    def groups_of(self, tables: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The group of each of several tables, as it is now.

        Args:
            tables: Their stored rows.

        Raises:
            ValueError: Some are none of this optimizer's, or an option was set out of range.
        """
        groups = {id(rows): group for group in self.param_groups for rows in group["params"]}
        found = []
        for rows in tables:
            if id(rows) not in groups:
                raise ValueError(
                    f"rows of shape {tuple(rows.shape)} belong to no group of this "
                    f"{type(self).__name__}: make a new optimizer for the module (set "
                    "module.row_optimizer = None first)"
                )
            found.append(groups[id(rows)])
        last = None
        for group in found:
            if group is not last:
                self._check_set_options(group)
            last = group
        return found

    def _check_set_options(self, group: dict[str, Any]) -> None:
        """Check a group's options, unless they are the very objects that were checked last."""
        checked = self.__dict__.setdefault("_checked", {})
        now = _options_of(group)
        before = checked.pop(id(group), ())
        if len(before) != len(now) or not all(map(is_, before, now)):
            self._check_options(group)
            now = _options_of(group)
        # Others, as tensors, may hold another number by the next time.
        if _PLAIN.issuperset(map(type, now)):
            checked[id(group)] = now

    def unscaled(self, grad: Tensor) -> Tensor | None:
        """The gradient of the loss from that of the scaled loss, which a scaler may have made.

        ``None`` if it is not finite: scalers provoke overflows, and the step is left out.
        """
        if self._scaler is None or not self._scaler.active:
            return grad
        if bool(grad.isfinite().all()):
            return unscale(grad, self.factor())
        self._report(finite=False)
        return None

    def factor(self) -> float:
        """What gradients are unscaled by; 1 without a scaler."""
        return self._scaler.factor() if self._scaler is not None and self._scaler.active else 1.0

    def _report(self, *, finite: bool) -> None:
        """Tell the scaler, which listens once between its updates."""
        assert self._scaler is not None
        # It has heard of an overflow already: nothing to add.
        with contextlib.suppress(RuntimeError):
            self._scaler.report(finite)

    def accumulator(self, rows: Tensor, group: dict[str, Any] | None = None) -> Tensor | None:
        """The state that the optimizer keeps for a table: here none."""
        return None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do nothing: the rows were updated in the forward or backward pass.

        Raises:
            RuntimeError: A gradient scaler calls this, and the optimizer was made without it: the
                rows may have stepped by gradients of the scaled loss.
        """
        if hasattr(self, "grad_scale"):
            name = type(self).__name__
            if self._scaler is not None:
                self._report(finite=True)
            # Classifiers step before the loss is scaled.
            elif any(hasattr(module, "row_shapes") for module in self._modules):
                raise RuntimeError(
                    f"scaler.step() of a {name} that was made without scaler=: the backward pass "
                    f"has updated embeddings by scaled gradients. Pass {name}(..., scaler=scaler)"
                )
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

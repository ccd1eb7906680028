"""What is done to parameters after their optimizer was made, noticed at the next step."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_Kinds = list[tuple[torch.dtype, torch.device]]


class Known:
    """The dtypes and devices that an optimizer's parameters had when they were given to it.

    Args:
        groups: Groups that it has already (default: none).
    """

    def __init__(self, groups: Sequence[dict[str, Any]] = ()) -> None:
        self._kinds = [_kinds(group) for group in groups]
        self._searched = False

    def add(self, group: dict[str, Any]) -> None:
        """Remember the parameters of a new group."""
        self._kinds.append(_kinds(group))

    def keep(self, count: int) -> None:
        """Forget all but the first groups."""
        del self._kinds[count:]

    def check(self, groups: Sequence[dict[str, Any]], state: Mapping[Tensor, Any]) -> None:
        """Notice converted, moved and exchanged parameters.

        A move to another device is taken as it is before the first step, when there are no states.

        Raises:
            RuntimeError: There is one.
        """
        kinds = [_kinds(group) for group in groups]
        if kinds != self._kinds:
            for g, (group, now, before) in enumerate(zip(groups, kinds, self._kinds, strict=False)):
                _check_kinds(g, group, now, before, state)
            self._kinds = kinds
        if len(state) > sum(p in state for group in groups for p in group["params"]):
            raise RuntimeError(
                "the optimizer has states of parameters that are no longer in its groups: they "
                "were exchanged for others, which would start anew; nothing was updated. Prepare "
                "the model (fully_shard, model.to(), ...) before the first step, or save the state "
                "dict before it and load it afterwards"
            )

    def check_used(self, groups: Sequence[dict[str, Any]], state: Mapping[Tensor, Any]) -> None:
        """Notice, in a step that finds no gradient at all, that the model has other parameters.

        Raises:
            RuntimeError: Nothing refers to the parameters but the optimizer.
        """
        if self._searched:
            return
        self._searched = True
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        own = {id(params), id(state), *(id(group["params"]) for group in groups)}
        if params and all(id(other) in own for other in gc.get_referrers(*params)):
            raise RuntimeError(
                f"none of the optimizer's {len(params)} parameters has a gradient, and nothing "
                "else has them: those of the model are others, put there by fully_shard, "
                "model.to() or a framework that prepares models. Do that first, and make the "
                "optimizer afterwards"
            )

    def found_gradients(self) -> None:
        """A step has found gradients; one that finds none may search again."""
        self._searched = False


def _kinds(group: dict[str, Any]) -> _Kinds:
    return [(p.dtype, p.device) for p in group["params"]]


def _check_kinds(
    number: int,
    group: dict[str, Any],
    now: _Kinds,
    before: _Kinds,
    state: Mapping[Tensor, Any],
) -> None:
    names = group.get("param_names")
    # Of a group that was changed by hand no more can be said.
    for i, (p, new, old) in enumerate(zip(group["params"], now, before, strict=False)):
        where = f"parameter {names[i]!r}" if names else f"parameter {i} of group {number}"
        if new[0] != old[0]:
            raise RuntimeError(
                f"{where} is {new[0]} now, and was {old[0]} when the optimizer was made: "
                "model.to(), or a framework that prepares models, has converted it; nothing was "
                "updated. Convert the model first, and make the optimizer afterwards; "
                "full_precision_state_dict and load_full_precision_state_dict carry weights over"
            )
        if new[1] != old[1] and state.get(p):
            raise RuntimeError(
                f"{where} is on {new[1]} now, and its states are on {old[1]}; nothing was updated. "
                "Move the model before the first step, or move the states after it: "
                "optimizer.load_state_dict(optimizer.state_dict())"
            )

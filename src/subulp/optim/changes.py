"""What is done to parameters after their optimizer was made, noticed at the next step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

# One call for many tensors: a step of small ones takes no longer than this would one by one.
_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


class _Kinds(NamedTuple):
    """What is remembered of a group's parameters."""

    ids: list[int]
    dtypes: list[torch.dtype]
    devices: list[torch.device]


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
        """Notice converted, moved and exchanged parameters, and those of two groups.

        A move to another device is taken as it is before the first step, when there are no states.

        Raises:
            RuntimeError: There is one.
        """
        kinds = [_kinds(group) for group in groups]
        if kinds != self._kinds:
            for g, (group, now, before) in enumerate(zip(groups, kinds, self._kinds, strict=False)):
                _check_kinds(g, group, now, before, state)
            _check_apart(groups, kinds)
            if len(state) > sum(p in state for group in groups for p in group["params"]):
                raise RuntimeError(
                    "the optimizer has states of parameters that are no longer in its groups: they "
                    "were exchanged for others, which would start anew; nothing was updated. "
                    "Prepare the model (fully_shard, model.to(), ...) before the first step, or "
                    "save the state dict before it and load it afterwards"
                )
            self._kinds = kinds

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
        if (
            params
            and not _has_more_references(params, state)
            and all(id(other) in own for other in gc.get_referrers(*params))
        ):
            raise RuntimeError(
                f"none of the optimizer's {len(params)} parameters has a gradient, and nothing "
                "else has them: those of the model are others, put there by fully_shard, "
                "model.to() or a framework that prepares models. Do that first, and make the "
                "optimizer afterwards"
            )

    def found_gradients(self) -> None:
        """A step has found gradients; one that finds none may search again."""
        self._searched = False


def _has_more_references(params: Sequence[Tensor], state: Mapping[Tensor, Any]) -> bool:
    """Whether more refers to one of them than this list, its group's and ``state``.

    The garbage collector does not tell of the local variables of functions that are running.
    """
    probe = torch.empty(0, device="cpu")
    of_its_group = [probe]
    (alone,) = _references([probe])
    # The name of the probe is one more.
    alone -= 1
    del of_its_group
    return any(
        count > alone + (p in state) for p, count in zip(params, _references(params), strict=True)
    )


def _references(tensors: Sequence[Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


def _kinds(group: dict[str, Any]) -> _Kinds:
    params = group["params"]
    return _Kinds(list(map(id, params)), list(map(_DTYPE, params)), list(map(_DEVICE, params)))


def _check_apart(groups: Sequence[dict[str, Any]], kinds: Sequence[_Kinds]) -> None:
    """Refuse a parameter of two groups, as ``add_param_group`` does; in one, the step does."""
    group_of: dict[int, int] = {}
    for g, (group, own) in enumerate(zip(groups, kinds, strict=True)):
        for i, p in enumerate(own.ids):
            if (other := group_of.setdefault(p, g)) != g:
                raise RuntimeError(
                    f"{_place(g, group, i)} is in group {other} too, and would step twice: it was "
                    "put into param_groups by hand; nothing was updated. Leave one of the two out"
                )


def _place(number: int, group: dict[str, Any], i: int) -> str:
    # One that was put there by hand may have none.
    names = group.get("param_names", ())
    return f"parameter {names[i]!r}" if i < len(names) else f"parameter {i} of group {number}"


def _check_kinds(
    number: int,
    group: dict[str, Any],
    now: _Kinds,
    before: _Kinds,
    state: Mapping[Tensor, Any],
) -> None:
    # Of a group that was changed by hand no more can be said.
    for i, (p, dtype, was, device, lay) in enumerate(
        zip(group["params"], now.dtypes, before.dtypes, now.devices, before.devices, strict=False)
    ):
        where = _place(number, group, i)
        if dtype != was:
            raise RuntimeError(
                f"{where} is {dtype} now, and was {was} when the optimizer was made: "
                "model.to(), or a framework that prepares models, has converted it; nothing was "
                "updated. Convert the model first, and make the optimizer afterwards; "
                "full_precision_state_dict and load_full_precision_state_dict carry weights over"
            )
        if device != lay and state.get(p):
            raise RuntimeError(
                f"{where} is on {device} now, and its states are on {lay}; nothing was updated. "
                "Move the model before the first step, or move the states after it: "
                "optimizer.load_state_dict(optimizer.state_dict())"
            )

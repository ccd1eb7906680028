"""State dicts: components keep their dtypes, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..numerics import extra_bits
from ..ops.step.counters import is_count
from ..ops.strategy import Strategy
from . import shards
from .components import (
    SCALAR_STATES,
    States,
    in_layout_of,
    new_state,
    packed,
    shown,
    tails_dtype,
    unpacked,
)
from .options import strategy_for

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Expected:
    """What the state dict of an optimizer must hold.

    Attributes:
        optimizer: The optimizer's name.
        options: Names that every group has.
        check: Raises ValueError if an option of a group is out of range.
        states: All states of a parameter's size that the optimizer may keep.
        states_of: Those that it keeps under the options of a group.
        states_join: They may all join later, as SGD's momentum does.
        decoupled: Weight decay is apart from the gradient.
    """

    optimizer: str
    options: set[str]
    check: Callable[[dict[str, Any]], None]
    states: States
    states_of: Callable[[dict[str, Any]], States]
    states_join: bool
    decoupled: bool


def unpack_words(groups: Groups, state_dict: dict[str, Any]) -> None:
    """Replace the packed words of a new state dict by tails of the shape of their parameters."""
    for group, p, index in _indices(groups, state_dict["param_groups"]):
        saved, strategy = state_dict["state"].get(index, {}), _strategy(group, p)
        name = strategy.words_name
        if name in saved:
            tails = unpacked(saved[name], strategy.tail_width, shards.local(p))
            state_dict["state"][index] = {**saved, name: shards.part_of(p, tails)}


def restore_components(
    groups: Groups, states: MutableMapping[Tensor, Any], state_dict: dict[str, Any]
) -> None:
    """Restore the tensors of a loaded state dict, in the dtype that they were saved in.

    Args:
        groups: The optimizer's groups.
        states: The states of its parameters, written to.
        state_dict: What was loaded.
    """
    for group, p, index in _indices(groups, state_dict["param_groups"]):
        held, part, strategy = {}, shards.local(p), _strategy(group, p)
        for name, value in state_dict["state"].get(index, {}).items():
            counted_here = name == "step" and not group["capturable"]
            device = torch.device("cpu") if counted_here else p.device
            if name in SCALAR_STATES:
                held[name] = shards.whole(value).detach().to(device, copy=True)
                continue
            width = strategy.tail_width if name == strategy.words_name else 0
            given = unpacked(value, width, _row_major(p)) if is_packed(value, p, width) else value
            component = shards.placed_like(p, given.detach()).to(device, copy=True)
            held[name] = packed(component, width, part) if width else in_layout_of(component, part)
        if held:
            # An empty entry would pass for states, and outlive a parameter that is replaced.
            states[p].update(shown(p, held))


def with_later_options(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of ours with the options that it was saved without; it is left alone."""
    groups = [
        {**group, "capturable": group.get("capturable", False)} if "precision" in group else group
        for group in state_dict.get("param_groups", ())
    ]
    return {**state_dict, "param_groups": groups} if groups else state_dict


def check_form(groups: Groups, state_dict: dict[str, Any]) -> None:
    """Raise ValueError unless a state dict is one, and has as many groups and parameters."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(
            f"state_dict has the keys {sorted(map(str, state_dict))}, an optimizer's has "
            "'state' and 'param_groups': pass what optimizer.state_dict() gave"
        )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict has {len(saved_groups)} parameter groups, the optimizer "
            f"{len(groups)}: make the optimizer with the saved groups"
        )
    for i, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"group {i} of state_dict has {len(saved['params'])} parameters, the "
                f"optimizer's has {len(group['params'])}: make the optimizer with the saved "
                "groups"
            )


def check_state_dict(expected: Expected, groups: Groups, state_dict: dict[str, Any]) -> None:
    """Raise ValueError unless a state dict fits an optimizer; the message says what does not."""
    check_form(groups, state_dict)
    for i, (group, saved) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        lacking = sorted(expected.options - set(saved))
        if lacking:
            options = sorted(set(saved) - {"params", "param_names"})
            raise ValueError(
                f"group {i} of state_dict lacks {lacking} and has {options}: another optimizer "
                f"saved it, not subulp's {expected.optimizer}. Carry it over with "
                "import_state_dict, or the weights alone with load_full_precision_state_dict"
            )
        expected.check(saved)
        _check_meaning(i, group, saved)
        for p, index in zip(group["params"], saved["params"], strict=True):
            if state_dict["state"].get(index):
                _check_components(expected, saved, p, state_dict["state"][index])


def _check_meaning(i: int, group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse components that would mean something else; ``"auto"`` equals what it resolves to."""
    differ = saved["arithmetic"] != group["arithmetic"] or any(
        _strategy(saved, p) != _strategy(group, p) for p in group["params"]
    )
    if not differ:
        return
    theirs, ours = (
        f"precision={g['precision']!r}, arithmetic={g['arithmetic']!r}" for g in (saved, group)
    )
    raise ValueError(
        f"group {i} of state_dict was saved with {theirs}, the optimizer has {ours}: the "
        "stored components would mean something else. Make the optimizer with the saved "
        "setting, or convert what is stored with import_state_dict; the weights alone are carried "
        "over by full_precision_state_dict and load_full_precision_state_dict"
    )


def _check_components(
    expected: Expected, group: dict[str, Any], p: Tensor, saved: dict[str, Any]
) -> None:
    strategy = _strategy(group, p)
    fake = torch.empty(p.shape, dtype=p.dtype, device="meta")
    needed = new_state(strategy, fake, expected.states_of(group))
    possible = new_state(strategy, fake, expected.states)
    # There may be more than needed: a scheduler may have lowered SGD's momentum to zero. Or none of
    # them: one may have raised it since the last step.
    none = set(new_state(strategy, fake, ())) if expected.states_join else set(needed)
    if not (set(needed) <= set(saved) <= set(possible) or set(saved) == none):
        raise ValueError(
            f"state_dict keeps {sorted(saved)} for a parameter of shape {tuple(p.shape)}, "
            f"{expected.optimizer} keeps {sorted(needed)}: another optimizer saved it"
        )
    if words := strategy.words_name:
        width = strategy.tail_width
        if is_packed(saved.get(words), p, width):
            saved = {name: value for name, value in saved.items() if name != words}
        possible[words] = torch.empty(p.shape, dtype=tails_dtype(width), device="meta")
    for name, value in saved.items():
        if kind(value) != kind(possible[name]):
            raise ValueError(
                f"{name} in state_dict is {kind(value)}, expected {kind(possible[name])} for a "
                f"parameter that is {kind(p)}: make the model as it was saved"
            )
        if (
            name == "step"
            and type(value) is Tensor
            and not (value.is_meta or is_count(value.item()))
        ):
            raise ValueError(
                f"step in state_dict is {value.item()}: expected how many steps were taken, a "
                "whole number from 0 on; it was changed since it was saved"
            )
        if name == strategy.words_name and bool((shards.local(value) >> width != 0).any()):
            raise ValueError(
                f"{name} in state_dict has values that are not of {width} bits, as those of "
                f"precision={group['precision']!r} are: they were changed since they were saved"
            )


def is_packed(value: object, p: Tensor, width: int) -> bool:
    """Whether tails are packed, in row-major order, as version 0.1 saved them."""
    if not isinstance(value, Tensor) or value.dtype != torch.int32 or not width:
        return False
    if value.shape != (extra_bits.packed_words(p.numel(), width),):
        return False
    # Wide tails of a few shapes are told by their values alone.
    return value.shape != p.shape or bool((value >> width != 0).any())


def _indices(groups: Groups, saved_groups: Groups) -> Iterator[tuple[dict[str, Any], Tensor, int]]:
    for group, saved in zip(groups, saved_groups, strict=True):
        for p, index in zip(group["params"], saved["params"], strict=True):
            yield group, p, index


def kind(value: object) -> str:
    """Dtype and shape of a tensor, for error messages."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"{value!r:.80}"


def _strategy(group: dict[str, Any], p: Tensor) -> Strategy:
    return strategy_for(group["precision"], p.dtype)


def _row_major(p: Tensor) -> Tensor:
    return torch.empty(p.shape, device="meta")

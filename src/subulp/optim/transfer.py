"""Optimizer states that move: from another optimizer, from another precision, and to torch's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..numerics import format_of, round_to
from ..numerics.random_bits import Region
from ..ops.step import storage
from ..ops.step.scales import largest, state_scales
from ..ops.strategy import Strategy
from . import foreign, shards
from .components import (
    States,
    new_state,
    packed,
    shown,
    store_wide,
    unpacked,
    wide_value,
)
from .foreign import Carried
from .options import parse_precision, strategy_for
from .parameters import places
from .state_dict import Expected, Groups, check_form, is_packed, kind

_OWN = frozenset(("precision", "arithmetic"))
_TORCH_DEFAULTS = {"foreach": None, "fused": None, "differentiable": False}
_ADAM_DEFAULTS = {"amsgrad": False}
_LEFT_OUT = frozenset((*_OWN, "nonfinite", "seed", "skipped_steps", "params"))

Values = list[tuple[Tensor, Tensor]]
"""Parameters and what they are to hold."""


# ----------------------------------------------------------------------------------- taking over


@torch.no_grad()
def converted(
    expected: Expected, groups: Groups, given: Mapping[str, Any]
) -> tuple[dict[str, Any], Values]:
    """A state dict of any origin as one of this optimizer, in the precisions that its groups have.

    Args:
        expected: What the optimizer keeps.
        groups: The optimizer's groups; left alone.
        given: A state dict.

    Returns:
        The state dict, and what each parameter that has a state is to hold.

    Raises:
        ValueError: See ``Optimizer.import_state_dict``.
    """
    given = _arranged(groups, given)
    check_form(groups, given)
    new_groups, states, values = [], {}, []
    known = places(groups)
    for i, (group, saved) in enumerate(zip(groups, given["param_groups"], strict=True)):
        own = set(saved) >= _OWN
        if own and not expected.options <= set(saved):
            raise foreign.stranger(expected, i, saved)
        if own:
            parse_precision(saved["precision"])
            options, reader = dict(saved), _reader_of_ours(expected)
        else:
            options, reader = foreign.options_of(expected, i, saved)
        taken = {name: copy.deepcopy(v) for name, v in options.items() if name != "params"}
        held = {name: group[name] for name in group if name not in ("params", "param_names")}
        new = held | taken | {name: group[name] for name in _OWN} | {"params": saved["params"]}
        new_groups.append(new)
        for p, index in zip(group["params"], saved["params"], strict=True):
            state = given["state"].get(index)
            if not state:
                continue
            if not isinstance(state, dict):
                raise ValueError(
                    f"state_dict has {kind(state)} as the state of parameter {index!r}, expected "
                    "names and tensors"
                )
            strategy = strategy_for(group["precision"], p.dtype)
            if own and _is_stored_alike(saved, strategy, p, state, expected.states):
                states[index] = state
                continue
            carried = reader(saved, p, state)
            _check_names(expected, p, carried)
            if not (own or carried.moments or carried.step):
                continue
            value, stored = _stored(
                strategy, p, carried, expected.states, seed=new["seed"], stream=known[id(p)].stream
            )
            values.append((p, value))
            states[index] = stored
    return {"state": states, "param_groups": new_groups}, values


def _arranged(groups: Groups, given: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in the groups of the optimizer, if it has others and both have names."""
    result = dict(given)
    theirs = result.get("param_groups", [])
    sizes = [len(g["params"]) for g in theirs], [len(g["params"]) for g in groups]
    if sizes[0] == sizes[1] or not all("param_names" in g for g in (*theirs, *groups)):
        return result
    where = {
        name: (g, index)
        for g, group in enumerate(theirs)
        for name, index in zip(group["param_names"], group["params"], strict=True)
    }
    arranged = []
    for i, group in enumerate(groups):
        missing = [name for name in group["param_names"] if name not in where]
        if missing:
            raise ValueError(f"state_dict has no parameter {missing[0]!r}, which group {i} has")
        found = [where[name] for name in group["param_names"]]
        origins = sorted({g for g, _ in found})
        options = [{**theirs[g], "params": None, "param_names": None} for g in origins]
        if any(option != options[0] for option in options[1:]):
            raise ValueError(
                f"group {i} has parameters of the groups {origins} of state_dict, whose options "
                "differ: make the optimizer with groups that do not join these"
            )
        first = theirs[origins[0]] if origins else group
        arranged.append({**first, "params": [x for _, x in found], "param_names": None})
    for each, group in zip(arranged, groups, strict=True):
        each["param_names"] = list(group["param_names"])
    return result | {"param_groups": arranged}


def _is_stored_alike(
    saved: dict[str, Any], strategy: Strategy, p: Tensor, state: dict[str, Any], states: States
) -> bool:
    """Whether nothing is to be converted: what was encoded twice might have other components."""
    try:
        before = strategy_for(saved["precision"], p.dtype)
    except ValueError:
        return False
    fake = torch.empty(p.shape, dtype=p.dtype, device="meta")
    new = {name: value.dtype for name, value in new_state(strategy, fake, states).items()}
    dtypes = {
        n: getattr(value, "dtype", None) for n, value in state.items() if n != strategy.words_name
    }
    return before == strategy and dtypes.items() <= new.items()


def _check_names(expected: Expected, p: Tensor, carried: Carried) -> None:
    names = {name for name, _ in expected.states}
    if carried.moments and set(carried.moments) != names:
        raise ValueError(
            f"state_dict keeps {sorted(carried.moments)} for a parameter of shape "
            f"{tuple(p.shape)}, {expected.optimizer} keeps {sorted(names)}: another optimizer "
            "saved it. Load the weights alone, with load_full_precision_state_dict"
        )


# -------------------------------------------------------------------------------- another precision


def _reader_of_ours(expected: Expected) -> foreign.Reader:
    """Reads what an optimizer of ours saved in any precision."""

    def read(group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Carried:
        step, amax = foreign.number("step", state.get("step")), None
        if "gradient_amax" in state:
            amax = torch.tensor(foreign.number("gradient_amax", state["gradient_amax"]))
        scales = _scales(amax, expected.states)
        moments = {}
        for (name, role), scale in zip(expected.states, scales, strict=True):
            if name not in state:
                continue
            low = state.get(f"{name}_low") if role == "slow" else None
            moments[name] = storage.decode_state(
                foreign.wide(name, p, state[name]),
                None if low is None else foreign.wide(f"{name}_low", p, low),
                1.0 / scale,
            )
        return Carried(step, moments, weight=_saved_weight(group, p, state), amax=amax)

    return read


def _scales(amax: Tensor | None, states: States) -> list[float]:
    """What the states of a parameter are multiplied by where they are stored."""
    if amax is None:
        return [1.0 for _ in states]
    fast, slow = state_scales(float(amax), len(states))
    return [fast if role == "fast" else slow for _, role in states]


def _saved_weight(group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Tensor | None:
    """The FP32 value of a parameter whose own value was saved apart, and has been loaded.

    It may have another dtype now. What is kept beside it counts where its value is still the one
    that was saved, as after any other change.
    """
    part = shards.local(p).detach()
    own = part.to(torch.float32)
    for name in ("parameter_low", "compensation"):
        if name in state:
            # In FP32 only to be checked: its dtype is the one that the parameter had.
            foreign.wide(name, p, state[name])
            return with_rest(part, shards.placed_like(p, state[name].detach()).to(p.device))
    if "master" in state:
        master = foreign.wide("master", p, state["master"])
        heads = (round_to(master, format_of(dtype)) for dtype in (torch.bfloat16, torch.float16))
        same = [head.to(p.dtype).to(torch.float32) == own for head in heads]
        return torch.where(torch.stack(same).any(0), master, own)
    for name in ("signed_bits", "extra_bits"):
        if name in state:
            return _with_bits(name, group, p, state[name])
    return None


def with_rest(part: Tensor, rest: Tensor) -> Tensor:
    """A parameter and what is kept beside it, as FP32; it counts where the parameter can have it.

    Args:
        part: The parameter, of any dtype.
        rest: Of the dtype that the parameter had when it was saved.
    """
    own, head = part.to(torch.float32), part.to(rest.dtype)
    strategy = strategy_for("collage-light", rest.dtype)
    together = storage.decode_parameter(strategy, head, rest)
    return torch.where(head.to(torch.float32) == own, together, own)


def _with_bits(name: str, group: dict[str, Any], p: Tensor, saved: Tensor) -> Tensor:
    part = shards.local(p).detach()
    halves = p.dtype in (torch.bfloat16, torch.float16)
    strategy = strategy_for(group["precision"], p.dtype if halves else torch.bfloat16)
    width = strategy.tail_width
    if is_packed(saved, p, width):
        saved = unpacked(saved, width, torch.empty(p.shape, device="meta"))
    foreign.wide(name, p, saved)
    tails = shards.placed_like(p, saved.detach()).to(p.device)
    if halves:
        held = {name: packed(tails, width, part)}
        return wide_value(strategy, part, held)
    own = part.to(torch.float32)
    narrow = [
        bool((own.to(d).to(torch.float32) == own).all()) for d in (torch.bfloat16, torch.half)
    ]
    if any(narrow) and bool((tails != 0).any()):
        raise ValueError(
            f"state_dict keeps {name} of a 16-bit parameter, and the parameter is {p.dtype} now: "
            "load the weights first, with full_precision_state_dict of the model as it was saved"
        )
    return own


def _stored(
    strategy: Strategy, p: Tensor, carried: Carried, states: States, *, seed: int, stream: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """A parameter's value and its state, as the state dict of a strategy has it."""
    part = shards.local(p).detach()
    kept = tuple((name, role) for name, role in states if name in carried.moments)
    value, held = part.clone(), new_state(strategy, part, kept)
    held["step"].fill_(carried.step)
    amax = None
    if "gradient_amax" in held:
        amax = carried.amax if carried.amax is not None else _amax(p, carried, states)
        held["gradient_amax"] = amax.to(p.device, torch.float32, copy=True)
    for (name, _), scale in zip(kept, _scales(amax, states), strict=False):
        moment = carried.moments[name]
        storage.encode_state(moment, held[name], held.get(f"{name}_low"), scale, None)
    weight = carried.weight
    if carried.rest is not None:
        weight = with_rest(part, carried.rest.to(p.device))
    if weight is None:
        weight = part.to(torch.float32)
    if strategy.extra_name or carried.weight is not None or carried.rest is not None:
        region: Region = shards.region_of(p)
        store_wide(strategy, value, held, weight, seed=seed, stream=stream, region=region)
    words = strategy.words_name
    tails = unpacked(held.pop(words), strategy.tail_width, part) if words else None
    result = shown(p, held)
    if tails is not None:
        result[words] = shards.part_of(p, tails)
    return value, result


def _amax(p: Tensor, carried: Carried, states: States) -> Tensor:
    """A largest gradient that moments can come from, so that their scaled values fit FP8."""
    found = torch.zeros((), dtype=torch.float32, device=p.device)
    for name, role in states:
        moment = carried.moments.get(name)
        if moment is None:
            continue
        amax = largest([moment])[0]
        power = len(states) if role == "slow" else 1
        found = torch.maximum(found, amax.sqrt() if power == 2 else amax)
    if shards.is_sharded(p):
        found = shards.reduced([p], found[None], "max")[0]
    return torch.where(found.isfinite(), found, 0.0)


# ------------------------------------------------------------------------------------ giving back


@torch.no_grad()
def exported(groups: Groups, state: Mapping[Tensor, Any], expected: Expected) -> dict[str, Any]:
    """What torch.optim's class of the same name loads; see ``Optimizer.export_state_dict``."""
    index, states, saved_groups = 0, {}, []
    for group in groups:
        count = len(group["params"])
        saved = {n: copy.deepcopy(v) for n, v in group.items() if n not in _LEFT_OUT}
        saved |= _TORCH_DEFAULTS
        if "betas" in saved:
            saved |= _ADAM_DEFAULTS | {"decoupled_weight_decay": expected.decoupled}
        else:
            # Torch's SGD counts nothing.
            del saved["capturable"]
        saved["params"] = list(range(index, index + count))
        saved_groups.append(saved)
        for number, p in enumerate(group["params"], index):
            held = state.get(p)
            if held:
                states[number] = _for_torch(p, held, expected.states)
        index += count
    return {"state": states, "param_groups": saved_groups}


def _for_torch(p: Tensor, held: dict[str, Tensor], states: States) -> dict[str, Tensor]:
    scales = _scales(held.get("gradient_amax"), states)
    result = {"step": held["step"].detach().clone()}
    for (name, _), scale in zip(states, scales, strict=True):
        if name not in held:
            continue
        low = held.get(f"{name}_low")
        wide = storage.decode_state(
            shards.local(held[name]), None if low is None else shards.local(low), 1.0 / scale
        )
        result[name] = shards.part_of(p, wide.clone())
    return result

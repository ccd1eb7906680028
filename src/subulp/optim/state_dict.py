"""State dicts whose components keep their own dtypes, and are refused where they mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .layout import in_layout_of, repack
from .precision import strategy_for

if TYPE_CHECKING:
    from .base import Optimizer

SCALAR_STATES = ("step", "gradient_amax")
"""States of one number a tensor."""


def use_row_major_words(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give the packed words of a fresh state dict the row-major order of their parameters."""
    for p, index in _indices(optimizer, state_dict["param_groups"]):
        saved = state_dict["state"].get(index, {})
        if "extra_bits" in saved and not p.is_contiguous():
            width = optimizer._strategy(optimizer._group_of(p), p).tail_width
            words = repack(saved["extra_bits"], width, p, _row_major(p))
            state_dict["state"][index] = {**saved, "extra_bits": words}


def restore_components(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Put the tensors of a loaded state dict back as they were saved, in dtype and order."""
    for p, index in _indices(optimizer, state_dict["param_groups"]):
        for name, value in state_dict["state"].get(index, {}).items():
            device = torch.device("cpu") if name == "step" else p.device
            component = value.detach().to(device, copy=True)
            if name == "extra_bits":
                width = optimizer._strategy(optimizer._group_of(p), p).tail_width
                component = repack(component, width, _row_major(p), p)
            elif name not in SCALAR_STATES:
                component = in_layout_of(component, p)
            optimizer.state[p][name] = component


def check_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ValueError unless a state dict fits the optimizer; its message names the misfit."""
    mine = type(optimizer).__name__
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(
            f"state_dict has the keys {sorted(map(str, state_dict))}, an optimizer's has "
            "'state' and 'param_groups': pass what optimizer.state_dict() gave"
        )
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"state_dict has {len(groups)} parameter groups, the optimizer "
            f"{len(optimizer.param_groups)}: make the optimizer with the saved groups"
        )
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"group {i} of state_dict has {len(saved['params'])} parameters, the "
                f"optimizer's has {len(group['params'])}: make the optimizer with the saved "
                "groups"
            )
        lacking = sorted(optimizer._options() - set(saved))
        if lacking:
            options = sorted(set(saved) - {"params", "param_names"})
            raise ValueError(
                f"group {i} of state_dict lacks {lacking} and has {options}: another optimizer "
                f"saved it, not subulp's {mine}. Load it there, or carry the weights over with "
                "load_full_precision_state_dict"
            )
        optimizer._check_all_options(saved)
        _check_meaning(optimizer, i, group, saved)
        for p, index in zip(group["params"], saved["params"], strict=True):
            if state_dict["state"].get(index):
                _check_components(optimizer, saved, p, state_dict["state"][index])


def _check_meaning(
    optimizer: Optimizer, i: int, group: dict[str, Any], saved: dict[str, Any]
) -> None:
    """Refuse components that mean something else here; ``"auto"`` is what it stands for."""
    differ = saved["arithmetic"] != group["arithmetic"] or any(
        strategy_for(saved["precision"], p.dtype) != optimizer._strategy(group, p)
        for p in group["params"]
    )
    if not differ:
        return
    theirs, ours = (
        f"precision={g['precision']!r}, arithmetic={g['arithmetic']!r}" for g in (saved, group)
    )
    raise ValueError(
        f"group {i} of state_dict was saved with {theirs}, the optimizer has {ours}: the "
        "stored components would mean something else. Make the optimizer with the saved "
        "setting, or carry the weights over with full_precision_state_dict and "
        "load_full_precision_state_dict"
    )


def _check_components(
    optimizer: Optimizer, group: dict[str, Any], p: Tensor, saved: dict[str, Any]
) -> None:
    fake = p.detach().to("meta")
    needed, possible = (
        optimizer._new_state(group, fake),
        optimizer._new_state(group, fake, optimizer._states),
    )
    # More than needed: a scheduler may have brought SGD's momentum to zero since.
    if not set(needed) <= set(saved) <= set(possible):
        raise ValueError(
            f"state_dict keeps {sorted(saved)} for a parameter of shape {tuple(p.shape)}, "
            f"{type(optimizer).__name__} keeps {sorted(needed)}: another optimizer saved it"
        )
    for name, value in saved.items():
        expected = possible[name]
        if kind(value) != kind(expected):
            raise ValueError(
                f"{name} in state_dict is {kind(value)}, expected {kind(expected)} for a "
                f"parameter that is {kind(p)}: make the model as it was saved"
            )


def _indices(
    optimizer: Optimizer, saved_groups: list[dict[str, Any]]
) -> Iterator[tuple[Tensor, int]]:
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        yield from zip(group["params"], saved["params"], strict=True)


def kind(value: object) -> str:
    """Dtype and shape of a tensor, as errors give them."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"{value!r:.80}"


def _row_major(p: Tensor) -> Tensor:
    return torch.empty(p.shape, device="meta")

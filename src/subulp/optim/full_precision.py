"""FP32 weights in and out of a narrow model, through all components of its parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..ops.step import storage
from ..ops.strategy import Strategy, parse_strategy
from .layout import storage_view
from .state_dict import kind

if TYPE_CHECKING:
    from .base import Optimizer
    from .bucket import Place


@torch.no_grad()
def state_dict(optimizer: Optimizer, model: nn.Module) -> OrderedDict[str, Tensor]:
    """See ``Optimizer.full_precision_state_dict``."""
    named = dict(model.named_parameters(remove_duplicate=False))
    place = optimizer._places()
    result: OrderedDict[str, Tensor] = OrderedDict()
    for name, value in model.state_dict().items():
        p = named.get(name)
        if p is not None and id(p) in place:
            result[name] = optimizer._wide_value(
                optimizer.param_groups[place[id(p)].group], p
            ).clone()
        elif p is not None and p.is_floating_point() and p.dtype.itemsize < 4:
            result[name] = p.detach().to(torch.float32, copy=True)
        else:
            # Modules may keep extra state that is no tensor.
            result[name] = value.detach().clone() if isinstance(value, Tensor) else value
    return result


@torch.no_grad()
def load_state_dict(
    optimizer: Optimizer, model: nn.Module, state_dict: Mapping[str, Tensor]
) -> None:
    """See ``Optimizer.load_full_precision_state_dict``."""
    own = model.state_dict()
    missing, unexpected = sorted(set(own) - set(state_dict)), sorted(set(state_dict) - set(own))
    if missing or unexpected:
        raise ValueError(
            f"state_dict lacks {missing} and has unexpected {unexpected}: load weights of this "
            "model"
        )
    for name, value in own.items():
        given = state_dict[name]
        if not isinstance(value, Tensor):
            continue
        if not isinstance(given, Tensor) or given.shape != value.shape or given.is_complex():
            raise ValueError(
                f"{name} is {kind(given)} in state_dict, the model has {kind(value)}: load "
                "weights of this model"
            )
    named = dict(model.named_parameters(remove_duplicate=False))
    place = optimizer._places()
    others: dict[str, Any] = {}
    for name in own:
        p = named.get(name)
        if p is None or id(p) not in place:
            others[name] = state_dict[name]
            continue
        _store_wide(optimizer, place[id(p)], p, state_dict[name].to(p.device, torch.float32))
    model.load_state_dict(others, strict=False)


def decode(strategy: Strategy, p: Tensor, extra: Tensor) -> Tensor:
    """Wide value of a parameter of any dense layout, in its own dimension order."""
    beside = extra if extra.dim() != p.dim() else storage_view(extra, p)
    dense = storage.decode_parameter(strategy, storage_view(p, p), beside)
    return (
        storage_view(torch.empty_like(p, dtype=torch.float32), p)
        .copy_(dense)
        .as_strided(p.shape, p.stride())
    )


def _store_wide(optimizer: Optimizer, place: Place, p: Tensor, wide: Tensor) -> None:
    group = optimizer.param_groups[place.group]
    strategy = optimizer._strategy(group, p)
    state = optimizer._state_of(group, strategy, p)
    extra = state.get(strategy.extra_name) if strategy.extra_name else None
    target = storage_view(p.detach(), p)
    if strategy.weight == "stochastic":
        # A given weight is best kept by its nearest neighbour; only updates need be unbiased.
        strategy = parse_strategy("nearest")
    bits = storage.draw_bits(
        strategy,
        target,
        seed=group["seed"],
        stream=place.stream,
        step=int(state["step"].item()),
        offset=0,
    )
    beside = extra if extra is None or extra.dim() != p.dim() else storage_view(extra, p)
    aligned = torch.empty_like(p, dtype=torch.float32).copy_(wide)
    storage.encode_parameter(strategy, storage_view(aligned, p), target, beside, bits)

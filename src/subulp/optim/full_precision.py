"""Import and export of FP32 weights, through all components of a narrow model's parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor, nn

from .state_dict import kind

EXTRA_STATE = "_extra_state"
"""How the names of what ``Module.get_extra_state`` returns end."""


@torch.no_grad()
def state_dict(
    model: nn.Module, stored: Container[int], wide_value: Callable[[Tensor], Tensor]
) -> OrderedDict[str, Tensor]:
    """See ``Optimizer.full_precision_state_dict``.

    Args:
        model: The model.
        stored: Ids of the parameters that the optimizer stores in components.
        wide_value: The FP32 value of such a parameter.
    """
    parameters = _by_saved_name(model)
    result: OrderedDict[str, Tensor] = OrderedDict()
    for name, value in model.state_dict().items():
        p = parameters.get(name)
        if p is not None and id(p) in stored:
            result[name] = wide_value(p).clone()
        elif p is not None and p.is_floating_point() and p.dtype.itemsize < 4:
            result[name] = p.detach().to(torch.float32, copy=True)
        else:
            # A module's extra state need not be a tensor.
            result[name] = value.detach().clone() if isinstance(value, Tensor) else value
    return result


@torch.no_grad()
def load_state_dict(
    model: nn.Module,
    given: Mapping[str, Tensor],
    stored: Container[int],
    store: Callable[[Tensor, Tensor], None],
) -> None:
    """See ``Optimizer.load_full_precision_state_dict``.

    Args:
        model: The model.
        given: Its weights, by name.
        stored: Ids of the parameters that the optimizer stores in components.
        store: Writes the FP32 value of such a parameter into its components.
    """
    own = model.state_dict()
    # Weights that were trained without mixtures have none; the layers' own loading accepts that.
    own = {n: v for n, v in own.items() if n in given or not n.endswith(EXTRA_STATE)}
    missing, unexpected = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if missing or unexpected:
        raise ValueError(
            f"state_dict lacks {missing} and has unexpected {unexpected}: load weights of this "
            "model"
        )
    for name, value in own.items():
        if isinstance(value, Tensor):
            _check(name, given[name], value)
    parameters = _by_saved_name(model)
    others: dict[str, Tensor] = {}
    for name in own:
        p = parameters.get(name)
        if p is None or id(p) not in stored:
            others[name] = given[name]
        else:
            store(p, given[name].to(p.device, torch.float32))
    model.load_state_dict(others, strict=False)


def _by_saved_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their names in the state dict.

    Wrappers, such as that of activation checkpoints, name them otherwise there.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    kept = model.state_dict(keep_vars=True)
    return named | {n: v for n, v in kept.items() if isinstance(v, nn.Parameter)}


def _check(name: str, given: object, value: Tensor) -> None:
    if not isinstance(given, Tensor) or given.shape != value.shape or given.is_complex():
        raise ValueError(
            f"{name} is {kind(given)} in state_dict, the model has {kind(value)}: load weights of "
            "this model"
        )

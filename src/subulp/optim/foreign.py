"""State dicts of other optimizers, read as FP32 moments: torch, torchao, bitsandbytes, optimi."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops.pointers import is_plain_type
from . import shards
from .state_dict import Expected, kind

_BITSANDBYTES = "__bnb_optimizer_quant_state__"
# What an 8-bit state of bitsandbytes scales together: today's, and that of version 0.44.
_BLOCKS = (256, 2048)

# Options of other optimizers that choose an implementation, or are read under another name.
_NOT_TAKEN = frozenset(
    (
        *("params", "param_names"),
        *("amsgrad", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"),
        *("alpha", "t_alpha", "t_beta3", "beta1", "beta2", "step", "setup", "triton", "max_lr"),
        *("decouple_wd", "decouple_lr", "kahan_sum", "torch_init", "gradient_release"),
    )
)


@dataclass
class Carried:
    """What a state dict keeps of one parameter, free of any storage.

    Attributes:
        step: Number of steps.
        moments: FP32 states by our names, what this rank holds of them.
        rest: What is to be added to the parameter, as a Kahan sum keeps it; or ``None``.
        weight: The parameter's FP32 value, what this rank holds; ``None`` is its own.
        amax: The running largest gradient of FP8 states, or ``None``.
    """

    step: float = 0.0
    moments: dict[str, Tensor] = field(default_factory=dict)
    rest: Tensor | None = None
    weight: Tensor | None = None
    amax: Tensor | None = None


Reader = Callable[[dict[str, Any], Tensor, dict[str, Any]], Carried]
"""Reads the state of a parameter, from its group, the parameter, and the state itself."""


def options_of(
    expected: Expected, number: int, saved: dict[str, Any]
) -> tuple[dict[str, Any], Reader]:
    """The options of a group that another optimizer saved, under our names, and how to read it.

    Args:
        expected: The optimizer that is to have them.
        number: The group's number, for errors.
        saved: The group.

    Raises:
        ValueError: It belongs to another algorithm, or does something that has no counterpart.
    """
    given, reader = dict(saved), _read_torch
    momentum = "momentum" in expected.options
    if "decouple_lr" in saved:
        reader = _read_optimi
        if {"beta1", "beta2"} <= saved.keys():
            given["betas"] = (saved["beta1"], saved["beta2"])
        if momentum and "dampening" in saved:
            # There a flag: the gradient enters by 1 - momentum.
            given["dampening"] = saved.get("momentum") if saved["dampening"] else 0.0
            given.setdefault("nesterov", False)
        if saved["decouple_lr"] and saved.get("weight_decay"):
            raise _error(
                f"in group {number} decouple_lr=True, a weight decay that does not follow lr"
            )
    elif "t_alpha" in saved or "alpha" in saved or _is_bitsandbytes_sgd(saved):
        reader = _read_bitsandbytes
        # Its Adam decays as its AdamW does.
        given["decouple_wd"] = not _is_bitsandbytes_sgd(saved)
        if momentum and _is_bitsandbytes_sgd(saved):
            given |= {"momentum": saved["betas"][0], "dampening": 0.0, "nesterov": False}
            del given["betas"], given["eps"]
    elif not momentum and "amsgrad" not in saved:
        raise stranger(expected, number, saved)
    given.setdefault("maximize", False)
    own = {"precision", "arithmetic", "nonfinite", "seed", "skipped_steps", "capturable"}
    needed = expected.options - own
    strange = {"betas", "eps", "momentum", "dampening"} - needed
    if not needed <= set(given) or strange & set(given):
        raise stranger(expected, number, saved)
    if saved.get("amsgrad"):
        raise _error(
            f"in group {number} amsgrad=True, whose largest second moments no precision here keeps"
        )
    decoupled = given.get("decoupled_weight_decay", given.get("decouple_wd", expected.decoupled))
    if bool(decoupled) != expected.decoupled and saved["weight_decay"]:
        theirs = "decoupled from" if decoupled else "added to"
        raise _error(
            f"in group {number} weight_decay={saved['weight_decay']} {theirs} the gradient, unlike "
            f"subulp's {expected.optimizer}"
        )
    return {name: value for name, value in given.items() if name not in _NOT_TAKEN}, reader


def _is_bitsandbytes_sgd(saved: dict[str, Any]) -> bool:
    """Momentum SGD is there an Adam of one state: betas (momentum, 0), and no eps."""
    betas = saved.get("betas")
    return (
        set(saved) - _NOT_TAKEN - {"initial_lr"} == {"lr", "betas", "eps", "weight_decay"}
        and "amsgrad" not in saved
        and isinstance(betas, (tuple, list))
        and len(betas) == 2
        and betas[1] == 0
        and saved["eps"] == 0
    )


def stranger(expected: Expected, number: int, saved: dict[str, Any]) -> ValueError:
    """The error for a group that another algorithm saved."""
    options = sorted(set(saved) - {"params", "param_names"})
    return ValueError(
        f"group {number} of state_dict has the options {options}: another algorithm than "
        f"{expected.optimizer} saved it, or another library than torch, torchao, bitsandbytes, "
        "torch-optimi and subulp. Load the weights alone, with load_full_precision_state_dict"
    )


def _error(what: str) -> ValueError:
    return ValueError(
        f"state_dict has {what}: it cannot be carried over. Load the weights alone, with "
        "load_full_precision_state_dict"
    )


# --------------------------------------------------------------------------------------- readers


def _read_torch(group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Carried:
    """torch.optim's, and torchao's, whose tensors are quantized and dequantize themselves."""
    found = {name: value for name, value in state.items() if value is not None}
    moments = {name: wide(name, p, value) for name, value in found.items() if name != "step"}
    # SGD counts no steps there, and its buffer has begun.
    return Carried(number("step", found.get("step", 1.0 if moments else 0.0)), moments)


def _read_bitsandbytes(group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Carried:
    found = state | state.get(_BITSANDBYTES, {})
    if "unorm_vec" in found:
        raise _error("norms of updates (max_unorm, LAMB, LARS)")
    pairs = {"1": "exp_avg" if "state2" in found else "momentum_buffer", "2": "exp_avg_sq"}
    moments = {}
    for key, name in pairs.items():
        value = found.get(f"state{key}")
        if isinstance(value, Tensor) and value.dtype == torch.uint8:
            value = _dequantized(name, value, found[f"qmap{key}"], found[f"absmax{key}"])
        if value is not None:
            moments[name] = wide(name, p, value)
    return Carried(number("step", found.get("step", 1.0)), moments)


def _dequantized(name: str, codes: Tensor, table: Tensor, largest: Tensor) -> Tensor:
    """Codes of a table, each block of them scaled by its largest magnitude, as FP32."""
    count = codes.numel()
    blocks = [size for size in _BLOCKS if -(-count // size) == largest.numel()]
    if not blocks:
        raise ValueError(
            f"{name} in state_dict has {count} codes and {largest.numel()} scales: blocks of "
            f"{' or '.join(map(str, _BLOCKS))} are known. Save it from a newer bitsandbytes"
        )
    scales = largest.to(torch.float32).repeat_interleave(blocks[0])[:count]
    values = table.to(torch.float32)[codes.reshape(-1).long()] * scales.to(codes.device)
    return values.view(codes.shape)


def _read_optimi(group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Carried:
    """torch-optimi's, whose moments are debiased as they are stored."""
    unknown = sorted(set(state) - {"step", "exp_avg", "exp_avg_sq", "kahan_comp"})
    if unknown:
        raise _error(f"{unknown} for a parameter, another algorithm's")
    steps = number("step", state["step"] if "step" in state else group.get("step", 1.0))
    rest = state.get("kahan_comp")
    if isinstance(rest, Tensor) and (rest.dtype == torch.uint8 or rest.shape != p.shape):
        # Triton's placeholder.
        rest = None
    moments = {}
    if "beta1" in group:
        for name, beta in (("exp_avg", group["beta1"]), ("exp_avg_sq", group["beta2"])):
            moments[name] = wide(name, p, state.get(name)) * (1.0 - float(beta) ** steps)
    elif group["momentum"]:
        moments["momentum_buffer"] = wide("exp_avg", p, state.get("exp_avg"))
    return Carried(steps, moments, None if rest is None else shards.placed_like(p, rest))


# --------------------------------------------------------------------------------------- values


def number(name: str, value: object) -> float:
    """A number, or a tensor of one; ``name`` is what errors call it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(shards.whole(value).detach().reshape(()).item())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{name} in state_dict is {kind(value)}, expected a number")


def wide(name: str, p: Tensor, value: object) -> Tensor:
    """A state in FP32, what this rank holds of it.

    Args:
        name: What errors call it.
        p: Its parameter.
        value: A DTensor, or the whole state; or a subclass with ``dequantize()``.

    Raises:
        ValueError: It is no tensor of real numbers, or does not have the parameter's shape.
    """
    if not isinstance(value, Tensor) or value.shape != p.shape or value.is_complex():
        raise ValueError(
            f"{name} in state_dict is {kind(value)}, expected a tensor of shape {tuple(p.shape)} "
            f"for a parameter that is {kind(p)}: make the model as it was saved"
        )
    part = shards.local(value.detach())
    if is_plain_type(type(part)):
        return shards.placed_like(p, value.detach()).to(p.device, torch.float32)
    if shards.is_sharded(value) and not (shards.is_sharded(p) and shards.is_placed_like(p, value)):
        raise ValueError(
            f"{name} in state_dict is quantized and sharded otherwise than its parameter: save it "
            "from the same mesh, or whole"
        )
    plain = part.dequantize().to(p.device, torch.float32)
    return plain if shards.is_sharded(value) else shards.placed_like(p, plain)

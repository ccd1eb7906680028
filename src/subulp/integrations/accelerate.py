"""Accelerate: whether it trains what was meant, with subulp's optimizers.

``Accelerator.prepare`` may wrap the model, replace its parameters and change their dtype, after the
optimizer was made::

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

is ``accelerator.prepare`` with a check before and one after. Where a program of somebody else's
calls it, :func:`check` comes after.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

from ..optim.base import Optimizer

_OWN_STEPS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def prepare(accelerator: Accelerator, *objects: Any, **options: Any) -> Any:
    """``accelerator.prepare(*objects)``, which refuses what would train otherwise than meant.

    Args:
        accelerator: The ``Accelerator``.
        objects: Models, optimizers, loaders and schedulers, in any order.
        options: Of ``Accelerator.prepare``.

    Returns:
        What it returns, in the same order.

    Raises:
        ValueError: As of :func:`check`; or the weights would become FP32, or the states of an
            optimizer would be lost. Nothing was prepared in these two cases.
    """
    _check_distribution(accelerator)
    models = [each for each in objects if isinstance(each, torch.nn.Module)]
    optimizers = [found for each in objects for found in _unwrapped(each)]
    if accelerator.is_fsdp2 and optimizers:
        for model in models:
            _check_dtypes_stay(accelerator, model)
        for optimizer in optimizers:
            if optimizer.state:
                raise ValueError(
                    "the optimizer has states, and FSDP2 replaces the parameters that they belong "
                    "to: prepare first, and load states by accelerator.load_state"
                )
            if optimizer.fused is not None:
                raise ValueError(_fused_too_early("FSDP2 replaces the parameters"))
    prepared = accelerator.prepare(*objects, **options)
    found = prepared if isinstance(prepared, tuple) else (prepared,)
    models = [each for each in found if isinstance(each, torch.nn.Module)]
    for each in found:
        for optimizer in _unwrapped(each):
            # Which of several models an optimizer is for, it does not say.
            if len(models) == 1:
                _check_pair(accelerator, models[0], optimizer)
    return prepared


def check(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:
    """Raise ValueError if a prepared pair would train otherwise than meant.

    Args:
        accelerator: The ``Accelerator``.
        model: The prepared model.
        optimizer: The prepared optimizer of its parameters, or of some of them.

    Raises:
        ValueError: The optimizer is not subulp's, or Accelerate does not step it; it has parameters
            or states that are not the model's; Accelerate made FP32 weights of narrow ones; it did
            not shard the model, though it was asked to; or the step is fused into a backward pass
            that does not go through the gradients of all ranks, or not through all of its losses.
    """
    _check_distribution(accelerator)
    unwrapped = list(_unwrapped(optimizer))
    if not unwrapped:
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}: pass one of subulp.optim, prepared or not"
        )
    for each in unwrapped:
        _check_pair(accelerator, model, each)
        _check_precisions(accelerator, each)


def _check_pair(accelerator: Accelerator, model: torch.nn.Module, optimizer: Optimizer) -> None:
    _check_parameters(model, optimizer)
    _check_fused(accelerator, model, optimizer)


def _unwrapped(optimizer: Any) -> Iterator[Optimizer]:
    """The optimizer of subulp in Accelerate's wrappers, if there is one."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, Optimizer):
        yield optimizer


def _check_distribution(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in _OWN_STEPS:
        raise ValueError(
            f"distributed_type is {kind.value}, which keeps FP32 copies of the weights and steps "
            "those: use DDP, or FSDP2 by FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "fsdp_version is 1, whose flat parameters know nothing of the whole ones: pass "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and kind != DistributedType.FSDP and accelerator.num_processes > 1:
        raise ValueError(
            f"FSDP was asked for, and distributed_type is {kind.value}: Accelerate shards on "
            "accelerators alone, and would replicate here. Use torch's fully_shard and prepare "
            "the loader only, or leave the plugin out"
        )


def _check_dtypes_stay(accelerator: Accelerator, model: torch.nn.Module) -> None:
    if accelerator.mixed_precision == "no":
        return
    narrow = {n: p for n, p in model.named_parameters() if _is_narrow(p)}
    if narrow:
        name, p = next(iter(narrow.items()))
        raise ValueError(
            f"{len(narrow)} parameters are narrow, {name} for one in {p.dtype}, and under FSDP2 "
            f"mixed_precision={accelerator.mixed_precision!r} would make FP32 weights of them: "
            "pass Accelerator(mixed_precision='no'); narrow weights compute in their dtype anyway"
        )


def _is_narrow(p: torch.Tensor) -> bool:
    return p.requires_grad and p.is_floating_point() and p.dtype != torch.float32


def _check_parameters(model: torch.nn.Module, optimizer: Optimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    in_model = {id(p) for p in model.parameters()}
    strange = [p for p in params if id(p) not in in_model]
    if strange:
        raise ValueError(
            f"{len(strange)} of the optimizer's {len(params)} parameters are not the model's, the "
            f"first of shape {tuple(strange[0].shape)}: pass model and optimizer to one prepare()"
        )
    stepped = {id(p) for p in params}
    stale = [p for p in optimizer.state if id(p) not in stepped]
    if stale:
        raise ValueError(
            f"the optimizer has states of {len(stale)} parameters that prepare() has replaced, and "
            "would begin anew: prepare first, and load states by accelerator.load_state"
        )


def _check_precisions(accelerator: Accelerator, optimizer: Optimizer) -> None:
    """Under FSDP2 and mixed precision, FP32 weights must be what was asked for."""
    if not accelerator.is_fsdp2 or accelerator.mixed_precision == "no":
        return
    for g, group in enumerate(optimizer.param_groups):
        wide = [p for p in group["params"] if p.dtype == torch.float32]
        if wide and group["precision"] != "fp32":
            raise ValueError(
                f"group {g} has precision={group['precision']!r} and {len(wide)} parameters in "
                f"FP32: under FSDP2, mixed_precision={accelerator.mixed_precision!r} makes FP32 "
                "weights of narrow ones. Pass Accelerator(mixed_precision='no'), or "
                "precision='fp32' if FP32 weights are meant"
            )


def _check_fused(accelerator: Accelerator, model: torch.nn.Module, optimizer: Optimizer) -> None:
    if optimizer.fused is None:
        return
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the step is fused into the backward pass, and DistributedDataParallel reduces "
            "gradients after they have stepped: the ranks would drift apart. Use FSDP2; or remove "
            "the handle; or do not prepare the model, and fuse with reduce="
        )
    steps = accelerator.gradient_accumulation_steps
    if steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={steps} waits for optimizer.step(), and the fused step "
            f"comes in every backward pass: use 1, fuse with accumulate={steps}, and divide the "
            "loss"
        )
    if accelerator.scaler is not None:
        raise ValueError(
            "accelerator.scaler scales the loss, and the fused step takes the gradients before "
            "they are unscaled: fuse with scaler= in a loop of your own, or use BF16"
        )


def _fused_too_early(why: str) -> str:
    return (
        f"the step is fused into the backward pass of parameters as they are now, and {why}: "
        "prepare first, then optim.fuse_backward(model, optimizer.optimizer)"
    )


__all__ = ["check", "prepare"]

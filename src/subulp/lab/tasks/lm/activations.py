"""The dtype of activations that suits a machine, found by measuring."""

from __future__ import annotations

import math
import time
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from .config import ActivationDtype, LMConfig
from .models import Block, Shape, use_bf16

Times = dict[ActivationDtype, float]

FASTER = 1.1
"""BF16 rounds more, so it has to be worth it; and noise must not decide."""

_ROUNDS = 10
_SECONDS = 0.3
# A wide model is timed with fewer tokens: BF16 without units makes 1 or 2 GFLOP a second.
_FLOP_PER_PASS = 2**30
_FEWEST_TOKENS = 16
# Of a narrower model, calls cost most of the time, in both dtypes: noise would decide.
_LEAST_WIDTH = 128
_LEAST_TOKENS = 64
_CLEARLY = 2.0


def choose(
    config: LMConfig, shape: Shape, device: torch.device
) -> tuple[ActivationDtype, dict[str, Any]]:
    """The dtype of activations that ``"auto"`` means.

    Args:
        config: The comparison.
        shape: Sizes of its model.
        device: Where it trains.

    Returns:
        The dtype; and as plain JSON the reason, with the times if there are any.
    """
    if config.dtype == "fp16":
        return "fp32", {"activations_reason": "fp32, because of dtype=fp16"}
    if device.type == "cuda":
        # Without units of its own, a GPU emulates BF16.
        has = torch.cuda.is_bf16_supported(including_emulation=False)
        reason = "the GPU has BF16 units" if has else "the GPU has no BF16 units"
        chosen: ActivationDtype = "bf16" if has else "fp32"
        return chosen, {"activations_reason": f"{chosen}, because {reason}"}
    if shape.width < _LEAST_WIDTH:
        reason = f"a model of width {shape.width} is too narrow for BF16 units to matter"
        return "fp32", {"activations_reason": f"fp32, because {reason}"}
    seconds = block_seconds(shape, config.batch_size)
    chosen = "bf16" if FASTER * seconds["bf16"] <= seconds["fp32"] else "fp32"
    wide, narrow = (round(1e3 * seconds[name], 3) for name in ("fp32", "bf16"))
    return chosen, {
        "activations_reason": (
            f"{chosen}, because a block takes {wide:.3g} ms in FP32 and {narrow:.3g} ms in BF16"
        ),
        "block_ms_fp32": wide,
        "block_ms_bf16": narrow,
    }


def block_seconds(shape: Shape, batch_size: int) -> Times:
    """Seconds of a forward and backward pass through one block on the CPU, the best of a few.

    Its parameters are in the dtype of its activations, whatever a run stores: what is compared are
    the units, and not what decoding costs.

    Args:
        shape: Sizes of the model.
        batch_size: Sequences in a batch; fewer, or shorter ones, where a pass takes long.
    """
    wide = Block(shape)
    narrow = deepcopy(wide).bfloat16()
    use_bf16(narrow)
    # Forward and backward: products with 12 matrices of width times width, and attention.
    flop_per_token = 72 * shape.width**2 + 12 * shape.context * shape.width
    tokens = max(_FEWEST_TOKENS, _FLOP_PER_PASS // flop_per_token)
    length = min(shape.context, tokens)
    wanted = max(batch_size, _LEAST_TOKENS // shape.context)
    sequences = max(1, min(wanted, tokens // length))
    x = torch.randn(sequences, length, shape.width)
    passes: dict[ActivationDtype, tuple[nn.Module, torch.Tensor]]
    passes = {"fp32": (wide, x), "bf16": (narrow, x.bfloat16())}
    # The first products of a process load their kernels, which can take a second.
    for module, values in passes.values():
        _seconds(module, values[:1, :_FEWEST_TOKENS])
    best: Times = dict.fromkeys(passes, math.inf)
    begun = time.perf_counter()
    # By turns, so that a slow moment of the machine meets both.
    for made in range(_ROUNDS):
        for name, (module, values) in passes.items():
            best[name] = min(best[name], _seconds(module, values))
        again = made == 0 and best["bf16"] < _CLEARLY * best["fp32"]
        if time.perf_counter() - begun > _SECONDS and not again:
            break
    return best


def _seconds(module: nn.Module, x: torch.Tensor) -> float:
    inputs = [x.detach().requires_grad_(), *module.parameters()]
    started = time.perf_counter()
    torch.autograd.grad(module(inputs[0]), inputs, grad_outputs=x)
    return time.perf_counter() - started

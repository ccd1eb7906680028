"""What the tasks' optimizers share: groups of parameters, and learning rates over a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...optim.base import Optimizer

# Enough for every component to have a whole number of bytes.
_SAMPLE = 1024


def decay_groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Named parameters in two groups: kernels and matrices decay, vectors do not."""
    named = list(named)
    return [
        {"params": [(n, p) for n, p in named if p.dim() >= 2]},
        {"params": [(n, p) for n, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def steps_of(steps: int | None, epochs: int | None, per_epoch: int) -> int:
    """Training steps of a run.

    Args:
        steps: What was asked for; ``None`` counts epochs.
        epochs: Passes over the training part.
        per_epoch: Steps of a pass.
    """
    return (epochs or 0) * per_epoch if steps is None else steps


def one_cycle(step: int, steps: int, *, warmup: float, final: float) -> float:
    """Share of the highest learning rate at ``step`` (from 0): a linear rise, then half a cosine.

    Args:
        step: The step.
        steps: All of them; the last one has ``final``.
        warmup: Share of the steps in which the rate rises.
        final: Share of the highest rate at the last step.
    """
    return rise_and_fall(step, steps, rising=int(warmup * steps), final=final)


def rise_and_fall(step: int, steps: int, *, rising: int, final: float) -> float:
    """:func:`one_cycle` with the number of steps in which the rate rises."""
    if step < rising:
        return (step + 1) / rising
    falling = max(1, steps - 1 - rising)
    progress = min(1.0, (step - rising) / falling)
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def bytes_of_parameters(
    optimizer: Callable[..., Optimizer], dtype: torch.dtype, count: int, **options: Any
) -> int:
    """Bytes that training keeps of dense parameters, without making them.

    Args:
        optimizer: Its class.
        dtype: Dtype of the parameters.
        count: How many numbers they are.
        **options: Of the optimizer, the precision among them.
    """
    one = nn.Parameter(torch.zeros(_SAMPLE).to(dtype))
    # With a seed: without one, ranks would agree on it.
    return int(count * optimizer([one], seed=0, **options).bytes_per_parameter()["total"])

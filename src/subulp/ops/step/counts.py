"""What a step counts on the device, so that a CUDA graph that holds it counts at every replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor

from ..capture import Held

Numbers = Callable[[int], tuple[float, float, float]]
"""From t to ``step_size``, ``inv_sqrt_bias2`` and ``decay``."""

LONGEST = 1 << 20
"""Steps in a table of bias corrections: 8 MiB in FP64."""


@dataclass
class Counts:
    """Counters that the step itself increments, and what follows from them.

    Attributes:
        steps: FP32 tensors () on the device of the parameters, the steps taken before.
        lr: The learning rate; of a tensor, a replay takes what it holds then.
        numbers: From a learning rate to the scalars of each step.
        held: What keeps tables for graphs.
        betas: Decays of the moments whose bias is corrected, or ``None``.
        weight_decay: Times the learning rate, the ``decay``.
        fresh: Whether each momentum buffer begins with this step, at whatever t; none if empty.
        settled: The host knows the scalars of this step.
    """

    steps: Sequence[Tensor]
    lr: Tensor | float
    numbers: Callable[[float], Numbers]
    held: Held
    betas: tuple[float, float] | None = None
    weight_decay: float = 0.0
    fresh: Sequence[bool] = ()
    settled: bool = False


def check_betas(beta1: float, beta2: float) -> None:
    """Raise ValueError unless the corrections of moments that decay so are few enough to keep."""
    for name, beta, last in (("beta1", beta1, _bias), ("beta2", beta2, _root)):
        if last(beta, LONGEST) != 1.0:
            raise ValueError(
                f"{name}={beta} is not available with capturable=True: its bias corrections change "
                f"for more than {LONGEST} steps, and a table of them is kept on the device; use a "
                "smaller one, or leave capturable out"
            )


@lru_cache(maxsize=16)
def corrections(beta1: float, beta2: float) -> tuple[np.ndarray, np.ndarray]:
    """Bias corrections of the steps 1, 2, ... up to the first from which on they are 1.

    Returns:
        ``1 - beta1**t`` in FP64, and ``(1 - beta2**t) ** -0.5``, rounded to FP32.
    """
    return (
        np.array(_until_one(_bias, beta1), dtype=np.float64),
        np.array(_until_one(_root, beta2), dtype=np.float32),
    )


def _until_one(correction: Callable[[float, int], float], beta: float) -> list[float]:
    found = [correction(beta, 1)]
    while found[-1] != 1.0:
        found.append(correction(beta, len(found) + 1))
    return found


# Python's power, as the host computes a step's scalars: NumPy's may differ in the last bit.
def _bias(beta: float, t: int) -> float:
    return 1.0 - beta**t


def _root(beta: float, t: int) -> float:
    return float(np.float32(1.0 / math.sqrt(1.0 - beta**t)))

"""Powers of two that FP8 states are stored by: they follow the largest recent gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...numerics import E4M3
from .. import pointers
from ..strategy import Strategy

SCALES = ("fast_decode", "fast_encode", "slow_decode", "slow_encode", "slow_floor")
"""The scalars of a tensor that are scales."""

# FP8 states are stored relative to the largest recent gradient A (a power of two): the first moment
# as m / A * 2**7, the second as v / A**2 * 2**13. Both then reach down to about 2**-16 A.
FAST_HEADROOM = 2.0**7
SLOW_HEADROOM = 2.0**13
AMAX_MEMORY = 0.99
MOST = 50
"""The largest exponent of a unit: its square stays in FP32's range."""


@dataclass
class Scaling:
    """What the states of a step are scaled by.

    Stored codes are decoded with the scale of the previous step and encoded with that of this one,
    so that the states follow gradients over many orders of magnitude. All scales are powers of two:
    multiplying by them rounds nothing.

    Attributes:
        amaxes: FP32 tensors (), the running maximum after the previous step; the step updates them.
        slow_power: 2 if the slow state is a second moment, 1 if it is a momentum.
        least: The slow state's smallest number, a power of two.
        found: FP32 ``(count,)``, the largest gradient of each whole tensor; ``None`` takes those of
            the job.
        after: FP32 ``(count,)``, the running maximum after this step, where the host knows it.
    """

    amaxes: Sequence[Tensor]
    slow_power: int
    least: float
    found: Tensor | None = None
    after: Tensor | None = None

    def settle(self, grads: Sequence[Tensor]) -> np.ndarray:
        """Have the host know the scales, before the step is taken.

        Args:
            grads: The gradients.

        Returns:
            FP32 ``(count, 5)``, what :data:`SCALES` name.
        """
        now = largest(grads) if self.found is None else self.found
        before = torch.stack(tuple(self.amaxes))
        # One transfer for all.
        before, now = torch.cat([before, now.to(before.device)]).cpu().double().chunk(2)
        after = torch.where(now.isfinite(), torch.maximum(before * AMAX_MEMORY, now), before)
        self.after = after.float()
        rows = []
        for old_amax, new_amax in zip(before.tolist(), self.after.tolist(), strict=True):
            old, new = (state_scales(amax, self.slow_power) for amax in (old_amax, new_amax))
            floor = self.least / new[1] if self.slow_power == 2 else 0.0
            rows.append((1.0 / old[0], new[0], 1.0 / old[1], new[1], floor))
        return np.array(rows, dtype=np.float32)

    def keep(self) -> None:
        """Let the running maxima be those after this step, which the host knows."""
        assert self.after is not None, "settle comes before the step"
        after = self.after.to(self.amaxes[0].device)
        torch._foreach_copy_(list(self.amaxes), list(after.unbind()))


def scaling_of(
    strategy: Strategy,
    params: Sequence[Tensor],
    slow: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    slow_power: int,
    found: Tensor | None,
) -> Scaling | None:
    """The scaling of a step's states, ``None`` if they are not scaled.

    Args:
        strategy: How the parameters are kept.
        params: The parameters.
        slow: The slow states.
        amaxes: See :class:`Scaling`, like the others.
        slow_power: For this step.
        found: One for each parameter.

    Raises:
        ValueError: ``amaxes`` or ``found`` are not one FP32 number for each parameter; or one of
            the former lies on another device than the parameters, or has no memory.
    """
    if strategy.wide_states or params[0].dtype != E4M3.dtype:
        return None
    count, device = len(params), params[0].device
    if len(amaxes) != count:
        raise ValueError(
            f"amaxes has {len(amaxes)} tensors: the scaled states of FP8 parameters take {count}"
        )
    for i, amax in enumerate(amaxes):
        if amax.dtype != torch.float32 or amax.dim() or amax.device != device:
            raise ValueError(
                f"amaxes[{i}] is {amax.dtype} of shape {tuple(amax.shape)} on {amax.device}: "
                f"expected a float32 tensor () on {device}"
            )
    pointers.dense_ptrs("amaxes", amaxes)
    if found is not None and (found.dtype != torch.float32 or found.shape != (count,)):
        raise ValueError(
            f"gradient_amaxes is {found.dtype} of shape {tuple(found.shape)}: expected float32 "
            f"({count},)"
        )
    if not slow:
        return None
    least = strategy.slow_format(params[0].dtype).smallest_subnormal
    return Scaling(amaxes, slow_power, least, found)


def state_scales(amax: float, slow_power: int) -> tuple[float, float]:
    """What FP8 states are multiplied by where they are stored; decoding divides by it.

    Args:
        amax: The running largest gradient.
        slow_power: Power of a gradient that the slow state holds: 2 for Adam, 1 for SGD.

    Returns:
        Powers of two: of the fast state, and of the slow one.
    """
    unit = _unit(amax)
    slow_headroom = SLOW_HEADROOM if slow_power == 2 else FAST_HEADROOM
    return FAST_HEADROOM / unit, slow_headroom / unit**slow_power


def largest(grads: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each gradient, FP32 ``(count,)``."""
    return torch.stack([_amax(g) for g in grads])


def exponent_of(power: float) -> int:
    """The exponent of a power of two, or of the one at or below a number."""
    return math.frexp(power)[1] - 1


def _amax(g: Tensor) -> Tensor:
    """The largest magnitude, an FP32 tensor ()."""
    if g.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=g.device)
    if g.dtype.itemsize == 1:
        # FP8 has no reductions; the codes of magnitudes are in their order.
        code = (g.contiguous().view(torch.uint8) & 0x7F).amax()
        return code.view(g.dtype).to(torch.float32)
    return g.abs().amax().to(torch.float32)


def _unit(amax: float) -> float:
    """The power of two at or below ``amax``; 1 for zero. Its square stays in FP32's range."""
    if amax == 0.0:
        return 1.0
    return 2.0 ** min(max(exponent_of(amax), -MOST), MOST)

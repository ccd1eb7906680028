"""One call of a fused step: its tensors, and its numbers rounded to FP32 once.

Every implementation reads the same job, so none of them computes a scalar of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..numerics import E4M3, format_of
from .strategy import Strategy, parse_strategy

# The layout of `subulp_scalars` in csrc/subulp.h.
SCALARS = np.dtype(
    [
        ("step_size", np.float32),
        ("inv_sqrt_bias2", np.float32),
        ("decay", np.float32),
        ("fast_decode", np.float32),
        ("fast_encode", np.float32),
        ("slow_decode", np.float32),
        ("slow_encode", np.float32),
        ("slow_floor", np.float32),
        ("step", np.uint32),
        ("stream", np.uint32),
        ("offset", np.uint64),
    ],
    align=True,
)

# FP8 states are stored relative to the largest recent gradient A (a power of two): the first moment
# as m / A * 2**7, the second as v / A**2 * 2**13. Both then reach down to about 2**-16 A.
_FAST_HEADROOM = 2.0**7
_SLOW_HEADROOM = 2.0**13
_AMAX_MEMORY = 0.99

STRICT = ("nearest", "kahan", "collage-light", "collage-plus")
"""Strategies with the papers' arithmetic, every operation rounded to the narrow format."""


@dataclass
class StepJob:
    """Arguments of ``subulp::adam_step`` and ``subulp::sgd_step``, checked and completed.

    The lists have one entry a tensor; lists of roles that the strategy lacks are empty. ``fast``
    is Adam's first moment; ``slow`` Adam's second moment or SGD's momentum buffer.
    """

    strategy: Strategy
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    fast: Sequence[Tensor]
    slow: Sequence[Tensor]
    extras: Sequence[Tensor]
    slow_lows: Sequence[Tensor]
    scalars: np.ndarray
    seed: int
    beta1: float
    one_minus_beta1: float
    beta2: float = 0.0
    one_minus_beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    nesterov: bool = False
    maximize: bool = False
    strict: bool = False
    exact: dict[str, float] = field(default_factory=dict)
    """Hyperparameters before they were rounded, for strict arithmetic."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.params[0].device

    @property
    def scaled_states(self) -> bool:
        """Whether stored states are scaled by powers of two (FP8)."""
        return not self.strategy.wide_states and self.params[0].dtype == E4M3.dtype

    def role(self, tensors: Sequence[Tensor], i: int) -> Tensor | None:
        """Entry ``i`` of a role that may be absent."""
        return tensors[i] if tensors else None


def as_fp32(x: float) -> float:
    """``x`` rounded to FP32 once, as a Python float."""
    return float(np.float32(x))


def new_scalars(
    steps: Sequence[Tensor], streams: Sequence[int], offsets: Sequence[int]
) -> np.ndarray:
    """Scalars of a job with neutral numbers and the addresses of its random bits."""
    scalars = np.zeros(len(steps), dtype=SCALARS)
    for name in ("inv_sqrt_bias2", "fast_decode", "fast_encode", "slow_decode", "slow_encode"):
        scalars[name] = 1.0
    scalars["step"] = [int(t.item()) for t in steps]
    scalars["stream"] = streams
    scalars["offset"] = offsets
    return scalars


def check_roles(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    precision: str,
    roles: dict[str, Sequence[Tensor]],
) -> Strategy:
    """The strategy of a call, once its tensors fit it.

    Raises:
        ValueError: A list has another length than ``params``, a tensor another shape, dtype or
            device than the strategy gives it, or a tensor is not dense.
    """
    strategy = parse_strategy(precision)
    if not params:
        raise ValueError("params is empty: pass at least one tensor")
    first = params[0]
    strategy.check_dtype(first.dtype)
    for name, tensors in {"grads": grads, **roles}.items():
        if len(tensors) not in ({len(params)} if name == "grads" else {0, len(params)}):
            raise ValueError(f"{name} has {len(tensors)} tensors: expected {len(params)}")
    for i, p in enumerate(params):
        if p.dtype != first.dtype or p.device != first.device:
            raise ValueError(
                f"params[{i}] is {p.dtype} on {p.device}, params[0] {first.dtype} on "
                f"{first.device}: "
                "call once per dtype and device"
            )
        if grads[i].dtype != grads[0].dtype:
            raise ValueError(f"grads[{i}] is {grads[i].dtype}, grads[0] {grads[0].dtype}")
        format_of(grads[i].dtype)
        for name, tensors in {"params": params, "grads": grads, **roles}.items():
            if not tensors or (name == "extras" and strategy.weight == "extra-bits"):
                continue
            if tensors[i].shape != p.shape:
                raise ValueError(
                    f"{name}[{i}] has shape {tuple(tensors[i].shape)}, its parameter "
                    f"{tuple(p.shape)}"
                )
            if not tensors[i].is_contiguous():
                raise ValueError(
                    f"{name}[{i}] has strides {tensors[i].stride()}: pass contiguous tensors (a "
                    "permuted view of a dense tensor is one)"
                )
    return strategy


def is_strict(arithmetic: str, strategy: Strategy, dtype: torch.dtype) -> bool:
    """Whether a call asks for strict narrow arithmetic.

    Raises:
        ValueError: ``arithmetic`` is unknown, or the strategy does not have the strict one.
    """
    if arithmetic == "wide":
        return False
    if arithmetic != "strict":
        raise ValueError(f"arithmetic={arithmetic!r} is unknown: use 'wide' or 'strict'")
    if strategy.name not in STRICT or dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"arithmetic='strict' is not available for precision={strategy.name!r} with {dtype} "
            f"parameters: it exists for {', '.join(STRICT)} with bfloat16 or float16; use 'wide'"
        )
    return True


def scale_states(job: StepJob, amaxes: Sequence[Tensor], slow_power: int) -> None:
    """Set the scales of FP8 states from the running largest gradient, and update it in place.

    Stored codes are decoded with the scale of the previous step and encoded with that of this one,
    so that the states follow gradients over many orders of magnitude. All scales are powers of two:
    multiplying by them rounds nothing.

    Args:
        job: Its scalars are completed.
        amaxes: FP32 tensors (), the running maximum after the previous step; updated.
        slow_power: 2 if the slow state is a second moment, 1 if it is a momentum.
    """
    for i, (g, amax) in enumerate(zip(job.grads, amaxes, strict=True)):
        before = float(amax.item())
        now = _amax(g)
        after = max(before * _AMAX_MEMORY, now) if math.isfinite(now) else before
        amax.fill_(after)
        old, new = _unit(before), _unit(float(amax.item()))
        slow_headroom = _SLOW_HEADROOM if slow_power == 2 else _FAST_HEADROOM
        scalars = job.scalars[i]
        scalars["fast_decode"] = old / _FAST_HEADROOM
        scalars["fast_encode"] = _FAST_HEADROOM / new
        scalars["slow_decode"] = old**slow_power / slow_headroom
        scalars["slow_encode"] = slow_headroom / new**slow_power
        if slow_power == 2:
            least = job.strategy.slow_format(job.params[i].dtype).smallest_subnormal
            scalars["slow_floor"] = least * new**2 / slow_headroom


def _amax(g: Tensor) -> float:
    if g.numel() == 0:
        return 0.0
    if g.dtype.itemsize == 1:
        # FP8 has no reductions; the codes of magnitudes are in their order.
        code = (g.contiguous().view(torch.uint8) & 0x7F).amax()
        return float(code.view(g.dtype).to(torch.float32).item())
    return float(g.abs().amax().item())


def _unit(amax: float) -> float:
    """The power of two at or below ``amax``; 1 for zero. Its square stays in FP32's range."""
    if amax == 0.0:
        return 1.0
    return 2.0 ** min(max(math.frexp(amax)[1] - 1, -50), 50)

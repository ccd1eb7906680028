"""``subulp::sgd_step``: one fused SGD step over a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...numerics.ieee import as_fp32
from .. import backend
from ..capture import Held
from ..step.counts import Numbers
from ..step.job import StepJob, check_roles, counted, is_strict
from ..step.scales import scaling_of


def make_job(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    extras: Sequence[Tensor],
    momentum_lows: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    steps: Sequence[Tensor] | Tensor,
    lr: Tensor | float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    precision: str,
    arithmetic: str,
    seed: int,
    streams: Sequence[int],
    offsets: Sequence[int],
    fresh: Sequence[bool] | None = None,
    runs: Sequence[int] | None = None,
    gradient_amaxes: Tensor | None = None,
    held: Held | None = None,
) -> StepJob:
    """The job of a call of :func:`step`: the same arguments, checked and completed.

    With ``held`` the step counts on the device, as :func:`subulp.ops.adam.make_job` has it.

    Raises:
        ValueError: The tensors do not fit the strategy, see the message.
    """
    strategy, sizes = check_roles(
        params,
        grads,
        precision,
        {"momentum_buffers": momentum_buffers, "extras": extras, "momentum_lows": momentum_lows},
    )
    scalars, counts = counted(steps, streams, offsets, lr, _numbers, held, fresh=fresh, runs=runs)
    return StepJob(
        strategy=strategy,
        params=params,
        grads=grads,
        fast=(),
        slow=momentum_buffers,
        extras=extras,
        slow_lows=momentum_lows,
        scalars=scalars,
        seed=seed,
        beta1=as_fp32(momentum),
        one_minus_beta1=as_fp32(1.0 - dampening),
        weight_decay=as_fp32(weight_decay),
        nesterov=nesterov,
        maximize=maximize,
        strict=is_strict(arithmetic, strategy, params[0].dtype),
        # Strict arithmetic has the host count.
        exact={
            "lr": float(lr) if held is None else math.nan,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
        },
        scaling=scaling_of(strategy, params, momentum_buffers, amaxes, 1, gradient_amaxes),
        counts=counts,
        numbers=_numbers,
        sizes=sizes,
    )


def _numbers(rate: float) -> Numbers:
    return lambda t: (rate, 1.0, 0.0)


def step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    extras: Sequence[Tensor],
    momentum_lows: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    precision: str,
    arithmetic: str,
    seed: int,
    streams: Sequence[int],
    offsets: Sequence[int],
    fresh: Sequence[bool] | None = None,
    runs: Sequence[int] | None = None,
    gradient_amaxes: Tensor | None = None,
) -> None:
    """One SGD step; all tensors are updated in place in one pass over memory.

    With ``wide`` the FP32 value that a tensor's stored components stand for, it equals, each
    operation rounded to FP32 and each result rounded once to its storage::

        g = g + wide(p) * weight_decay
        b = g if t == 1 or fresh else wide(b) * momentum + g * (1 - dampening)
        p = wide(p) - (g + b * momentum if nesterov else b) * lr

    Without momentum buffers ``b`` is ``g``. Kahan summation and FP8 states as in
    :func:`subulp.ops.adam.step`.

    Args:
        params: Parameters of one dtype and device.
        grads: Gradients of the shapes of ``params``, of one dtype: FP32 or any narrow format.
        momentum_buffers: Momentum buffers, or empty.
        extras: What the strategy keeps beside the parameter; else empty.
        momentum_lows: Second components of the momentum buffers (``"collage-plus"``); else empty.
        amaxes: FP32 tensors (), the running largest gradient (FP8 parameters); else empty.
        steps: Tensors () holding t, counted from 1, already incremented.
        lr: The learning rate, for the operator a tensor (); FP64 for no rounding before it is used.
        momentum: Decay of the momentum buffer.
        dampening: Dampening of the gradient that enters it.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum.
        maximize: Ascend instead of descend.
        precision: Name of the strategy, see :func:`subulp.ops.strategy.parse_strategy`.
        arithmetic: ``"wide"``, or ``"strict"`` for the papers' narrow arithmetic (reference only).
        seed: Philox key word of the random bits.
        streams: Philox key word of each tensor.
        offsets: Index of each tensor's first element in the whole tensor, for shards.
        fresh: Whether each momentum buffer begins with this gradient; all do at t = 1 (default:
            ``None``, no others).
        runs: Six numbers for each tensor that is a shard of several runs of the whole one, see
            :attr:`subulp.numerics.random_bits.Region.runs` (default: ``None``, one run each).
        gradient_amaxes: FP32 ``(count,)``, the largest gradient of each whole tensor, for shards of
            FP8 parameters (default: ``None``, the tensors are whole).

    Raises:
        ValueError: The tensors do not fit the strategy, see the message.
    """
    backend.run("sgd", make_job(**locals()))


sgd_step = torch.library.custom_op(
    "subulp::sgd_step",
    step,
    mutates_args=("params", "momentum_buffers", "extras", "momentum_lows", "amaxes"),
)
"""The operator: :func:`step` for compiled and exported graphs."""


@sgd_step.register_fake
def _(*arguments: object, **named: object) -> None:
    """Nothing is returned, and no tensor changes its shape."""

"""``subulp::adam_step``: one fused Adam or AdamW step over a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

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
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    extras: Sequence[Tensor],
    exp_avg_sq_lows: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    steps: Sequence[Tensor] | Tensor,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    precision: str,
    arithmetic: str,
    seed: int,
    streams: Sequence[int],
    offsets: Sequence[int],
    folded: bool = False,
    runs: Sequence[int] | None = None,
    gradient_amaxes: Tensor | None = None,
    held: Held | None = None,
) -> StepJob:
    """The job of a call of :func:`step`: the same arguments, checked and completed.

    With ``held``, which keeps tables for CUDA graphs, the step counts on the device: ``steps`` are
    FP32 tensors () there that it increments, and a tensor ``lr`` is read there.

    Raises:
        ValueError: The tensors do not fit the strategy, see the message.
    """
    strategy, sizes = check_roles(
        params,
        grads,
        precision,
        {
            "exp_avgs": exp_avgs,
            "exp_avg_sqs": exp_avg_sqs,
            "extras": extras,
            "exp_avg_sq_lows": exp_avg_sq_lows,
        },
    )
    factor = weight_decay if decoupled else 0.0
    numbers = partial(_numbers, beta1, beta2, factor)
    scalars, counts = counted(
        steps,
        streams,
        offsets,
        lr,
        numbers,
        held,
        betas=(beta1, beta2),
        weight_decay=factor,
        runs=runs,
    )
    return StepJob(
        strategy=strategy,
        params=params,
        grads=grads,
        fast=exp_avgs,
        slow=exp_avg_sqs,
        extras=extras,
        slow_lows=exp_avg_sq_lows,
        scalars=scalars,
        seed=seed,
        beta1=1.0 if folded else as_fp32(beta1),
        one_minus_beta1=as_fp32(1.0 - beta1),
        beta2=1.0 if folded else as_fp32(beta2),
        one_minus_beta2=as_fp32(1.0 - beta2),
        eps=as_fp32(eps),
        weight_decay=as_fp32(weight_decay),
        decoupled=decoupled,
        maximize=maximize,
        strict=is_strict(arithmetic, strategy, params[0].dtype),
        # Strict arithmetic has the host count.
        exact={
            "lr": float(lr) if held is None else math.nan,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
        },
        scaling=scaling_of(strategy, params, exp_avg_sqs, amaxes, 2, gradient_amaxes),
        counts=counts,
        numbers=numbers,
        sizes=sizes,
    )


def _numbers(beta1: float, beta2: float, factor: float, rate: float) -> Numbers:
    decay = rate * factor
    return lambda t: (rate / (1.0 - beta1**t), 1.0 / math.sqrt(1.0 - beta2**t), decay)


def step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    extras: Sequence[Tensor],
    exp_avg_sq_lows: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    precision: str,
    arithmetic: str,
    seed: int,
    streams: Sequence[int],
    offsets: Sequence[int],
    folded: bool = False,
    runs: Sequence[int] | None = None,
    gradient_amaxes: Tensor | None = None,
) -> None:
    """One Adam step; all tensors are updated in place in one pass over memory.

    With ``wide`` the FP32 value that a tensor's stored components stand for, it equals, each
    operation rounded to FP32 and each result rounded once to its storage::

        if not decoupled:
            g = g + wide(p) * weight_decay
        m = wide(m) * beta1 + g * (1 - beta1)
        v = wide(v) * beta2 + (g * (1 - beta2)) * g
        delta = (m * (lr / (1 - beta1**t))) / (v.sqrt() * (1 / (1 - beta2**t) ** 0.5) + eps)
        if decoupled:
            delta = delta + wide(p) * (lr * weight_decay)     # Collage, Algorithm 2, line 12
        p = wide(p) - delta

    Kahan summation adds ``-delta`` to the compensation first: ``u = c - delta; p' = p + u;
    c' = u - (p' - p)``. FP8 states are scaled by powers of two that follow the largest gradient.

    Args:
        params: Parameters of one dtype and device.
        grads: Gradients of the shapes of ``params``, of one dtype: FP32 or any narrow format.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        extras: What the strategy keeps beside the parameter: second component, compensation, FP32
            master weight or packed extra bits; else empty.
        exp_avg_sq_lows: Second components of the second moments (``"collage-plus"``); else empty.
        amaxes: FP32 tensors (), the running largest gradient (FP8 parameters); else empty.
        steps: Tensors () holding t, counted from 1, already incremented.
        lr: The learning rate, for the operator a tensor (); FP64 for no rounding before it is used.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled (AdamW) or coupled (Adam) weight decay.
        decoupled: Which of the two.
        maximize: Ascend instead of descend.
        precision: Name of the strategy, see :func:`subulp.ops.strategy.parse_strategy`.
        arithmetic: ``"wide"``, or ``"strict"`` for the papers' narrow arithmetic (reference only).
        seed: Philox key word of the random bits.
        streams: Philox key word of each tensor.
        offsets: Index of each tensor's first element in the whole tensor, for shards.
        folded: Earlier gradients of this step are in the moments, which have decayed with the first
            of them: they do not decay again (default: ``False``).
        runs: Six numbers for each tensor that is a shard of several runs of the whole one, see
            :attr:`subulp.numerics.random_bits.Region.runs` (default: ``None``, one run each).
        gradient_amaxes: FP32 ``(count,)``, the largest gradient of each whole tensor, for shards of
            FP8 parameters (default: ``None``, the tensors are whole).

    Raises:
        ValueError: The tensors do not fit the strategy, see the message.
    """
    backend.run("adam", make_job(**locals()))


adam_step = torch.library.custom_op(
    "subulp::adam_step",
    step,
    mutates_args=("params", "exp_avgs", "exp_avg_sqs", "extras", "exp_avg_sq_lows", "amaxes"),
)
"""The operator: :func:`step` for compiled and exported graphs."""


@adam_step.register_fake
def _(*arguments: object, **named: object) -> None:
    """Nothing is returned, and no tensor changes its shape."""

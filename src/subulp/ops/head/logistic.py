"""The gradient of the loss from the logits, in place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics.logistic import sigmoid, softplus
from .. import backend, native
from ..pointers import data_ptr
from .fp8 import to_bf16_


@dataclass(frozen=True)
class Positives:
    """Elements of a matrix of logits whose label is 1, each given once.

    Attributes:
        rows: int64 ``(count,)``, ascending, counted from ``first``.
        columns: int64 ``(count,)``.
        first: The number of the first row.
    """

    rows: Tensor
    columns: Tensor
    first: int = 0


def logistic_(
    logits: Tensor,
    positives: Positives,
    gain: float,
    *,
    gradient: bool,
    loss: bool,
    narrow: bool = False,
) -> Tensor | None:
    """Turn logits into ``(sigmoid(logits) - Y) * gain``, and compute the binary cross-entropies.

    Args:
        logits: Contiguous FP32 ``(rows, columns)``; overwritten with ``gradient``.
        positives: Where ``Y`` is 1; it is 0 elsewhere.
        gain: Factor on the gradient.
        gradient: Whether to compute it.
        loss: Whether to compute the losses.
        narrow: Whether to round the logits, and what they become, to BF16 (default: ``False``).

    Returns:
        FP64 numbers whose sum is the loss: for each row the sum of ``softplus(logits)`` from its
        first element to its last, then for each positive what it takes away. ``None`` without
        ``loss``.

    Raises:
        ValueError: A positive is outside of the matrix; Triton's kernels leave it out, and the host
            does not wait for them to say so.
    """
    choice = backend.choose(logits.device).backend
    if choice == "triton":
        # Triton may not be installed.
        from . import triton_logistic  # noqa: PLC0415

        return triton_logistic.run(
            *(logits, positives.rows, positives.columns, positives.first, gain),
            gradient=logits if gradient else None,
            loss=loss,
            narrow=narrow,
        )
    positive = None
    if loss:
        positive = logits[positives.rows - positives.first, positives.columns]
        if narrow:
            to_bf16_(positive)
    if choice == "cpu":
        sums = _call(logits, positives, gain, gradient=gradient, loss=loss, narrow=narrow)
    else:
        sums = _compute(logits, positives, gain, gradient=gradient, loss=loss, narrow=narrow)
    return None if positive is None or sums is None else torch.cat([sums, -positive.double()])


def _compute(
    logits: Tensor, positives: Positives, gain: float, *, gradient: bool, loss: bool, narrow: bool
) -> Tensor | None:
    """In plain PyTorch; the sum of ``softplus`` of each row."""

    def rounded(x: Tensor) -> Tensor:
        return to_bf16_(x) if narrow else x

    z = rounded(logits.clone()) if narrow else logits
    sums = None
    if loss:
        # A running sum is the one that torch takes in order.
        running = softplus(z).to(torch.float64).cumsum(1)
        sums = running[:, -1] if running.shape[1] else running.sum(1)
    if gradient:
        place = positives.rows - positives.first, positives.columns
        # sigmoid(z) - 1 is -sigmoid(-z), which keeps its digits where the sigmoid is close to 1.
        of_positives = sigmoid(-z[place]) * -gain
        logits.copy_(sigmoid(z) * gain)
        logits[place] = of_positives
        rounded(logits)
    return sums


def _call(
    logits: Tensor, positives: Positives, gain: float, *, gradient: bool, loss: bool, narrow: bool
) -> Tensor | None:
    """The same in C++."""
    rows, columns = logits.shape
    places = native.Positives(
        positives.rows.numel(),
        data_ptr("rows", positives.rows, torch.int64),
        data_ptr("columns", positives.columns, torch.int64, positives.rows.shape),
        positives.first,
    )
    sums = torch.empty(rows, dtype=torch.float64, device=logits.device) if loss else None
    outside = native.library().subulp_logistic(
        data_ptr("logits", logits, torch.float32),
        rows,
        columns,
        gain,
        gradient,
        narrow,
        ctypes.byref(places),
        None if sums is None else data_ptr("sums", sums, torch.float64),
        torch.get_num_threads(),
        native.isa(),
    )
    if outside:
        raise ValueError(f"a positive is outside of the {rows} x {columns} logits")
    return sums

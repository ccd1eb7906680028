"""The gradient of the loss from the logits, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics.logistic import sigmoid, softplus
from .. import backend, native
from ..pointers import data_ptr
from .fp8 import to_bf16_


def logistic_(
    logits: Tensor, gain: float, *, gradient: bool, loss: bool, narrow: bool = False
) -> Tensor | None:
    """Turn logits into ``sigmoid(logits) * gain``, and sum ``softplus(logits)``.

    Args:
        logits: Contiguous FP32 ``(rows, columns)``; overwritten with ``gradient``.
        gain: Factor on the sigmoid.
        gradient: Whether to compute it.
        loss: Whether to sum the softplus.
        narrow: Whether to round the logits, and what they become, to BF16 (default: ``False``).

    Returns:
        FP64 ``(rows,)``, the sum of each row from its first element to its last; ``None`` without
        ``loss``.
    """
    if backend.choose(logits.device).backend != "cpu":
        # A running sum is the one that torch takes in order.
        empty = logits.new_zeros(logits.shape[0], dtype=torch.float64)
        z = to_bf16_(logits.clone()) if narrow else logits
        sums = softplus(z).to(torch.float64) if loss else None
        if gradient:
            logits.copy_(sigmoid(z) * gain)
            if narrow:
                to_bf16_(logits)
        if sums is None:
            return None
        return sums.cumsum(1)[:, -1] if sums.shape[1] else empty
    rows, columns = logits.shape
    address = data_ptr("logits", logits, torch.float32)
    totals = torch.empty(rows, dtype=torch.float64, device=logits.device) if loss else None
    native.library().subulp_logistic(
        address,
        rows,
        columns,
        gain,
        gradient,
        narrow,
        None if totals is None else data_ptr("totals", totals, torch.float64),
        torch.get_num_threads(),
        native.isa(),
    )
    return totals

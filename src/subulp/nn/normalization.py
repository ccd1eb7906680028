"""Layer and batch normalisation with narrow gain and bias, computed in FP32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, for parameters in any storage dtype.

    Gain and bias are single vectors, so they are simply widened; autograd rounds their gradients
    back to the storage dtype.

    Args:
        width: Size of the last dimension.
        eps: Added to the variance (default: 1e-5).
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps)

    def forward(self, input: Tensor) -> Tensor:
        """FP32 ``(..., width)``, normalised over its last dimension."""
        return F.layer_norm(
            input, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )


class BatchNorm2d(torch.nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` for parameters in any storage dtype and activations in any.

    Mean and variance are computed in FP32, without an FP32 copy of the activations. The running
    statistics stay FP32 under ``.to(dtype)``: they move in small steps, which a narrow format
    loses, and there are few of them.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``(batch, channels, height, width)`` to the same shape and dtype."""
        self._check_input_dim(input)
        gain = None if self.weight is None else self.weight.float()
        shift = None if self.bias is None else self.bias.float()
        mean, variance = self.running_mean, self.running_var
        momentum = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1 / float(self.num_batches_tracked)
        own = self.training or (mean is None and variance is None)
        if self.training and not self.track_running_stats:
            mean = variance = None
        return F.batch_norm(input, mean, variance, gain, shift, own, momentum or 0.0, self.eps)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        names = [n for n in ("running_mean", "running_var") if getattr(self, n, None) is not None]
        before = {name: getattr(self, name) for name in names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            moved = getattr(self, name)
            if moved.dtype != torch.float32 and not moved.is_meta:
                # What to_empty() gives a module of "meta" has no values.
                wide = moved.float() if value.is_meta else value.to(moved.device, torch.float32)
                setattr(self, name, wide)
        return self

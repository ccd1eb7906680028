"""Layer and batch normalisation with narrow gain and bias, computed in FP32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from .narrow import check_activations


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
        """FP32 ``(..., width)``, normalised over its last dimension.

        Raises:
            ValueError: The input is not FP32, BF16 or FP16.
        """
        check_activations("LayerNorm", input)
        return F.layer_norm(
            input, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )


class BatchNorm2d(torch.nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` for parameters in any storage dtype and activations in any.

    Mean and variance are computed in FP32, without an FP32 copy of the activations. The running
    statistics stay FP32 under ``.to(dtype)``: they move in small steps, which a narrow format
    loses, and there are few of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._widen()

    def forward(self, input: Tensor) -> Tensor:
        """``(batch, channels, height, width)`` to the same shape and dtype.

        Raises:
            ValueError: The input is not FP32, BF16 or FP16, or has not four dimensions.
        """
        self._check_input_dim(input)
        check_activations("BatchNorm2d", input)
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

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        # With assign=True they are those of the state dict.
        self._widen()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: getattr(self, name) for name in self._statistics()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            moved = getattr(self, name)
            if moved.dtype != torch.float32 and not (moved.is_meta or value.is_meta):
                setattr(self, name, value.to(moved.device, torch.float32))
        # What to_empty() gives a module of "meta" has no values.
        self._widen()
        return self

    def _statistics(self) -> list[str]:
        return [n for n in ("running_mean", "running_var") if getattr(self, n, None) is not None]

    def _widen(self) -> None:
        for name in self._statistics():
            setattr(self, name, getattr(self, name).float())

"""Layer normalisation with narrow gain and bias, computed in FP32."""

from __future__ import annotations

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

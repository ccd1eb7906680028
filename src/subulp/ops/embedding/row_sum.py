"""The one order in which the numbers of a row are summed."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension of FP32 ``(rows, dim)``, the same bits on every backend.

    Lane ``l`` of 16 adds the elements ``l``, ``l + 16``, ... in turn, zeros after the last. Then
    the upper half of the lanes is added to the lower half until one is left.
    """
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES))
    parts = padded.view(x.shape[0], -1, LANES)
    lanes = torch.zeros_like(parts[:, 0])
    for part in range(parts.shape[1]):
        lanes = lanes + parts[:, part]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]

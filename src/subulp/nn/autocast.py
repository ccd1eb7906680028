"""``torch.autocast`` for layers that do their own arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a matrix product as ``torch.autocast`` would hand them to torch's own layers.

    FP32 tensors are cast to the dtype of the surrounding ``torch.autocast``, if there is one, by a
    cast that autograd sees, so that FP32 parameters get FP32 gradients.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype == torch.float32 else t for t in tensors)


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Context in which arithmetic on the device of ``tensor`` has the dtype that is written."""
    return torch.autocast(tensor.device.type, enabled=False)

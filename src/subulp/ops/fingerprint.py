"""A number of a tensor's bytes, for what is kept only as long as they stay the same.

Version counters cannot tell: what is written through ``.data``, or by another library, counts
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import backend, native
from .pointers import data_ptr


def fingerprint(tensor: Tensor) -> tuple[object, ...] | None:
    """Equal for two tensors of equal dtype, shape, strides and bytes, else as good as never.

    One read at the speed of memory, of tensors in C++'s reach.

    Args:
        tensor: A matrix, contiguous or the transpose of one.

    Returns:
        ``None`` where the C++ kernels do not run, or for another layout.

    Raises:
        TypeError: The tensor wraps others, as DTensor does.
        ValueError: It has no memory.
    """
    if tensor.device.type != "cpu" or backend.choose(tensor.device).backend != "cpu":
        return None
    dense = tensor if tensor.is_contiguous() else tensor.t()
    if not dense.is_contiguous() or dense.is_neg():
        return None
    number = native.library().subulp_fingerprint(
        data_ptr("tensor", dense, dense.dtype),
        dense.nbytes,
        torch.get_num_threads(),
        native.isa(),
    )
    return tensor.dtype, tensor.shape, tensor.stride(), number

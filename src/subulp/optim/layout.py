"""Storage order: elementwise passes see every tensor as one dense run of memory."""

from __future__ import annotations

import torch
from torch import Tensor


def storage_view(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` as a contiguous view, its dimensions in the memory order of ``like``.

    The same permutation serves a parameter and all that is stored beside it, so elements stay
    paired; for a contiguous parameter it is the tensor itself.
    """
    if like.is_contiguous():
        return tensor
    order = sorted(range(like.dim()), key=lambda d: like.stride(d), reverse=True)
    return tensor.permute(order)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory without gaps or overlaps."""
    return storage_view(tensor, tensor).is_contiguous()


def matching_gradient(param: Tensor) -> Tensor:
    """The gradient of ``param`` in its memory layout, copied only if it has another one."""
    grad = param.grad
    assert grad is not None
    if grad.stride() == param.stride() or (grad.is_contiguous() and param.is_contiguous()):
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)

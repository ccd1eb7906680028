"""Storage order: elementwise passes see every tensor as one dense run of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import extra_bits


def storage_view(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` as a contiguous view, its dimensions in the memory order of ``like``.

    The same permutation serves a parameter and all that is stored beside it, so elements stay
    paired; for a contiguous parameter it is the tensor itself.
    """
    if like.is_contiguous():
        return tensor
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    return tensor.permute(order)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory without gaps or overlaps."""
    return storage_view(tensor, tensor).is_contiguous()


def same_layout(tensor: Tensor, like: Tensor) -> bool:
    """Whether two tensors of one shape, ``like`` dense, keep their elements in the same order."""
    return tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous())


def in_layout_of(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with the memory layout of ``like``, copied only if it has another one."""
    if same_layout(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def repack(words: Tensor, width: int, before: Tensor, after: Tensor) -> Tensor:
    """Packed tails in the storage order of ``after`` instead of that of ``before``.

    Args:
        words: From :func:`subulp.numerics.extra_bits.pack`.
        width: Bits of one tail.
        before: Dense tensor of the parameter's shape, only its strides matter.
        after: The same.

    Returns:
        Words of the same length; ``words`` itself if the orders agree.
    """
    if same_layout(before, after):
        return words
    tails = torch.empty_like(before, dtype=torch.int32, device=words.device)
    ordered = storage_view(tails, before)
    ordered.copy_(extra_bits.unpack(words, tails.numel(), width).view(ordered.shape))
    return extra_bits.pack(storage_view(in_layout_of(tails, after), after).reshape(-1), width)

"""Checks of row numbers, offsets and weights of embedding bags."""

from __future__ import annotations

import torch
from torch import Tensor


def integers(name: str, index: Tensor, dims: tuple[int, ...] = (1,)) -> Tensor:
    """``index`` as int64.

    Raises:
        ValueError: Its dtype is not int32 or int64, or it has another number of dimensions.
    """
    if index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {index.dtype}: expected int32 or int64")
    if index.dim() not in dims:
        expected = " or ".join(map(str, dims))
        raise ValueError(f"{name} has {index.dim()} dimensions: expected {expected}")
    return index.to(torch.int64)


def check_weights(weights: Tensor | None, values: Tensor, mode: str | None) -> None:
    """Raise ValueError unless there are no weights, or they fit."""
    if weights is None:
        return
    if mode != "sum":
        raise ValueError(f"per_sample_weights go with mode='sum', not with mode={mode!r}")
    if weights.shape != values.shape:
        raise ValueError(
            f"per_sample_weights have shape {tuple(weights.shape)}, the row numbers "
            f"{tuple(values.shape)}"
        )
    if weights.dtype != torch.float32:
        raise ValueError(f"per_sample_weights have dtype {weights.dtype}: expected FP32")

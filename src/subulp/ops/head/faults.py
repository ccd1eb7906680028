"""What can be wrong about the batch of a head, and the errors that say so."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor


class Fault(IntEnum):
    """What a kernel of a GPU finds, with the numbers that it tells; tables have lower ones."""

    BAD_INSTANCE = 16
    """Its position, the number; how many instances there are."""
    BAD_LABEL = 17
    """Its position, the number; how many labels there are."""
    BAD_EMBEDDINGS = 18
    """Their shape."""


def error_of(fault: int, numbers: Sequence[int]) -> Exception:
    """The error for a fault that a kernel has found, and the numbers that it told."""
    a, b, c, _ = numbers
    if fault == Fault.BAD_EMBEDDINGS:
        return not_finite((a, b))
    name = "label_rows" if fault == Fault.BAD_INSTANCE else "label_cols"
    return ValueError(
        f"{name} have the value {b} at position {a}: expected 0 to {c - 1}; nothing was updated"
    )


def not_finite(shape: Sequence[int]) -> FloatingPointError:
    """The error for embeddings of a shape."""
    return FloatingPointError(
        f"embeddings of shape {tuple(shape)} have NaN or infinite values; nothing was updated"
    )


def check_finite(x: Tensor) -> None:
    """Raise FloatingPointError unless all embeddings are finite; the host waits."""
    if not bool(torch.isfinite(x).all()):
        raise not_finite(x.shape)


def check_range(name: str, index: Tensor, count: int) -> None:
    """Raise ValueError unless all numbers are from 0 to ``count - 1``; the host waits."""
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise ValueError(
            f"{name} have values from {int(index.min())} to {int(index.max())}: expected "
            f"0 to {count - 1}"
        )

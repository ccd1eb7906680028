"""Modules whose tensors keep their dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class FixedDtypes(nn.Module):
    """A module whose tensors move with ``.to(device)`` and keep their dtypes under any cast.

    ``.half()``, ``.bfloat16()``, ``.float()``, ``.double()`` and ``.to(dtype)`` of a model are for
    its dense layers. What a table stores is of the dtype that ``storage=`` names.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(_keeping_dtypes(fn), recurse)  # type: ignore[no-untyped-call]
        return self


def _keeping_dtypes(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(tensor: Tensor) -> Tensor:
        # Asked with an empty tensor: a cast of the whole one would take memory for nothing.
        result = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        return fn(tensor) if result.dtype == tensor.dtype else tensor.to(result.device)

    return apply

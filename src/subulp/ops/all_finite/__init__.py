"""``subulp::all_finite``: whether a list of tensors holds only finite values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics import format_of
from .. import backend


@dataclass
class FiniteJob:
    """Arguments of :func:`are_finite`."""

    tensors: Sequence[Tensor]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.tensors[0].device


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """``all(t.isfinite().all() for t in tensors)``, in one read without temporaries.

    Args:
        tensors: Tensors of one device, FP32 or any narrow dtype, each dense.

    Returns:
        Bool tensor () on their device; true for an empty list (on the CPU).

    Raises:
        ValueError: A dtype is not a format of subulp, or the tensors are on several devices.
    """
    for t in tensors:
        format_of(t.dtype)
        if t.device != tensors[0].device:
            raise ValueError(
                f"tensors lie on {tensors[0].device} and {t.device}: call once for each device"
            )
    if not tensors:
        return torch.tensor(True, device="cpu")
    result: Tensor = backend.run("all_finite", FiniteJob(tensors))
    return result


all_finite = torch.library.custom_op("subulp::all_finite", are_finite, mutates_args=())
"""The operator: :func:`are_finite` for compiled and exported graphs."""


@all_finite.register_fake
def _(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=tensors[0].device if tensors else "cpu")

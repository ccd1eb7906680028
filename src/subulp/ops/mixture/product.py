"""Products of mixtures: on units of FP8 where they can multiply the operands, else decoded.

A narrow value times the inverse of its scale is the operand, on every device; units of FP8 multiply
the narrow values and the inverse scales apart, which rounds at other places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..head import fp8
from .operand import Operand
from .units import has_tiles, scaling_of, unit_product


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """``a @ b.T``.

    Args:
        a: (rows, k).
        b: (columns, k).
        dtype: Of the activations: where units multiply BF16 or FP16 and it is one of them, decoded
            values are rounded to it before they are multiplied.

    Returns:
        (rows, columns), FP32 or ``dtype``.
    """
    device = a.mixture.codes.device
    if fp8.units_at(device):
        scaling = scaling_of(a, b, dtype, tiles=has_tiles(device))
        if scaling is not None:
            return unit_product(a, b, dtype, scaling)
    left, right = a.values(), b.values()
    if left.is_cuda and dtype != torch.float32:
        return left.to(dtype) @ right.to(dtype).t()
    return left @ right.t()

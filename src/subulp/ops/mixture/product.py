"""Products of mixtures: by FP8 units where both operands are wholly FP8, else of decoded values.

A narrow value times the inverse of its scale is the operand, on every device; units of FP8 multiply
the narrow values and the inverse scales apart, which rounds at other places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics import E4M3, E5M2
from ...numerics.mixture import Mixture
from ..head import fp8
from . import decode

_FP8 = {E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2}
# What cuBLAS wants of the contracted size and of the columns.
_MULTIPLE = 16


@dataclass(frozen=True)
class Operand:
    """A factor of a product.

    Attributes:
        mixture: The matrix.
        sole: Name of the format that all of it is in, ``None`` for several.
        transposed: The contraction runs over the rows of ``mixture`` instead of its columns.
    """

    mixture: Mixture
    sole: str | None
    transposed: bool = False

    def values(self) -> Tensor:
        """FP32, contraction dimension last."""
        found = decode(self.mixture)
        return found.t() if self.transposed else found

    def codes(self) -> Tensor:
        """The narrow values, contraction dimension last; for operands wholly in FP8."""
        assert self.sole is not None
        codes = self.mixture.codes
        codes = codes.t().contiguous() if self.transposed else codes
        missing = -codes.shape[1] % _MULTIPLE
        # The code 0 is the number 0.
        if missing:
            codes = torch.nn.functional.pad(codes, (0, missing))
        return codes.view(_FP8[self.sole])

    @property
    def is_tensorwise(self) -> bool:
        """One scale for all."""
        return self.mixture.exponents.numel() == 1

    @property
    def is_rowwise(self) -> bool:
        """A scale for each row of the product."""
        by_row = self.mixture.block == (1, self.mixture.shape[1])
        return by_row and not self.transposed

    def inverse_scales(self) -> Tensor:
        """FP32 (1, 1) or (rows, 1)."""
        return self.mixture.scales(0).inverse_per_block()


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """``a @ b.T``.

    Args:
        a: (rows, k), after its transposition.
        b: (columns, k), after its transposition.
        dtype: Of the activations: where units multiply BF16 or FP16 and it is one of them, decoded
            values are rounded to it before they are multiplied.

    Returns:
        (rows, columns), FP32 or ``dtype``.
    """
    if fp8.units_at(a.mixture.codes.device) and is_native(a, b, dtype):
        return unit_product(a, b, dtype)
    left, right = a.values(), b.values()
    if left.is_cuda and dtype != torch.float32:
        return left.to(dtype) @ right.to(dtype).t()
    return left @ right.t()


def is_native(a: Operand, b: Operand, dtype: torch.dtype) -> bool:
    """Whether ``torch._scaled_mm`` has this product."""
    if a.sole not in _FP8 or b.sole not in _FP8 or a.sole == b.sole == E5M2.name:
        return False
    if a.is_tensorwise and b.is_tensorwise:
        return dtype != torch.float16
    both_e4m3 = a.sole == b.sole == E4M3.name
    return a.is_rowwise and b.is_rowwise and both_e4m3 and dtype == torch.bfloat16


def unit_product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """:func:`product` by ``torch._scaled_mm``: ``dtype`` (rows, columns)."""
    left, right = a.codes(), b.codes()
    columns = right.shape[0]
    missing = -columns % _MULTIPLE
    inverse_left, inverse_right = a.inverse_scales(), b.inverse_scales().t()
    if missing:
        byte = torch.nn.functional.pad(right.view(torch.uint8), (0, 0, 0, missing))
        right = byte.view(right.dtype)
        if not b.is_tensorwise:
            inverse_right = torch.nn.functional.pad(inverse_right, (0, missing), value=1.0)
    if a.is_tensorwise and b.is_tensorwise:
        inverse_left, inverse_right = inverse_left.view(()), inverse_right.view(())
    result = torch._scaled_mm(
        left,
        right.t(),
        scale_a=inverse_left.contiguous(),
        scale_b=inverse_right.contiguous(),
        out_dtype=dtype,
    )
    return result[:, :columns]

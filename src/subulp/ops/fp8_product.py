"""Products of matrices in E4M3, each with one scale: by FP8 units, or of the decoded numbers.

Both multiply the same numbers and sum them in FP32; the order of the sums is their difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .head.fp8 import enlarged, padded, units_at

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_TILE_BYTES = 512 * 1024


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor in E4M3 and its scale, by which the codes are multiplied.

    The largest magnitude becomes E4M3's largest number, unless it is below 6e-36. Nothing is read
    by the host.

    Args:
        x: Not empty, any floating-point dtype.

    Returns:
        Codes of the shape of ``x``, to nearest even; FP32 ``()``. Where ``x`` has an infinity or a
        NaN, products are NaN.
    """
    wide = x.to(torch.float32)
    largest = torch.linalg.vector_norm(wide, torch.inf)
    # Times the reciprocal, for GPUs divide by a number from the host so; zeros are divided by what
    # is not zero.
    scale = (largest * (1.0 / _LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).to(torch.float8_e4m3fn), scale


def product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """``(a * a_scale) @ (b * b_scale).T + bias``.

    Args:
        a: E4M3 ``(m, k)``.
        b: E4M3 ``(n, k)``.
        a_scale: FP32 ``()``, ``None`` for 1.
        b_scale: As for ``a``.
        dtype: Of the result: FP32, BF16 or FP16.
        bias: ``(n,)``, or ``None`` (default: ``None``).

    Returns:
        ``(m, n)``.
    """
    one = torch.ones((), dtype=torch.float32, device=a.device)
    a_scale, b_scale = (one if scale is None else scale for scale in (a_scale, b_scale))
    if units_at(a.device):
        return _by_units(a, b, a_scale, b_scale, dtype, bias)
    y = _decoded(a, b).mul_(a_scale * b_scale)
    return (y if bias is None else y.add_(bias.to(torch.float32))).to(dtype)


def _by_units(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    n, k = b.shape
    inner, columns = padded(k), padded(n)
    # Units add a narrow bias alone, to a result of its dtype.
    inside = bias is not None and columns == n and dtype != torch.float32
    y: Tensor = torch._scaled_mm(
        enlarged(a, a.shape[0], inner),
        # The second matrix is taken column by column.
        enlarged(b, columns, inner).t(),
        scale_a=a_scale,
        scale_b=b_scale,
        bias=bias.to(dtype) if bias is not None and inside else None,
        out_dtype=dtype,
    )[:, :n]
    return y if bias is None or inside else y + bias.to(dtype)


def _decoded(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` in FP32: on a CPU, ``b`` is decoded some rows at a time, which fit a cache."""
    rows = max(1, _TILE_BYTES // (4 * b.shape[1])) if b.device.type == "cpu" else b.shape[0]
    wide = a.to(torch.float32)
    parts = [wide @ tile.to(torch.float32).t() for tile in torch.split(b, rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

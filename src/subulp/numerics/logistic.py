"""The logistic function and its integral in FP32, as a fixed sequence of rounded operations.

Library versions differ between vector lanes and the elements left over, so their bits depend on
where in a tensor a value stands. These depend on the value alone, on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(r) on |r| <= ln(2) / 2: coefficients of r**7 down to r**2 (Cephes, expf).
EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LOG2_E = 1.44269504088896341
# ln(2) in two parts: whole multiples of the first are exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
ROUND = 12582912.0
"""1.5 * 2**23: a small number added to it is rounded to an integer in its last bits."""
LOWEST = -87.0
"""exp of anything lower is next to nothing, and would be subnormal."""
ATANH = tuple(2.0 / n for n in (13, 11, 9, 7, 5, 3, 1))
"""2 * atanh(s) = s * (2 + 2/3 s**2 + ...), from the last term."""


def _exp_of_negative(y: Tensor) -> Tensor:
    """``exp(y)`` for FP32 ``y <= 0``, to 2 ulp."""
    y = torch.where(y > LOWEST, y, LOWEST)
    shifted = y * LOG2_E + ROUND
    n = shifted - ROUND
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    p = torch.full_like(r, EXP[0])
    for coefficient in EXP[1:]:
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    power = (shifted.view(torch.int32) << 23) + 0x3F800000
    return p * power.view(torch.float32)


def sigmoid(z: Tensor) -> Tensor:
    """``1 / (1 + exp(-z))``, to 3 ulp; NaN stays NaN.

    Args:
        z: FP32 tensor.
    """
    e = _exp_of_negative(-z.abs())
    value = torch.where(z > 0, torch.ones_like(e), e) / (e + 1.0)
    return torch.where(z.isnan(), z, value)


def softplus(z: Tensor) -> Tensor:
    """``log(1 + exp(z))``, the integral of :func:`sigmoid`, to 4 ulp; NaN stays NaN.

    Args:
        z: FP32 tensor.
    """
    e = _exp_of_negative(-z.abs())
    s = e / (e + 2.0)
    t = s * s
    p = torch.full_like(t, ATANH[0])
    for coefficient in ATANH[1:]:
        p = p * t + coefficient
    value = torch.where(z > 0, z, torch.zeros_like(z)) + p * s
    return torch.where(z.isnan(), z, value)

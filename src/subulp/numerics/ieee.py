"""FP32 operations that PyTorch does not round correctly everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def sqrt(x: Tensor) -> Tensor:
    """Square root of FP32 values, rounded to nearest as IEEE-754 asks.

    PyTorch's CPU builds may go through a vector-math library that is off by one ulp in a sixth of
    all cases. FP64 has more than 2 * 24 + 2 bits, so rounding its root to FP32 is safe: the root of
    a 24-bit number lies at least 2**-51 of itself away from every midpoint.
    """
    return x.to(torch.float64).sqrt().to(torch.float32)

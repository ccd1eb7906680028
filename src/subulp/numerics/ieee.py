"""FP32 operations that Python and PyTorch do not round as IEEE-754 asks everywhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def as_fp32(x: float) -> float:
    """``x`` rounded to FP32 once, as a Python float."""
    return float(np.float32(x))


def sqrt(x: Tensor) -> Tensor:
    """Square root of FP32 values, rounded to nearest as IEEE-754 asks.

    PyTorch's CPU builds may go through a vector-math library that is off by one ulp in a sixth of
    all cases. FP64 has more than 2 * 24 + 2 bits, so rounding its root to FP32 is safe: the root of
    a 24-bit number lies at least 2**-51 of itself away from every midpoint.
    """
    return x.to(torch.float64).sqrt().to(torch.float32)

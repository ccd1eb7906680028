import math

import numpy as np
import pytest
import torch

from subulp.numerics import FP32, ieee
from tests.numerics.support import INF, NAN, assert_same_bits, fp32, from_patterns, grid_of
from tests.oracles.arithmetic import Strict


@pytest.mark.parametrize("exponent", [1, 2, 126, 127, 128, 253, 254])
def test_sqrt_of_every_significand(exponent: int) -> None:
    """All 2**23 values of binades of either parity, against numpy's correctly rounded root."""
    x = from_patterns((exponent << 23) | np.arange(2**23, dtype=np.uint32))
    assert_same_bits(ieee.sqrt(x), torch.from_numpy(np.sqrt(x.numpy())))


def test_sqrt_as_defined() -> None:
    unit = Strict(grid_of(FP32))
    patterns = torch.randint(0, 0x7F800000, (2000,), generator=torch.Generator().manual_seed(0))
    patterns[:500] %= 0x00800000  # subnormals
    x = from_patterns(patterns.numpy())
    x = torch.cat((x, fp32([0.0, -0.0, 1e-45, INF, NAN, -1.0, -INF])))
    expected = [unit.sqrt(v) for v in x.tolist()]
    assert math.copysign(1.0, expected[2001]) == -1.0
    assert_same_bits(ieee.sqrt(x), fp32(expected))

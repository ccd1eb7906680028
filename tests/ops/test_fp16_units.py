"""FP16 by the processors' own conversions: every code read, and numbers around every code rounded.

The oracle is NumPy's FP16, which rounds to nearest-even, but for numbers beyond the largest one:
they stay finite here.
"""

import numpy as np
import pytest
import torch

from subulp import optim

from .support import environment, isas

CODES = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
LARGEST = 65504.0


def step(p, grad, isa):
    """p - grad, which is rounded once."""
    p = torch.nn.Parameter(p.clone())
    p.grad_dtype = torch.float32
    p.grad = grad
    with environment(SUBULP_ISA=isa):
        optim.SGD([p], lr=1.0, precision="nearest", nonfinite="propagate").step()
    return p.detach()


@pytest.mark.parametrize("isa", isas())
def test_every_code_is_read(isa):
    found = step(CODES, torch.zeros(len(CODES)), isa)
    numbers = ~CODES.isnan()
    torch.testing.assert_close(found[numbers], CODES[numbers], rtol=0, atol=0)
    assert found.isnan().equal(CODES.isnan())


@pytest.mark.parametrize("isa", isas())
def test_numbers_around_every_code_are_rounded(isa):
    # Codes, halves between neighbours, and what FP32 has beside both.
    finite = CODES[CODES.isfinite()].float().unique()
    beyond = torch.tensor([65519.996, 65520.0, 1e5, 3e38, 1e-45, 1e-39, 2.0**-25, 3 * 2.0**-26])
    exact = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, beyond, -beyond])
    up, down = (torch.nextafter(exact, torch.tensor(s * torch.inf)) for s in (1, -1))
    x = torch.cat([exact, up, down, torch.tensor([torch.inf, -torch.inf])])
    found = step(torch.zeros(len(x), dtype=torch.float16), -x, isa)
    with np.errstate(over="ignore"):
        wanted = x.numpy().astype(np.float16)
    overflown = np.isinf(wanted) & np.isfinite(x.numpy())
    wanted[overflown] = np.copysign(np.float16(LARGEST), wanted[overflown])
    assert overflown.sum() > 4
    assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("isa", isas())
def test_nan_is_the_quiet_one(isa):
    nan = torch.tensor([0x7FC00000, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(
        torch.float32
    )
    found = step(torch.zeros(4, dtype=torch.float16), -nan, isa)
    assert (found.view(torch.int16) & 0x7FFF).tolist() == [0x7E00] * 4

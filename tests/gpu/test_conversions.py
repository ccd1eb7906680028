"""A GPU's conversions to FP8 give the bits of the kernels' integers."""

from __future__ import annotations

import pytest
import torch

from subulp.numerics import E4M3, E5M2
from tests.ops.test_triton_codec import hard_numbers

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
codec = pytest.importorskip("subulp.ops.triton.codec")
launch = pytest.importorskip("subulp.ops.triton.launch")

pytestmark = pytest.mark.gpu


@triton.jit
def both_kernel(x, found, expected, fmt: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(x + at)
    tl.store(found + at, codec.nearest(values, fmt, True).to(tl.uint8))
    tl.store(expected + at, codec.nearest(values, fmt).to(tl.uint8))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_code_and_what_lies_between(fmt):
    if not launch.converts_at(torch.device("cuda")):
        pytest.skip("this GPU has no conversions to FP8")
    x = hard_numbers(fmt)
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024)).cuda()
    found, expected = (torch.empty(x.shape, dtype=torch.uint8, device="cuda") for _ in range(2))
    both_kernel[(len(x) // 1024,)](x, found, expected, fmt.name, 1024)
    assert torch.equal(found, expected)

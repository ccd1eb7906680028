"""A GPU's conversions to FP8 give the bits of the kernels' integers."""

from __future__ import annotations

import pytest
import torch

from subulp.numerics import E4M3, E5M2, round_to
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


@triton.jit
def rounded_kernel(x, codes, values, fmt: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    code, value = codec.rounded(tl.load(x + at), fmt, True)
    tl.store(codes + at, code.to(tl.uint8))
    tl.store(values + at, value)


@triton.jit
def reciprocal_kernel(x, found, fmt: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(found + at, codec.reciprocal(tl.load(x + at), fmt, True))


@pytest.fixture(autouse=True)
def only_where_there_are_conversions():
    if not launch.converts_at(torch.device("cuda")):
        pytest.skip("this GPU has no conversions to FP8")


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_code_and_what_lies_between(fmt):
    x = hard_numbers(fmt)
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024)).cuda()
    found, expected = (torch.empty(x.shape, dtype=torch.uint8, device="cuda") for _ in range(2))
    both_kernel[(len(x) // 1024,)](x, found, expected, fmt.name, 1024)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_codes_of_finite_numbers_and_their_values(fmt):
    x = hard_numbers(fmt)
    x = x[x.isfinite()]
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024))
    codes = torch.empty(x.shape, dtype=torch.uint8, device="cuda")
    values = torch.empty(x.shape, device="cuda")
    rounded_kernel[(len(x) // 1024,)](x.cuda(), codes, values, fmt.name, 1024)
    expected = round_to(x, fmt)
    assert torch.equal(codes.cpu(), expected.to(fmt.dtype).view(torch.uint8))
    assert torch.equal(values.cpu().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("exponent", [-17, -10, -9, -1, 0, 1, 8, 15])
def test_every_reciprocal_of_a_binade(exponent):
    """Of the smallest numbers that do not round to zero, and the largest."""
    mantissas = torch.arange(2**23, dtype=torch.int32)
    x = (mantissas | (exponent + 127) << 23).view(torch.float32)
    found = torch.empty(x.shape, device="cuda")
    for sign in (1.0, -1.0):
        reciprocal_kernel[(len(x) // 4096,)]((x * sign).cuda(), found, "e5m2", 4096)
        assert torch.equal(found.cpu(), 1.0 / (x * sign))

"""Conversion between FP32 and narrow formats, against the formats' definition."""

from __future__ import annotations

import pytest
import torch

from subulp.numerics import format_of, round_to
from subulp.ops import rows as convert

from .support import DTYPES, environment, isas, short

BACKENDS = ["reference", "cpu"]


def samples(size: int) -> torch.Tensor:
    """Values of every order of magnitude, special ones among them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator)
    x *= 10.0 ** torch.empty(size).uniform_(-42, 38, generator=generator)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 464.0, 1e-45])
    x[: len(special)] = special[:size]
    return x


def every_code(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 4:
        return samples(1003)
    count = 1 << 8 * dtype.itemsize
    word = {1: torch.uint8, 2: torch.uint16}[dtype.itemsize]
    return torch.arange(count, dtype=torch.int32).to(word).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, all NaN taken as one."""
    a, b = a.float(), b.float()
    bits = (t.nan_to_num(nan=0.25, posinf=torch.inf, neginf=-torch.inf) for t in (a, b))
    x, y = (t.view(torch.int32) for t in bits)
    return torch.equal(x, y) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_decode_gives_the_value_of_every_code(dtype, isa):
    codes = every_code(dtype)
    with environment(SUBULP_BACKEND="cpu", SUBULP_ISA=isa):
        values = convert.decode(codes, torch.empty(codes.shape), 1.0)
        halved = convert.decode(codes, torch.empty(codes.shape), 0.5)
    assert same(values, codes.float())
    assert same(halved, codes.float() * 0.5)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", [0, 1, 17, 1003, 40_000])
def test_encode_rounds_to_nearest(dtype, size, isa):
    x = samples(size)
    with environment(SUBULP_BACKEND="cpu", SUBULP_ISA=isa):
        codes = convert.encode(x, torch.empty(size, dtype=dtype), 2.0)
    assert same(codes, round_to(x * 2.0, format_of(dtype)).to(dtype))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize < 4], ids=short)
def test_encode_at_every_boundary(dtype, isa):
    """Each code, each middle of two, and the FP32 numbers beside them; the size leaves a tail."""
    values = every_code(dtype).float()
    values = values[values.isfinite()].unique()
    x = torch.cat((values, (values[1:] + values[:-1]) / 2))
    x = torch.cat((x, x.nextafter(x.new_tensor(torch.inf)), x.nextafter(x.new_tensor(-torch.inf))))
    with environment(SUBULP_BACKEND="cpu", SUBULP_ISA=isa):
        codes = convert.encode(x, torch.empty(x.shape, dtype=dtype))
    assert same(codes, round_to(x, format_of(dtype)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_backends_and_threads_agree(dtype):
    x = samples(50_001)
    results = []
    before = torch.get_num_threads()
    for backend, threads in (("reference", 1), ("cpu", 1), ("cpu", 2), ("cpu", 3)):
        torch.set_num_threads(threads)
        with environment(SUBULP_BACKEND=backend):
            codes = convert.encode(x, torch.empty(x.shape, dtype=dtype))
            results.append((codes, convert.decode(codes, torch.empty(x.shape), 4.0)))
    torch.set_num_threads(before)
    for codes, values in results[1:]:
        assert same(codes, results[0][0])
        assert same(values, results[0][1])

"""The codecs and random bits of the Triton kernels, over all codes and rounding boundaries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from subulp.numerics import BF16, E4M3, E5M2, FP16, Format, extra_bits, random_bits, round_to
from tests.numerics.support import boundaries, numpy_dtype, stored_cast

from .support import DEVICES, interpreted

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
codec = pytest.importorskip("subulp.ops.triton.codec")
triton_random = pytest.importorskip("subulp.ops.triton.random_bits")

NARROW = (BF16, FP16, E4M3, E5M2)
INTEGER = {1: torch.uint8, 2: torch.int16}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@triton.jit
def decode_kernel(codes, values, fmt: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    code = tl.load(codes + at).to(tl.uint32)
    tl.store(values + at, codec.value(code, fmt))


@triton.jit
def round_kernel(x, bits, nearest, stochastic, fmt: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(x + at)
    random = tl.load(bits + at).to(tl.uint32)
    tl.store(nearest + at, codec.value(codec.nearest(values, fmt), fmt))
    tl.store(stochastic + at, codec.value(codec.stochastic(values, random, fmt), fmt))


@triton.jit
def split_kernel(
    x,
    bits,
    head,
    tail,
    joined,
    fmt: tl.constexpr,
    k: tl.constexpr,
    nearest: tl.constexpr,
    random: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    drawn = tl.load(bits + at).to(tl.uint32)
    if nearest:
        code, rest = codec.split_nearest(tl.load(x + at), drawn, fmt, k, random)
    else:
        code, rest = codec.split(tl.load(x + at), drawn, fmt, k)
    tl.store(head + at, codec.value(code, fmt))
    tl.store(tail + at, rest.to(tl.int32))
    tl.store(joined + at, codec.join(code, rest, fmt, k, nearest))


@triton.jit
def draw_kernel(
    out, swapped, address, width: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr
):
    first, key, step = tl.load(address), tl.load(address + 1), tl.load(address + 2)
    bits = triton_random.draw(first, key.to(tl.uint64), step.to(tl.uint32), width, aligned, block)
    tl.store(out + tl.arange(0, block), bits.to(tl.int64))
    tl.store(swapped + tl.arange(0, block), triton_random.swap_halves(bits, width).to(tl.int64))


BLOCK = 4096


def padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % BLOCK))


def same(actual: Tensor, expected: Tensor) -> bool:
    a, e = actual.cpu().view(torch.int32), expected.view(torch.int32)
    return bool(((a == e) | (actual.cpu().isnan() & expected.isnan())).all())


def points(fmt: Format) -> tuple[Tensor, Tensor]:
    """Values on both sides of every rounding boundary, with random bits."""
    x = padded(boundaries(fmt))
    width = fmt.random_width
    return x, random_bits.draw(x.shape, seed=3, width=width)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_decode(fmt, device):
    codes = torch.from_numpy(np.arange(2 ** (8 * fmt.itemsize), dtype=f"uint{8 * fmt.itemsize}"))
    stored = padded(codes.to(torch.int32)).to(device)
    values = torch.empty(stored.shape, device=device)
    decode_kernel[(len(stored) // BLOCK,)](stored, values, fmt.name, BLOCK)
    assert same(values[: len(codes)], codes.view(fmt.dtype).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_round(fmt, device):
    x, bits = points(fmt)
    out = [torch.empty(x.shape, device=device) for _ in range(2)]
    round_kernel[(len(x) // BLOCK,)](x.to(device), bits.to(device), *out, fmt.name, BLOCK)
    assert same(out[0], round_to(x, fmt))
    assert same(out[1], round_to(x, fmt, "stochastic", bits=bits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 8, 13, 16])
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_split_and_join(fmt, k, device):
    x, bits = (p[:: 37 if len(p) > BLOCK else 1] for p in points(fmt))
    x, bits = padded(x), padded(bits)
    for coding, random in (
        ("truncate", False),
        ("stochastic", True),
        ("nearest", False),
        ("nearest", True),
    ):
        used = bits if random else torch.zeros_like(bits)
        head, joined = (torch.empty(x.shape, device=device) for _ in range(2))
        tail = torch.empty(x.shape, dtype=torch.int32, device=device)
        split_kernel[(len(x) // BLOCK,)](
            x.to(device),
            used.to(device),
            head,
            tail,
            joined,
            fmt.name,
            k,
            coding == "nearest",
            random,
            BLOCK,
        )
        given = {"bits": bits} if random else {}
        expected_head, expected_tail = extra_bits.split(x, fmt, k, coding, **given)
        assert same(head, expected_head)
        assert torch.equal(tail.cpu(), expected_tail)
        assert same(joined, extra_bits.join(expected_head, expected_tail, fmt, k, coding))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("first", [0, 3, 8, 2**34 - 4, 2**35 + 64, 2**40 + 5])
def test_draw(first, width, device):
    seed, stream, step = 0xDEADBEEF, 0x80000001, 0xFFFFFFFF
    address = {"seed": seed, "stream": stream, "step": step, "offset": first, "width": width}
    expected = random_bits.draw((256,), **address)
    words = np.array([first, stream << 32 | seed, step], dtype=np.uint64).view(np.int64)
    place = torch.from_numpy(words).to(device)
    for aligned in {False, first % 8 == 0}:
        bits, swapped = (torch.empty(256, dtype=torch.int64, device=device) for _ in range(2))
        draw_kernel[(1,)](bits, swapped, place, width, aligned, 256)
        assert torch.equal(bits.cpu(), expected)
        assert torch.equal(swapped.cpu(), random_bits.swap_halves(expected, width))


# --------------------------------------------------------------------- conversions of a GPU to FP8


def hard_numbers(fmt: Format) -> Tensor:
    """All of BF16, and FP32 around all codes and middles of a format; NaNs of both signs."""
    bf16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    near = boundaries(fmt).float()
    nans = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF]).to(torch.int32)
    nans = torch.cat((nans, nans | -(2**31))).view(torch.float32)
    return torch.cat((bf16, near, -near, nans))


def documented(x: Tensor, fmt: Format) -> Tensor:
    """Codes as PTX documents ``cvt.rn.satfinite``: to nearest even, beyond the largest finite
    value to that, infinities too; NaN becomes 0x7F.
    """
    values = stored_cast(x.clamp(-fmt.max, fmt.max), fmt)
    codes = torch.from_numpy(values.numpy().astype(numpy_dtype(fmt)).view(np.uint8))
    return torch.where(x.isnan(), 0x7F, codes.int()).to(torch.uint8)


@triton.jit
def convert_kernel(x, given, found, expected, fmt: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(x + at)
    right = codec.put_right(tl.load(given + at).to(tl.uint32), values, fmt)
    tl.store(found + at, right.to(tl.uint8))
    tl.store(expected + at, codec.nearest(values, fmt).to(tl.uint8))


@interpreted
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_a_gpus_conversions_are_put_right(fmt):
    """By the instruction's documentation; tests/gpu asks a GPU."""
    x = hard_numbers(fmt)
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024))
    given = documented(x, fmt)
    found, expected = torch.empty_like(given), torch.empty_like(given)
    convert_kernel[(len(x) // 1024,)](x, given, found, expected, fmt.name, 1024)
    assert torch.equal(found, expected)
    # What is to be put right, and nothing else.
    wrong = given != expected
    assert bool(wrong.any())
    assert not bool((wrong & x.isfinite()).any())

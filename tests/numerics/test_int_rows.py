"""Rows of integers against their definition in exact rationals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from subulp.numerics import int_rows, random_bits
from tests.oracles import int_rows as oracle
from tests.oracles import philox

from .support import FP32_MAX, INF, NAN, assert_same_bits, fp32

DIMS = (1, 2, 3, 5, 16, 33)


def rows(dim: int, count: int = 40) -> torch.Tensor:
    """Rows over many binades, around zero and far from it."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(count, dim, generator=generator)
    x *= (8 * torch.randn(count, 1, generator=generator)).exp2()
    x[::5] += 3.0
    x[1::7] *= 2.0**-130
    x[2::11] *= 2.0**-148
    return x


def same(x: torch.Tensor, bits: int, random: torch.Tensor | None = None) -> None:
    rounding = "nearest" if random is None else "stochastic"
    got = int_rows.encode(x, bits, rounding, random=random)
    decoded = int_rows.decode(got)
    for i, row in enumerate(x.tolist()):
        want = oracle.encode(row, bits, None if random is None else random[i].tolist())
        assert bytes(got.codes[i].tolist()) == oracle.pack(want[0], bits)
        assert_same_bits(got.scale[i], fp32(want[1]))
        assert_same_bits(got.bias[i], fp32(want[2]))
        assert_same_bits(decoded[i], fp32(oracle.decode(want)))


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
@pytest.mark.parametrize("dim", DIMS)
def test_nearest_is_the_oracle(bits, dim):
    same(rows(dim), bits)


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
@pytest.mark.parametrize("dim", DIMS)
def test_stochastic_is_the_oracle(bits, dim):
    x = rows(dim)
    same(x, bits, random_bits.draw(x.shape, seed=3))
    same(x, bits, torch.zeros(x.shape, dtype=torch.int64))
    same(x, bits, torch.full(x.shape, 2**32 - 1))


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, 0.0],
        [-0.0, 0.0, -0.0],
        [-0.0, -0.0, 1.0],
        [7.25, 7.25, 7.25],
        [-FP32_MAX, -FP32_MAX, -FP32_MAX],
        [FP32_MAX, 0.0, FP32_MAX],
        [1e-45, 0.0, 0.0],
        [3e-43, 0.0, 1e-43],
    ],
    ids=str,
)
def test_rows_of_few_values(row, bits):
    x = fp32([row])
    same(x, bits)
    decoded = int_rows.decode(int_rows.encode(x, bits))
    if min(row) == max(row):
        assert torch.equal(decoded, x)


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_is_nan(bad, bits):
    x = rows(6, 4)
    x[2, 3] = bad
    same(x, bits)
    decoded = int_rows.decode(int_rows.encode(x, bits))
    assert decoded.isnan().any(1).tolist() == [False, False, True, False]
    assert decoded[2].isnan().all()


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
def test_a_range_beyond_fp32_is_nan(bits):
    x = fp32([[FP32_MAX, -FP32_MAX], [FP32_MAX / 2, -FP32_MAX / 2], [1.0, 2.0]])
    same(x, bits)
    assert int_rows.decode(int_rows.encode(x, bits)).isnan().all(1).tolist() == [True, False, False]


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
def test_integers_never_move(bits):
    """Rows whose quotients are exact: every pattern of random bits keeps them."""
    top = 2**bits - 1
    q = torch.arange(top + 1).repeat(3, 1)
    x = q * fp32([[1.0], [0.25], [2.0**-20]]) + fp32([[0.0], [-8.0], [0.0]])
    for random in (0, 255, 256, 2**31, 2**32 - 1):
        got = int_rows.encode(x, bits, "stochastic", random=torch.full(x.shape, random))
        assert torch.equal(int_rows.unpack(got.codes, bits, top + 1).long(), q)
        assert torch.equal(int_rows.decode(got), x)


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
def test_nearest_takes_ties_to_even(bits):
    top = 2**bits - 1
    x = torch.cat((fp32([0.0, float(top)]), torch.arange(top) + 0.5))
    got = int_rows.unpack(int_rows.encode(x, bits).codes, bits, top + 2)[2:].tolist()
    assert got == [round(i + 0.5) for i in range(top)]


@pytest.mark.parametrize("fraction", [2.0**-23, 0.7, 1 - 2.0**-20])
def test_stochastic_rounding_goes_up_as_often_as_the_fraction_says(fraction):
    """All 2**24 values of u: the count is exact."""
    x = torch.full((16, 2**20 + 2), 1.0 + fraction)
    x[:, 0], x[:, 1] = 0.0, 15.0
    random = torch.zeros(x.shape, dtype=torch.int64)
    random[:, 2:] = (torch.arange(2**24) << 8).view(16, -1)
    q = int_rows.unpack(int_rows.encode(x, 4, "stochastic", random=random).codes, 4, x.shape[1])
    assert int((q[:, 2:].long() - 1).sum()) == math.ceil(float(x[0, 2]) % 1 * 2**24)


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
@pytest.mark.parametrize("dim", DIMS)
def test_bytes_of_a_row(bits, dim):
    q = int_rows.encode(rows(dim).view(4, 10, dim), bits)
    stored = int_rows.to_bytes(q)
    assert stored.shape == (4, 10, int_rows.row_bytes(dim, bits))
    back = int_rows.from_bytes(stored, bits, dim)
    for a, b in zip(q, back, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    first = stored[1, 2].numpy().tobytes()
    assert np.frombuffer(first[:8], np.float32).tolist() == [float(q.scale[1, 2]), q.bias[1, 2]]


def test_bits_are_those_of_their_elements():
    index = torch.tensor([[0, 5, 8], [2**33 + 7, 2**34 - 1, 3]])
    for width in (32, 16):
        got = random_bits.draw_at(index, seed=9, stream=4, step=7, slot=2, width=width)
        want = [
            [philox.draw(i, seed=9, stream=4, step=7, slot=2, width=width) for i in row]
            for row in index.tolist()
        ]
        assert got.tolist() == want


def test_bad_input():
    x = torch.zeros(2, 3)
    random = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"call x\.float"):
        int_rows.encode(x.half(), 8)
    with pytest.raises(ValueError, match="at least one number"):
        int_rows.encode(torch.zeros(2, 0), 8)
    with pytest.raises(ValueError, match="bits=3"):
        int_rows.encode(x, 3)
    with pytest.raises(ValueError, match="unknown"):
        int_rows.encode(x, 8, "up")
    with pytest.raises(ValueError, match="needs random"):
        int_rows.encode(x, 8, "stochastic")
    with pytest.raises(ValueError, match="leave it out"):
        int_rows.encode(x, 8, random=random)
    with pytest.raises(ValueError, match="shape"):
        int_rows.encode(x, 8, "stochastic", random=random[:1])

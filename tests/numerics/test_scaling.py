"""Group amax mantissa scaling against exact rationals, and the properties that the paper claims."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subulp import numerics
from subulp.numerics import E4M3, E5M2, FP16, partition, scaling, simulated
from tests.oracles import mixture as oracle
from tests.oracles.grid import Grid

FORMATS = [E4M3, E5M2, simulated(3, 4), simulated(2, 1, has_infinity=False), FP16]
PARTITIONS = [*partition.PARTITIONS, (3, 5), (2, None)]
LARGEST = float(torch.finfo(torch.float32).max)


def grid_of(fmt):
    return Grid(fmt.exponent_bits, fmt.mantissa_bits, fmt.has_infinity)


def matrix(rows=20, columns=70, seed=0, spread=4.0) -> torch.Tensor:
    """Blocks over many binades; some of zeros, subnormal numbers and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= (spread * torch.randn(rows, 1, generator=generator)).exp2()
    x *= (spread * torch.randn(1, columns, generator=generator)).exp2()
    return x


def rough(seed=0) -> torch.Tensor:
    x = matrix(seed=seed, spread=12.0)
    x[::7] = 0.0
    x[5::11] *= 2.0**-130
    x[3, 4], x[10, 30], x[17] = torch.inf, torch.nan, LARGEST
    x[18, 1:] = 0.0
    x[18, 0] = 1e-45
    return x


def lists(x, block):
    """The blocks' values, row by row of blocks."""
    down, across = partition.grid_of(x.shape, block)
    r, c = block
    return [
        [x[i * r : (i + 1) * r, j * c : (j + 1) * c].flatten().tolist() for j in range(across)]
        for i in range(down)
    ]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("block", PARTITIONS, ids=str)
@pytest.mark.parametrize("group", ["tensor", "block"])
def test_scales_are_the_oracle(block, fmt, group):
    for x in (matrix(), rough()):
        sizes = partition.block_of(block, x.shape)
        given = "tensor" if group == "tensor" else (2 * sizes[0], sizes[1])
        found = scaling.group_amax_mantissa(x, fmt, block, given)
        blocks, grid = lists(x, sizes), grid_of(fmt)
        down, across = partition.blocks_of_group(given, sizes, x.shape)
        scales = found.per_block()
        for i, row in enumerate(blocks):
            for j, values in enumerate(row):
                first = i // down * down, j // across * across
                members = [
                    b
                    for r in blocks[first[0] : first[0] + down]
                    for b in r[first[1] : first[1] + across]
                ]
                shared = oracle.group_mantissa(members, grid)
                e = oracle.exponent(values, shared, grid)
                assert Fraction(float(found.mantissa[i // down, j // across])) == shared
                assert int(found.exponents[i, j]) == e
                assert Fraction(float(scales[i, j])) == oracle.scale(shared, e)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, simulated(3, 4)], ids=str)
@pytest.mark.parametrize("block", PARTITIONS, ids=str)
@pytest.mark.parametrize("name", ["gam", "amax", "e8m0"])
def test_nothing_saturates_and_a_scale_is_within_a_factor_two_of_its_ideal(block, fmt, name):
    for seed in range(5):
        x = matrix(seed=seed)
        ideal = scaling.amax_scaling(x, fmt, block).per_block()
        found = make(name, x, fmt, block)
        scales = found.per_block()
        assert (scales <= ideal).all()
        assert (scales > ideal / 2).all()
        sizes = partition.block_of(block, x.shape)
        scaled = partition.to_blocks(x, sizes) * scales[..., None, None]
        # The product is rounded: an ulp of FP32 beyond the largest value still rounds down to it.
        assert (scaled.abs() <= fmt.max * (1 + 2.0**-23)).all()
        if name != "e8m0":
            rounded = numerics.round_to(scaled, fmt) * found.inverse_per_block()[..., None, None]
            where = partition.to_blocks(x, sizes).abs().argmax()
            amax, got = float(x.abs().max()), abs(float(rounded.flatten()[where]))
            assert abs(Fraction(got) - Fraction(amax)) <= Fraction(amax) * Fraction(2) ** -22


def make(name, x, fmt, block):
    if name == "gam":
        return scaling.group_amax_mantissa(x, fmt, block)
    return (scaling.amax_scaling if name == "amax" else scaling.power_of_two_scaling)(x, fmt, block)


def test_the_mantissa_is_the_same_for_all_block_sizes():
    x = matrix(256, 256)
    found = [scaling.group_amax_mantissa(x, E4M3, block) for block in partition.PARTITIONS]
    assert len({float(s.mantissa) for s in found}) == 1
    for s in found:
        patterns = s.per_block().view(torch.int32) & 0x7FFFFF
        assert patterns.unique().numel() == 1


def test_both_fp8_formats_share_their_mantissa():
    x = rough()
    a, b = (scaling.group_amax_mantissa(x, f, "subchannel-32") for f in (E4M3, E5M2))
    assert torch.equal(a.mantissa, b.mantissa)
    inside = (a.exponents != scaling.NO_SCALE) & (b.exponents < 127)
    assert ((b.exponents.int() - a.exponents.int())[inside] == 7).all()


def test_zeros_and_what_is_not_finite_have_scale_one():
    x = torch.ones(6, 2) * 3.0
    x[0] = 0.0
    x[1, 0], x[2, 1] = torch.inf, torch.nan
    found = scaling.group_amax_mantissa(x, E4M3, "channel")
    assert found.exponents[:3, 0].tolist() == [scaling.NO_SCALE] * 3
    assert found.per_block()[:3, 0].tolist() == [1.0] * 3
    assert float(found.mantissa) == oracle.ideal(Fraction(3), oracle.E4M3)[0]
    nothing = scaling.group_amax_mantissa(torch.zeros(3, 3), E4M3)
    assert float(nothing.mantissa) == 1.0


def test_tiny_blocks_have_the_largest_exponent():
    x = torch.tensor([[2.0**-149], [2.0**-120], [1.0]])
    found = scaling.group_amax_mantissa(x, E4M3, "channel")
    assert found.exponents[:, 0].tolist() == [127, 127, 8]
    assert found.per_block()[:, 0].tolist() == [1.75 * 2.0**127, 1.75 * 2.0**127, 448.0]


@given(st.integers(1, 0x7F7FFFFF), st.integers(1, 0x7F7FFFFF))
@settings(max_examples=300)
def test_any_two_blocks(first, second):
    """All magnitudes of FP32, subnormal ones included."""
    x = torch.tensor([[first], [second]], dtype=torch.int32).view(torch.float32)
    for fmt in (E4M3, E5M2):
        found = scaling.group_amax_mantissa(x, fmt, "channel")
        values, grid = x.flatten().tolist(), grid_of(fmt)
        shared = oracle.group_mantissa([[v] for v in values], grid)
        assert Fraction(float(found.mantissa)) == shared
        for value, e, scale in zip(
            values, found.exponents.flatten().tolist(), found.per_block().flatten(), strict=True
        ):
            assert e == oracle.exponent([value], shared, grid)
            assert Fraction(float(scale)) * Fraction(value) <= grid.largest * (
                1 + Fraction(2) ** -24
            )


def test_bytes():
    x = matrix(256, 256)
    assert scaling.group_amax_mantissa(x, E4M3, "subchannel-32").nbytes == 4 + 256 * 8
    assert scaling.amax_scaling(x, E4M3, "subchannel-32").nbytes == 5 * 256 * 8
    assert scaling.power_of_two_scaling(x, E4M3, "subchannel-32").nbytes == 4 + 256 * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_is_its_values(dtype):
    x = matrix(spread=1.0).to(dtype)
    a, b = (scaling.group_amax_mantissa(t, E4M3, (8, 8)) for t in (x, x.float()))
    assert torch.equal(a.exponents, b.exponents)
    assert torch.equal(a.mantissa, b.mantissa)


@pytest.mark.parametrize(
    ("x", "fmt", "block", "group", "message"),
    [
        (torch.ones(2, 2, dtype=torch.int32), E4M3, "tensor", "tensor", "x has dtype torch.int32"),
        (torch.ones(2, 2).double(), E4M3, "tensor", "tensor", "x has dtype torch.float64"),
        (torch.ones(0, 2), E4M3, "tensor", "tensor", r"x has shape \(0, 2\)"),
        (torch.ones(2), E4M3, "tensor", "tensor", r"x has shape \(2,\)"),
        (torch.ones(2, 2), numerics.BF16, "tensor", "tensor", "fmt=bf16 cannot be scaled to"),
        (torch.ones(2, 2), E4M3, "rows", "tensor", "partition='rows' is unknown"),
        (torch.ones(2, 2), E4M3, (0, 2), "tensor", r"partition=\(0, 2\) cannot apply"),
        (torch.ones(2, 2), E4M3, (1.0, 2), "tensor", "cannot apply"),
        (torch.ones(2, 2), E4M3, 128, "tensor", "partition=128 cannot apply"),
        (torch.ones(9, 9), E4M3, (2, 2), (3, 2), r"group=\(3, 2\) cannot apply"),
        (torch.ones(9, 9), E4M3, (2, 2), "all", "group='all' is unknown"),
    ],
    ids=str,
)
def test_bad_input(x, fmt, block, group, message):
    with pytest.raises(ValueError, match=message):
        scaling.group_amax_mantissa(x, fmt, block, group)

"""Stochastic rounding: given the bits, exact; over all bits, without bias."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subulp.numerics import BF16, E4M3, E5M2, FP16, Format, round_to, simulated
from tests.numerics.support import (
    FP8,
    FP32_MAX,
    NARROW,
    all_codes,
    assert_same_bits,
    boundaries,
    fp32,
    from_patterns,
    grid_of,
)
from tests.numerics.test_rounding import FORMATS, PATTERNS
from tests.oracles.rounding import WORD, round_float, threshold

EDGE_PATTERNS = (0, 1, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**31 + 1, WORD - 2**16, WORD - 1)


def oracle(x: Tensor, fmt: Format, bits: Tensor) -> Tensor:
    grid = grid_of(fmt)
    pairs = zip(x.tolist(), bits.tolist(), strict=True)
    return fp32([round_float(v, grid, "stochastic", b) for v, b in pairs])


def random_bits(shape: torch.Size | tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(0, WORD, shape, generator=torch.Generator().manual_seed(seed))


# Given the bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_every_fp8_boundary_as_defined(fmt: Format) -> None:
    x = boundaries(fmt)
    for number, pattern in enumerate((*EDGE_PATTERNS, None, None)):
        bits = random_bits(x.shape, number) if pattern is None else torch.full(x.shape, pattern)
        assert_same_bits(round_to(x, fmt, "stochastic", bits=bits), oracle(x, fmt, bits))


@settings(max_examples=400)
@given(
    cases=st.lists(
        st.tuples(PATTERNS, PATTERNS | st.sampled_from(EDGE_PATTERNS)), min_size=1, max_size=20
    ),
    fmt=FORMATS,
)
def test_any_value_to_any_format(cases: list[tuple[int, int]], fmt: Format) -> None:
    x = from_patterns([pattern for pattern, _ in cases])
    bits = torch.tensor([b for _, b in cases])
    assert_same_bits(round_to(x, fmt, "stochastic", bits=bits), oracle(x, fmt, bits))


@settings(max_examples=400)
@given(data=st.data(), fmt=FORMATS, negative=st.booleans())
def test_at_the_threshold_of_any_format(data: st.DataObject, fmt: Format, negative: bool) -> None:
    """Inside every kind of interval, at the last pattern that rounds down and the first up."""
    grid = grid_of(fmt)
    code = data.draw(st.integers(0, grid.count - 2) | st.integers(0, min(3, grid.count - 2)))
    low, high = grid.value(code), grid.value(code + 1)
    x = fp32(float(low + (high - low) * data.draw(st.fractions(0, 1))))
    down = WORD - threshold(grid.locate(Fraction(x.item()))[1]) - 1
    bits = torch.tensor([max(down, 0), min(down + 1, WORD - 1)])
    x = (-x if negative else x).expand(2)
    assert_same_bits(round_to(x, fmt, "stochastic", bits=bits), oracle(x, fmt, bits))


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_uint32_and_int64_bits_are_the_same(fmt: Format) -> None:
    x = boundaries(fmt)
    bits = random_bits(x.shape, 0)
    bits[: len(EDGE_PATTERNS)] = torch.tensor(EDGE_PATTERNS)
    wide = round_to(x, fmt, "stochastic", bits=bits)
    assert_same_bits(round_to(x, fmt, "stochastic", bits=bits.to(torch.uint32)), wide)


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_a_representable_value_never_moves(fmt: Format) -> None:
    x = all_codes(fmt)
    x = x[x.isfinite()]
    for number, pattern in enumerate((*EDGE_PATTERNS, None, None, None)):
        bits = random_bits(x.shape, number) if pattern is None else torch.full(x.shape, pattern)
        assert_same_bits(round_to(x, fmt, "stochastic", bits=bits), x)


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_beyond_the_largest_value_every_pattern_saturates(fmt: Format) -> None:
    last_step = fmt.max - float(grid_of(fmt).value(fmt.max_code - 1))
    beyond = [fmt.max + last_step * part for part in (2**-10, 0.25, 0.5, 0.75, 0.999)]
    x = fp32([*beyond, min(fmt.max * 3, FP32_MAX), FP32_MAX])
    assert (x > fmt.max).all()
    x = torch.cat((x, -x))
    expected = torch.copysign(fp32(fmt.max), x)
    for pattern in EDGE_PATTERNS:
        bits = torch.full(x.shape, pattern)
        assert_same_bits(round_to(x, fmt, "stochastic", bits=bits), expected)


# Over all bits -----------------------------------------------------------------------------------


def patterns_rounding_up(x: Tensor, fmt: Format) -> Tensor:
    """How many of the 2**32 patterns give the larger magnitude, found by asking ``round_to``.

    ``fraction + bits`` grows with ``bits``, so there is a first pattern that rounds up; it is
    bisected for. That the results are in fact ordered is checked at many other patterns.
    """
    down = round_to(x, fmt, "toward-zero")

    def goes_up(pattern: Tensor) -> Tensor:
        return round_to(x, fmt, "stochastic", bits=pattern) != down

    first, last = torch.zeros(x.shape, dtype=torch.int64), torch.full(x.shape, WORD)
    while (first < last).any():
        middle = (first + last) // 2
        # Equal ends are done; asking for the pattern 2**32 would wrap to 0.
        up = goes_up(middle.clamp(max=WORD - 1)) | (middle == WORD)
        first, last = torch.where(up, first, middle + 1), torch.where(up, middle, last)
        first = torch.minimum(first, last)

    probes = [torch.full(x.shape, pattern) for pattern in EDGE_PATTERNS]
    probes += [random_bits(x.shape, seed) for seed in range(16)]
    probes += [(first + shift).clamp(0, WORD - 1) for shift in (-2, -1, 0, 1)]
    for probe in probes:
        assert torch.equal(goes_up(probe), probe >= first)
    return WORD - first


def mean(down: float, up: float, count: int) -> Fraction:
    """Mean over all 2**32 patterns when ``count`` of them round up."""
    return (Fraction(down) * (WORD - count) + Fraction(up) * count) / WORD


def interior(fmt: Format, parts: list[Fraction]) -> Tensor:
    """Points inside the interval above every code but the last, both signs."""
    values = grid_of(fmt).values
    points = [
        float(low + (high - low) * part)
        for low, high in itertools.pairwise(values)
        for part in parts
    ]
    x = fp32(points)
    assert x.tolist() == points, "the points are to be FP32 values"
    return torch.cat((x, -x))


def assert_unbiased(x: Tensor, fmt: Format) -> None:
    down = round_to(x, fmt, "toward-zero")
    up = round_to(x, fmt, "stochastic", bits=torch.full(x.shape, WORD - 1))
    count = patterns_rounding_up(x, fmt)
    for row in zip(x.tolist(), down.tolist(), up.tolist(), count.tolist(), strict=True):
        value, *outcome = row
        assert mean(*outcome) == Fraction(value), row


DYADIC = [Fraction(n, 2**m) for n, m in ((1, 2), (1, 1), (3, 2), (5, 4), (341, 10), (1023, 10))]
FP8_PARTS = [*DYADIC, Fraction(1, 2**20), Fraction(2**19 + 1, 2**20), Fraction(2**20 - 1, 2**20)]


@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_unbiased_above_every_fp8_code(fmt: Format) -> None:
    assert_unbiased(interior(fmt, FP8_PARTS), fmt)


def test_unbiased_above_every_fp16_code() -> None:
    """All 31743 intervals, subnormals included, at one point each (13 bits are dropped)."""
    values = torch.tensor([float(v) for v in grid_of(FP16).values])
    parts = random_bits(values[1:].shape, 0) % (2**13 - 1) + 1
    x = values[:-1] + values.diff() * (parts / 2**13)
    count = patterns_rounding_up(x, FP16)
    # The mean is low + step * count / 2**32: it is x iff the count is the part of the step.
    assert torch.equal(count, parts << 19)


@pytest.mark.parametrize(
    "fmt", [simulated(2, 1), simulated(2, 3, has_infinity=False), simulated(5, 6)], ids=str
)
def test_unbiased_above_every_code_of_simulated_formats(fmt: Format) -> None:
    assert_unbiased(interior(fmt, DYADIC), fmt)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_unbiased_down_to_the_finest_step(fmt: Format) -> None:
    """FP32 goes on for many binades below the smallest subnormal; 32 bits reach 2**-32 of it."""
    unit = Fraction(fmt.smallest_subnormal)
    points = [unit / 2**s * n / 2**m for s in range(33) for n, m in ((1, 0), (3, 1)) if s + m <= 32]
    x = fp32([float(p) for p in points])
    assert_unbiased(torch.cat((x, -x)), fmt)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_bias_below_the_finest_step(fmt: Format) -> None:
    """What no pattern of 32 bits can tell is cut: less than 2**-32 ulp, and toward zero."""
    unit = Fraction(fmt.smallest_subnormal)
    finest = unit / WORD
    points = [finest / 2, finest * Fraction(3, 2), finest * Fraction(2**20 + 1, 4), unit / 3]
    points = [*points, finest / 2**30, Fraction(1, 2**149), finest * 7 / 8]
    x = fp32([float(p) for p in points])
    counts = patterns_rounding_up(x, fmt).tolist()
    for value, count in zip(x.tolist(), counts, strict=True):
        bias = Fraction(value) - mean(0.0, fmt.smallest_subnormal, count)
        assert 0 <= bias < finest
    assert any(Fraction(v) / finest % 1 for v in x.tolist())


BF16_PATTERNS = [
    # zero's interval, subnormals, the boundary to the normal numbers
    *(0x00000001, 0x00007FFF, 0x00008000, 0x0000FFFF, 0x00010001, 0x00438765, 0x007E8001),
    *(0x007F0001, 0x007FFFFF, 0x00800001, 0x0080FFFF),
    # normal numbers, and the steps up to a power of two
    *(0x3F800001, 0x3F804321, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3FFF0001, 0x3FFFFFFF),
    *(0x40490FDB, 0x1234ABCD, 0x5A5A5A5A, 0x7F7E0001, 0x7F7EFFFF),
    # values on the grid
    *(0x00000000, 0x00010000, 0x00800000, 0x3F800000, 0x7F7F0000),
]


def all_16_bit_patterns() -> Tensor:
    return torch.arange(2**16) << 16


def test_bf16_is_unbiased_over_all_16_bit_patterns() -> None:
    x = from_patterns(BF16_PATTERNS + [p | 0x80000000 for p in BF16_PATTERNS])
    patterns = all_16_bit_patterns()
    for value in x:
        y = round_to(value.expand(2**16), BF16, "stochastic", bits=patterns)
        outcomes, counts = y.double().unique(return_counts=True)
        total = sum(
            Fraction(v) * n for v, n in zip(outcomes.tolist(), counts.tolist(), strict=True)
        )
        assert total / 2**16 == Fraction(value.item())


def test_bf16_counts_for_every_dropped_half() -> None:
    """All 2**16 halves that BF16 drops: as many patterns round up as the half says."""
    halves = torch.arange(2**16)
    for upper in (0x0000, 0x007F, 0x3F80, 0xBFFF):
        x = from_patterns((upper << 16) | halves.numpy())
        down = round_to(x, BF16, "toward-zero")
        for bits, expected in ((2**16 - halves, True), (2**16 - 1 - halves, False)):
            up = round_to(x, BF16, "stochastic", bits=bits.clamp(max=2**16 - 1) << 16) != down
            assert torch.equal(up, torch.full_like(up, expected) & (halves > 0))


def test_bf16_beyond_the_largest_value_saturates_for_all_16_bit_patterns() -> None:
    for pattern in (0x7F7F0001, 0x7F7F8000, 0x7F7FFFFF):
        x = from_patterns([pattern]).expand(2**16)
        y = round_to(x, BF16, "stochastic", bits=all_16_bit_patterns())
        assert_same_bits(y, torch.full((2**16,), BF16.max))


def test_bf16_values_never_move_for_any_16_bit_pattern() -> None:
    values = all_codes(BF16)[:: 2**9 + 1]
    values = values[values.isfinite()]
    for value in values:
        y = round_to(value.expand(2**16), BF16, "stochastic", bits=all_16_bit_patterns())
        assert_same_bits(y, value.expand(2**16))


@pytest.mark.parametrize(
    ("fmt", "dropped"),
    [(simulated(8, 15), 8), (simulated(8, 9), 14), (simulated(5, 12), 11), (simulated(6, 20), 3)],
    ids=str,
)
def test_unbiased_by_enumeration_of_the_top_bits(fmt: Format, dropped: int) -> None:
    """Few bits are dropped, so the patterns of as many top bits are all that can matter."""
    patterns = torch.arange(2**dropped) << (32 - dropped)
    edges = [0, 2**fmt.mantissa_bits - 1, 2**fmt.mantissa_bits, fmt.max_code - 1, fmt.max_code // 2]
    grid = grid_of(fmt)
    for code in edges:
        low, high = grid.value(code), grid.value(code + 1)
        for numerator in {0, 1, 3, 2 ** (dropped - 1), 2**dropped - 1}:
            exact = low + (high - low) * Fraction(numerator, 2**dropped)
            x = fp32(float(exact))
            assert Fraction(x.item()) == exact
            y = round_to(x.expand(2**dropped), fmt, "stochastic", bits=patterns)
            assert set(y.tolist()) <= {float(low), float(high)}
            assert sum(map(Fraction, y.tolist())) / 2**dropped == exact

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subulp.numerics import BF16, E4M3, E5M2, FP16, FP32, Format, round_to, simulated
from tests.numerics.support import (
    FP8,
    FP32_MAX,
    INF,
    NAN,
    NARROW,
    all_codes,
    assert_same_bits,
    boundaries,
    default_dtype,
    fp32,
    from_patterns,
    grid_of,
    stored_cast,
)
from tests.oracles.rounding import round_float

FORMATS = st.builds(
    simulated, st.integers(2, 7), st.integers(1, 23), has_infinity=st.booleans()
) | st.builds(simulated, st.just(8), st.integers(1, 23))
PATTERNS = st.integers(0, 2**32 - 1)


def oracle(x: Tensor, fmt: Format, rounding: str) -> Tensor:
    grid = grid_of(fmt)
    return fp32([round_float(v, grid, rounding) for v in x.tolist()])


@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_boundaries_are_what_they_claim(fmt: Format) -> None:
    """The inputs below hold all 256 codes, all midpoints, and both FP32 neighbours of each."""
    x = set(boundaries(fmt).tolist())
    values = [float(v) for v in grid_of(fmt).values]
    values.append(2 * values[-1] - values[-2])
    for low, high in itertools.pairwise(values):
        for point in (low, (low + high) / 2):
            for sign in (1, -1):
                p = np.float32(sign * point)
                assert {float(p), float(np.nextafter(p, np.float32(9e9)))} <= x
                assert float(np.nextafter(p, np.float32(-9e9))) in x


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_nearest_at_every_boundary_as_stored_casts(fmt: Format) -> None:
    x = boundaries(fmt)
    assert_same_bits(round_to(x, fmt), stored_cast(x, fmt))


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_nearest_at_every_boundary_as_torch_casts(fmt: Format) -> None:
    x = boundaries(fmt)
    x = x[~x.isfinite() | (x.abs() <= fmt.max)]
    if not fmt.has_infinity:
        x = x[~x.isinf()]
    assert_same_bits(round_to(x, fmt), x.to(fmt.dtype).float())


@pytest.mark.parametrize("rounding", ["nearest", "toward-zero"])
@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_fp8_at_every_boundary_as_defined(fmt: Format, rounding: str) -> None:
    x = boundaries(fmt)
    assert_same_bits(round_to(x, fmt, rounding), oracle(x, fmt, rounding))


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_toward_zero_at_every_boundary(fmt: Format) -> None:
    """Toward zero is the nearest, or its predecessor where the nearest lies beyond."""
    x = boundaries(fmt)
    values = torch.tensor([float(v) for v in grid_of(fmt).values])
    nearest = stored_cast(x, fmt)
    magnitude = nearest.abs().nan_to_num(0.0, posinf=0.0)
    index = torch.searchsorted(values, magnitude)
    expected = torch.where(magnitude > x.abs(), values[(index - 1).clamp(min=0)], magnitude)
    expected = torch.where(nearest.isfinite(), torch.copysign(expected, x), nearest)
    assert_same_bits(round_to(x, fmt, "toward-zero"), expected)


def test_toward_zero_to_bf16_cuts_the_low_half() -> None:
    x = boundaries(BF16)
    x = x[x.isfinite()]
    cut = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert_same_bits(round_to(x, BF16, "toward-zero"), cut)


@settings(max_examples=400)
@given(
    patterns=st.lists(PATTERNS, min_size=1, max_size=20),
    fmt=FORMATS,
    rounding=st.sampled_from(("nearest", "toward-zero")),
)
def test_any_value_to_any_format(patterns: list[int], fmt: Format, rounding: str) -> None:
    x = from_patterns(patterns)
    assert_same_bits(round_to(x, fmt, rounding), oracle(x, fmt, rounding))


@settings(max_examples=400)
@given(data=st.data(), fmt=FORMATS, rounding=st.sampled_from(("nearest", "toward-zero")))
def test_around_the_boundaries_of_any_format(
    data: st.DataObject, fmt: Format, rounding: str
) -> None:
    """Uniform patterns seldom meet a tie: start from codes, half steps and their neighbours."""
    grid = grid_of(fmt)
    edges = {0, 1, 2**fmt.mantissa_bits - 1, 2**fmt.mantissa_bits, grid.count - 2, grid.count - 1}
    code = data.draw(st.integers(0, grid.count - 1) | st.sampled_from(sorted(edges)))
    point = grid.value(code)
    if data.draw(st.booleans()):
        ahead = grid.value(code + 1) if code + 1 < grid.count else 2 * point - grid.value(code - 1)
        point = (point + ahead) / 2
    x = fp32([float(point)]).clamp(max=FP32_MAX)
    x = torch.cat((x, torch.nextafter(x, fp32([INF])), torch.nextafter(x, fp32([-INF]))))
    x = torch.cat((x, -x))
    assert_same_bits(round_to(x, fmt, rounding), oracle(x, fmt, rounding))


ALL_FORMATS = (FP32, *NARROW, simulated(2, 1), simulated(3, 2, has_infinity=False), simulated(8, 1))


@pytest.mark.parametrize("rounding", ["nearest", "toward-zero", "stochastic"])
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_finite_stays_finite(fmt: Format, rounding: str) -> None:
    largest = fp32([fmt.max, FP32_MAX])
    x = torch.cat((largest, torch.nextafter(largest[:1], fp32([FP32_MAX])), fp32([1e38])))
    x = torch.cat((x, -x))
    bits = torch.full(x.shape, 2**32 - 1) if rounding == "stochastic" else None
    y = round_to(x, fmt, rounding, bits=bits)
    expected = fp32(fmt.max) if fmt != FP32 else x.abs()
    expected = torch.where(x.abs() < fmt.max, y.abs(), expected)
    assert_same_bits(y, torch.copysign(expected, x))
    assert y.isfinite().all()


@pytest.mark.parametrize("rounding", ["nearest", "toward-zero", "stochastic"])
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_specials(fmt: Format, rounding: str) -> None:
    x = torch.cat((fp32([INF, -INF, NAN, 0.0, -0.0]), from_patterns([0xFFFFFFFF, 0x7F800001])))
    for pattern in (0, 2**32 - 1):
        bits = torch.full(x.shape, pattern) if rounding == "stochastic" else None
        y = round_to(x, fmt, rounding, bits=bits)
        infinity = INF if fmt.has_infinity else NAN
        assert_same_bits(y, fp32([infinity, -infinity, NAN, 0.0, -0.0, NAN, NAN]))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=str)
def test_underflow_keeps_the_sign(fmt: Format) -> None:
    tiny = fp32([fmt.smallest_subnormal / 2])
    x = torch.cat((-tiny, tiny, fp32([-1e-45, 1e-45])))
    assert_same_bits(round_to(x, fmt), fp32([-0.0, 0.0, -0.0, 0.0]))
    assert_same_bits(round_to(x, fmt, "toward-zero"), fp32([-0.0, 0.0, -0.0, 0.0]))


@pytest.mark.parametrize("rounding", ["nearest", "toward-zero"])
def test_rounding_to_fp32_changes_nothing(rounding: str) -> None:
    x = torch.cat((boundaries(BF16), boundaries(FP16)))
    assert_same_bits(round_to(x, FP32, rounding), x)


def test_shape_and_strides_do_not_matter() -> None:
    x = boundaries(E4M3)[:1024].view(32, 32)
    expected = round_to(x.flatten(), E4M3).view(32, 32)
    assert_same_bits(round_to(x, E4M3), expected)
    assert_same_bits(round_to(x.t(), E4M3), expected.t())
    assert_same_bits(round_to(x[:, ::3], E4M3), expected[:, ::3])
    assert_same_bits(round_to(x[3, 5], E4M3), expected[3, 5])
    assert round_to(x[:0], E4M3).shape == (0, 32)


def test_input_is_left_alone() -> None:
    x = all_codes(E5M2) * 1.1
    before = x.clone()
    round_to(x, E4M3)
    assert_same_bits(x, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    x = boundaries(E4M3)
    expected = round_to(x, E4M3)
    with default_dtype(dtype):
        assert_same_bits(round_to(x, E4M3), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_only_fp32_is_rounded(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"x has dtype {dtype}"):
        round_to(torch.ones(3, dtype=dtype), E4M3)


@pytest.mark.parametrize("rounding", ["up", "", "NEAREST", None])
def test_unknown_rounding(rounding: str) -> None:
    with pytest.raises(ValueError, match=f"rounding={rounding!r}"):
        round_to(torch.ones(3), E4M3, rounding)


@pytest.mark.parametrize("rounding", ["nearest", "toward-zero"])
def test_superfluous_bits(rounding: str) -> None:
    with pytest.raises(ValueError, match="bits are given"):
        round_to(torch.ones(3), E4M3, rounding, bits=torch.zeros(3, dtype=torch.int64))


def test_missing_bits() -> None:
    with pytest.raises(ValueError, match="needs bits"):
        round_to(torch.ones(3), E4M3, "stochastic")


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 1), (1, 3)])
def test_bits_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bits have shape"):
        round_to(torch.ones(3), E4M3, "stochastic", bits=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int16, torch.uint8, torch.uint16, torch.float32, torch.bool]
)
def test_bits_of_another_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"bits have dtype {dtype}"):
        round_to(torch.ones(3), E4M3, "stochastic", bits=torch.zeros(3, dtype=dtype))


def test_a_tie_goes_to_the_even_code() -> None:
    """By hand, in E4M3: the ties below and above 9/8, and those below and above 2**-9."""
    x = fp32([1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10])
    assert_same_bits(round_to(x, E4M3), fp32([1.0, 1.25, 0.0, 2.0**-8]))

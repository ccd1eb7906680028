import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subulp.numerics import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    Format,
    format_of,
    round_to,
    simulated,
)
from subulp.numerics.formats import power_of_two
from tests.numerics.support import (
    FP32_MAX,
    all_codes,
    assert_same_bits,
    fp32,
    from_patterns,
    grid_of,
)
from tests.oracles.grid import Grid

STORED = (FP32, BF16, FP16, E4M3, E5M2)
ML_DTYPES = [
    (FP32, np.float32),
    (BF16, ml_dtypes.bfloat16),
    (FP16, np.float16),
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
    (simulated(4, 3), ml_dtypes.float8_e4m3),
    (simulated(3, 4), ml_dtypes.float8_e3m4),
]
EVERY_PAIR = [
    simulated(e, m, has_infinity=has_infinity)
    for e in range(2, 9)
    for m in range(1, 24)
    for has_infinity in (True, False)
    if has_infinity or e < 8
]


@pytest.mark.parametrize("fmt", STORED, ids=str)
def test_agrees_with_torch_finfo(fmt: Format) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert 2.0**-fmt.mantissa_bits == info.eps
    assert fmt.itemsize * 8 == info.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits


@pytest.mark.parametrize(("fmt", "dtype"), ML_DTYPES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_agrees_with_ml_dtypes_finfo(fmt: Format, dtype: type) -> None:
    info = ml_dtypes.finfo(dtype)
    assert fmt.max == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert (fmt.mantissa_bits, fmt.exponent_bits) == (info.nmant, info.iexp)
    assert (fmt.min_exponent, fmt.max_exponent) == (info.minexp, math.frexp(float(info.max))[1] - 1)
    bits = np.array(info.max, dtype).view(f"u{np.dtype(dtype).itemsize}")
    assert fmt.max_code == int(bits)


@pytest.mark.parametrize("fmt", EVERY_PAIR, ids=lambda f: f"{f}{'' if f.has_infinity else 'fn'}")
def test_agrees_with_the_definition(fmt: Format) -> None:
    grid = grid_of(fmt)
    assert Fraction(fmt.max) == grid.largest
    assert fmt.max <= FP32_MAX
    assert fmt.max_code == grid.count - 1
    assert Fraction(fmt.smallest_normal) == grid.value(2**fmt.mantissa_bits)
    assert Fraction(fmt.smallest_subnormal) == grid.value(1) == grid.unit
    assert fmt.precision == fmt.mantissa_bits + 1
    assert fmt.bias == grid.bias
    assert Fraction(2) ** fmt.max_exponent <= grid.largest < Fraction(2) ** (fmt.max_exponent + 1)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [p for p in ML_DTYPES if p[0] != FP32],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_every_value_agrees_with_ml_dtypes(fmt: Format, dtype: type) -> None:
    """The oracle that all other tests rely on has the values that ml_dtypes decodes."""
    codes = np.arange(fmt.max_code + 1, dtype=f"u{np.dtype(dtype).itemsize}")
    decoded = codes.view(dtype).astype(np.float64)
    assert [float(v) for v in grid_of(fmt).values] == decoded.tolist()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=str)
def test_every_value_is_on_its_own_grid(fmt: Format) -> None:
    values = all_codes(fmt)
    values = values[values.isfinite()]
    assert torch.equal(round_to(values, fmt), values)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=str)
def test_torch_decodes_every_code_as_ml_dtypes_does(fmt: Format) -> None:
    """Boundaries are torch's, so that a GPU's tests need nothing else."""
    codes = np.arange(2 ** (8 * fmt.itemsize), dtype=f"uint{8 * fmt.itemsize}")
    assert_same_bits(torch.from_numpy(codes).view(fmt.dtype).float(), all_codes(fmt))


def ulp_of_one_value(fmt: Format, x: float) -> float:
    return float(grid_of(fmt).ulp(abs(Fraction(x))))


@pytest.mark.parametrize("fmt", STORED, ids=str)
def test_ulp_of_one_is_table_9(fmt: Format) -> None:
    expected = {FP32: 2**-23, FP16: 2**-10, BF16: 2**-7, E4M3: 2**-3, E5M2: 2**-2}
    assert fmt.ulp(fp32([1.0])).tolist() == [expected[fmt]]


@pytest.mark.parametrize("fmt", STORED, ids=str)
def test_ulp_at_every_power_of_two_and_its_neighbours(fmt: Format) -> None:
    powers = torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64).float()
    up = torch.nextafter(powers, fp32(float("inf")))
    down = torch.nextafter(powers, fp32(0.0))
    x = torch.cat((powers, up, down, -powers, fp32([0.0, -0.0, FP32_MAX])))
    expected = [ulp_of_one_value(fmt, v) for v in x.tolist()]
    assert fmt.ulp(x).tolist() == expected
    assert fmt.ulp(x).dtype == torch.float32
    wide = fmt.ulp(x.double())
    assert wide.tolist() == expected
    assert wide.dtype == torch.float64


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_ulp_is_the_distance_to_the_next_value(fmt: Format) -> None:
    values = torch.tensor([float(v) for v in grid_of(fmt).values])
    assert torch.equal(fmt.ulp(values[:-1]), values.diff())


@pytest.mark.parametrize("fmt", STORED, ids=str)
def test_ulp_of_nonfinite_is_nan(fmt: Format) -> None:
    assert fmt.ulp(fp32([float("inf"), -float("inf"), float("nan")])).isnan().all()


@settings(max_examples=100)
@given(
    patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    fmt=st.sampled_from(EVERY_PAIR),
)
def test_ulp_of_any_value(patterns: list[int], fmt: Format) -> None:
    x = from_patterns(patterns)
    x = x[x.isfinite()]
    assert fmt.ulp(x).tolist() == [ulp_of_one_value(fmt, v) for v in x.tolist()]


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-1022, 1024)
    assert power_of_two(exponents).tolist() == [math.ldexp(1.0, e) for e in exponents.tolist()]


@pytest.mark.parametrize("width", [-1, 0, 1, 9, 11])
def test_bad_exponent_width(width: int) -> None:
    with pytest.raises(ValueError, match=rf"exponent_bits={width}\b"):
        simulated(width, 3)
    with pytest.raises(ValueError, match=rf"exponent_bits={width}\b"):
        Format("bad", width, 3)


@pytest.mark.parametrize("width", [-1, 0, 24, 52])
def test_bad_mantissa_width(width: int) -> None:
    with pytest.raises(ValueError, match=rf"mantissa_bits={width}\b"):
        simulated(4, width)
    with pytest.raises(ValueError, match=rf"mantissa_bits={width}\b"):
        Format("bad", 4, width)


def test_a_format_beyond_fp32_is_refused() -> None:
    """Eight exponent bits without infinities reach 2**128, where FP32 has none but infinity."""
    assert Grid(8, 7, has_infinity=False).largest > Fraction(FP32_MAX)
    with pytest.raises(ValueError, match=r"exponent_bits=8.*has_infinity=False"):
        simulated(8, 7, has_infinity=False)


@pytest.mark.parametrize("fmt", STORED, ids=str)
def test_format_of_its_dtype(fmt: Format) -> None:
    assert format_of(fmt.dtype) is fmt


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fnuz])
def test_format_of_another_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"dtype={dtype}"):
        format_of(dtype)


def test_a_simulated_format_has_no_storage() -> None:
    fmt = simulated(3, 4)
    assert (fmt.dtype, fmt.name, str(fmt)) == (None, "e3m4", "e3m4")
    with pytest.raises(ValueError, match="e3m4"):
        _ = fmt.itemsize


def test_formats_are_values() -> None:
    assert simulated(3, 4) == simulated(3, 4)
    assert hash(simulated(3, 4)) == hash(simulated(3, 4))
    assert simulated(4, 3) != simulated(4, 3, has_infinity=False)


def test_random_width_covers_every_dropped_bit() -> None:
    """16 bits do iff the finest FP32 value is within 16 bits of the grid's unit."""
    for fmt in (*STORED, *EVERY_PAIR):
        covered = Fraction(fmt.smallest_subnormal) / 2**16 <= Fraction(2) ** -149
        assert fmt.random_width == (16 if covered else 32), fmt

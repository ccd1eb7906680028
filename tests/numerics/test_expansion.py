"""Strict narrow arithmetic against exact rationals, and what the error-free algorithms promise."""

import inspect
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subulp.numerics import BF16, E4M3, E5M2, FP16, FP32, Format, expansion, simulated
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
    every_value,
    fp32,
    from_patterns,
    grid_of,
)
from tests.oracles import expansion as oracle
from tests.oracles.arithmetic import Strict

ONE_OPERAND = ("sqrt", "split")
TWO_OPERANDS = ("add", "sub", "mult", "div", "fast2sum", "two_sum", "two_prod", "two_prod_fma")
MORE_OPERANDS = ("fma", "grow", "scaling", "mul")
ALL = (*ONE_OPERAND, *TWO_OPERANDS, *MORE_OPERANDS)


@cache
def strict(fmt: Format) -> Strict:
    """One unit per format, so that its table of known results is shared by the tests."""
    return Strict(grid_of(fmt))


def reference(name: str, fmt: Format, **options: bool) -> Callable[..., tuple[float, ...]]:
    """The oracle of an operation, as a function of floats that returns all its results."""
    unit = strict(fmt)
    if hasattr(unit, name):
        operation = getattr(unit, name)
        return lambda *operands: (operation(*operands),)
    algorithm = getattr(oracle, name)
    return lambda *operands: algorithm(unit, *operands, **options)


def operands_of(name: str) -> int:
    parameters = inspect.signature(getattr(expansion, name)).parameters.values()
    return sum(p.kind is not p.KEYWORD_ONLY for p in parameters) - 1  # all but the format


def check(name: str, fmt: Format, *operands: Tensor, **options: bool) -> None:
    """Every result of an operation has the oracle's bits."""
    assert operands_of(name) == len(operands)
    ours = getattr(expansion, name)(*operands, fmt, **options)
    ours = ours if isinstance(ours, tuple) else (ours,)
    definition = reference(name, fmt, **options)
    rows = [definition(*row) for row in zip(*(o.tolist() for o in operands), strict=True)]
    for result, expected in zip(ours, zip(*rows, strict=True), strict=True):
        assert_same_bits(result, fp32(expected))


def all_tuples(values: Tensor, count: int) -> tuple[Tensor, ...]:
    grid = torch.cartesian_prod(*[values] * count) if count > 1 else values.view(-1, 1)
    return grid.unbind(-1)


def test_every_operation_is_tested() -> None:
    public = {
        name
        for name, value in vars(expansion).items()
        if inspect.isfunction(value)
        and value.__module__ == expansion.__name__
        and not name.startswith("_")
    }
    assert public == {*ALL, "encode", "decode"}


# Exhaustively ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ONE_OPERAND, *TWO_OPERANDS])
@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_all_operands_of_fp8(fmt: Format, name: str) -> None:
    """All 256 or 65536 of them: infinities, NaN, both zeros, subnormals and saturation included."""
    check(name, fmt, *all_tuples(all_codes(fmt), operands_of(name)))


@pytest.mark.parametrize("name", ["fma", "grow", "scaling"])
@pytest.mark.parametrize(
    "fmt",
    [simulated(2, 2), simulated(3, 1), simulated(2, 2, has_infinity=False)],
    ids=["e2m2", "e3m1", "e2m2fn"],
)
def test_all_triples_of_five_bit_formats(fmt: Format, name: str) -> None:
    check(name, fmt, *all_tuples(every_value(fmt), 3))


def test_all_triples_for_grow_in_any_order() -> None:
    fmt = simulated(2, 2)
    check("grow", fmt, *all_tuples(every_value(fmt), 3), ordered=False)


@pytest.mark.parametrize("has_infinity", [True, False])
def test_all_quadruples_of_a_four_bit_format(has_infinity: bool) -> None:
    fmt = simulated(2, 1, has_infinity=has_infinity)
    check("mul", fmt, *all_tuples(every_value(fmt), 4))


@pytest.mark.parametrize("name", ONE_OPERAND)
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_one_operand_at_every_11th_code_of_16_bits(fmt: Format, name: str) -> None:
    check(name, fmt, all_codes(fmt)[::11])


# At random ---------------------------------------------------------------------------------------


def related_operands(fmt: Format, count: int, size: int, seed: int) -> tuple[Tensor, ...]:
    """Random codes whose exponents are close enough for the operands to meet in a sum.

    Uniform codes of BF16 would hardly ever: 254 binades, 8 bits wide.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    values = torch.tensor([float(v) for v in grid_of(fmt).values])
    binade = 2**fmt.mantissa_bits
    first = uniform(0, len(values))
    codes = [first]
    for _ in range(count - 1):
        distance = uniform(-fmt.precision - 2, fmt.precision + 3) * binade
        codes.append(first + distance + uniform(-binade, binade))
    return tuple(values[code.clamp(0, len(values) - 1)] * (2 * uniform(0, 2) - 1) for code in codes)


NOT_EXHAUSTIVE = [(fmt, name) for fmt in (BF16, FP16) for name in (*TWO_OPERANDS, *MORE_OPERANDS)]
NOT_EXHAUSTIVE += [(fmt, name) for fmt in FP8 for name in MORE_OPERANDS]


@pytest.mark.parametrize(("fmt", "name"), NOT_EXHAUSTIVE, ids=str)
def test_related_operands(fmt: Format, name: str) -> None:
    operands = related_operands(fmt, operands_of(name), 2000, seed=0)
    check(name, fmt, *operands)
    if name == "grow":
        check(name, fmt, *operands, ordered=False)


@pytest.mark.parametrize("name", ["mult", "two_prod", "two_prod_fma", "scaling", "mul", "div"])
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_products_around_one(fmt: Format, name: str) -> None:
    """Products neither overflow nor underflow here, unlike most at random."""
    codes = torch.randint(-400, 400, (operands_of(name), 1000), generator=torch.manual_seed(1))
    bits = 15 - fmt.mantissa_bits
    assert bits == fmt.exponent_bits
    one = int(fp32(1.0).to(fmt.dtype).view(torch.int16))
    x = (codes + one).to(torch.int16).view(fmt.dtype).float()
    check(name, fmt, *x)


SIMULATED = st.builds(
    simulated, st.integers(2, 7), st.integers(1, 21), has_infinity=st.booleans()
) | st.builds(simulated, st.just(8), st.integers(1, 21))


@settings(max_examples=400)
@given(data=st.data(), name=st.sampled_from(ALL), fmt=SIMULATED | st.sampled_from((*NARROW, FP32)))
def test_any_operands_of_any_format(data: st.DataObject, name: str, fmt: Format) -> None:
    """Hypothesis seeks out the edges, also of formats as wide as strict arithmetic goes."""
    grid = grid_of(fmt)
    specials = [INF, NAN, -0.0] if fmt.has_infinity else [NAN, -0.0]
    anchor = data.draw(st.integers(0, grid.count - 1))
    width = 4 * 2**fmt.mantissa_bits
    code = st.integers(0, grid.count - 1) | st.integers(anchor - width, anchor + width).map(
        lambda c: min(max(c, 0), grid.count - 1)
    )
    value = st.tuples(code, st.sampled_from((1, -1))).map(lambda p: p[1] * float(grid.value(p[0])))
    value = value | value | value | st.sampled_from(specials)
    operands = [fp32([data.draw(value)]) for _ in range(operands_of(name))]
    check(name, fmt, *operands)


@pytest.mark.parametrize("name", ["add", "mult", "div", "fma", "two_sum", "two_prod_fma"])
def test_fp32_is_a_format_too(name: str) -> None:
    """FP32's own strict arithmetic, where FP64 cannot hold all exact sums and quotients."""
    count = operands_of(name)
    patterns = torch.randint(0, 2**32, (count, 400), generator=torch.manual_seed(2))
    patterns[1:] = (patterns[1:] & 0x807FFFFF) | (patterns[:1] & 0x7F800000)
    shift = torch.randint(-30, 31, (count, 400), generator=torch.manual_seed(3)) * 2**23
    near = ((patterns & 0x7FFFFFFF) + shift).clamp(0, 0x7F7FFFFF) | (patterns & 0x80000000)
    check(name, FP32, *from_patterns(near.numpy()))


def test_fp32_saturates_as_every_other_format() -> None:
    largest = fp32([FP32_MAX, -FP32_MAX])
    assert_same_bits(expansion.add(largest, largest, FP32), largest)
    assert_same_bits(expansion.mult(largest, fp32([2.0, 2.0]), FP32), largest)
    hi, lo = expansion.encode(torch.tensor([1e300, -1e300], dtype=torch.float64), FP32)
    assert_same_bits(hi, largest)
    assert_same_bits(lo, largest)


@pytest.mark.parametrize("mantissa_bits", [22, 23])
def test_formats_too_wide_for_one_rounding_are_refused(mantissa_bits: int) -> None:
    fmt = simulated(5, mantissa_bits)
    with pytest.raises(ValueError, match=f"e5m{mantissa_bits}.*at most 21 mantissa bits"):
        expansion.add(fp32([1.0]), fp32([1.0]), fmt)


def test_no_double_rounding() -> None:
    """By hand: 1 + 2**-9 + 2**-40 is above BF16's tie; through FP32 it would become the tie."""
    one, tie = fp32([1.0]), fp32([2.0**-8])
    assert expansion.fma(tie, one, one, BF16).item() == 1.0
    tiny = fp32([2.0**-40])
    above = expansion.fma(tie + 2.0**-15, one, one, BF16)
    assert above.item() == 1.0 + 2.0**-7
    wide = torch.tensor([1.0 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert wide.float().item() == 1.0 + 2.0**-8
    assert expansion.encode(wide, BF16)[0].item() == 1.0 + 2.0**-7
    assert expansion.fma(fp32([1.0 + 2.0**-7]), fp32([2.0**-1]), tiny, BF16).item() == 0.50390625


def test_fma_next_to_a_tie_beyond_fp64() -> None:
    """Products on a tie, and an addend so small that FP64 loses it: it decides nevertheless."""
    one = int(fp32(1.0).bfloat16().view(torch.int16))
    ones = torch.arange(one, one + 128, dtype=torch.int16).view(torch.bfloat16).float()
    a, b = torch.cartesian_prod(ones, ones).unbind(-1)
    in_ulps = a.double() * b.double() / BF16.ulp(a.double() * b.double())
    tie = in_ulps % 1 == 0.5
    assert tie.sum() > 100
    a, b = a[tie], b[tie]
    for tiny in (2.0**-100, -(2.0**-100), BF16.smallest_subnormal, 0.0):
        assert torch.equal(a.double() * b.double() + tiny, a.double() * b.double())
        c = torch.full_like(a, tiny)
        check("fma", BF16, a, b, c)
        check("fma", BF16, -a, b, c)
    a, c = fp32([1.0 + 2.0**-12] * 4), fp32([2.0**-100, -(2.0**-100), 2.0**-149, 0.0])
    check("fma", FP32, a, a, c)
    check("fma", FP32, -a, a, c)


# What the error-free algorithms promise ----------------------------------------------------------


def exact_pairs(fmt: Format) -> tuple[Tensor, Tensor]:
    """Finite operands: all pairs of FP8, related random ones of 16 bits."""
    if fmt in FP8:
        a, b = all_tuples(all_codes(fmt), 2)
        finite = a.isfinite() & b.isfinite()
        return a[finite], b[finite]
    return related_operands(fmt, 2, 4000, seed=4)


def assert_error_free(name: str, fmt: Format, a: Tensor, b: Tensor) -> None:
    """``x + y`` is the exact result, and ``y`` at most half an ulp of ``x``.

    The operands are within a few binades of each other, so that exact sums and products, and their
    distances to ``x``, all have fewer than FP64's 53 bits.
    """
    assert a.numel() > 1000
    x, y = (v.double() for v in getattr(expansion, name)(a, b, fmt))
    exact = a.double() * b.double() if "prod" in name else a.double() + b.double()
    assert torch.equal(y, exact - x)
    assert (y.abs() <= fmt.ulp(x) / 2).all()
    assert (y != 0).any()


def sums_in_range(fmt: Format, a: Tensor, b: Tensor) -> Tensor:
    return (a.double() + b.double()).abs() <= fmt.max


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_fast2sum_is_error_free_in_order(fmt: Format) -> None:
    a, b = exact_pairs(fmt)
    keep = sums_in_range(fmt, a, b) & ((a.abs() >= b.abs()) | (a == 0))
    assert_error_free("fast2sum", fmt, a[keep], b[keep])


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_two_sum_is_error_free_in_any_order(fmt: Format) -> None:
    a, b = exact_pairs(fmt)
    keep = sums_in_range(fmt, a, b)
    assert ((a.abs() < b.abs()) & keep).any()
    assert_error_free("two_sum", fmt, a[keep], b[keep])


def products_in_range(fmt: Format, a: Tensor, b: Tensor) -> Tensor:
    """Neither the split overflows, nor the product, nor does the finest bit underflow."""
    factor = 2.0 ** ((fmt.precision + 1) // 2) + 1
    wide_a, wide_b = a.double(), b.double()
    finest = fmt.ulp(wide_a) * fmt.ulp(wide_b) >= fmt.smallest_subnormal
    split = torch.maximum(wide_a.abs(), wide_b.abs()) * factor <= fmt.max
    return finest & split & ((wide_a * wide_b).abs() * 2 <= fmt.max)


@pytest.mark.parametrize("fmt", NARROW, ids=str)
@pytest.mark.parametrize("name", ["two_prod", "two_prod_fma"])
def test_products_are_error_free(fmt: Format, name: str) -> None:
    a, b = exact_pairs(fmt)
    if fmt not in FP8:
        # Related codes of any exponent seldom have a product in range: centre them on one.
        b = b / (2 ** torch.frexp(a).exponent.clamp(-100, 100).double()).float() ** 2
    b = expansion.encode(b, fmt)[0]
    keep = products_in_range(fmt, a, b)
    assert_error_free(name, fmt, a[keep], b[keep])


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_both_products_agree(fmt: Format) -> None:
    a, b = exact_pairs(fmt)
    if fmt not in FP8:
        b = b / (2 ** torch.frexp(a).exponent.clamp(-100, 100).double()).float() ** 2
    b = expansion.encode(b, fmt)[0]
    keep = products_in_range(fmt, a, b)
    plain = expansion.two_prod(a[keep], b[keep], fmt)
    fused = expansion.two_prod_fma(a[keep], b[keep], fmt)
    assert_same_bits(plain[0], fused[0])
    # The sign of an error of zero is the one thing that may differ.
    assert torch.equal(plain[1], fused[1])


def significand_bits(values: Tensor) -> Tensor:
    """Bits from the first to the last one of each value."""
    mantissa = (torch.frexp(values.double()).mantissa * 2**53).to(torch.int64).abs()
    lowest = (mantissa & -mantissa).double()
    return torch.where(mantissa == 0, 0, torch.log2(mantissa.double() / lowest).floor() + 1)


@pytest.mark.parametrize("fmt", [*NARROW, simulated(6, 4), simulated(5, 8)], ids=str)
def test_split_gives_halves_whose_products_are_exact(fmt: Format) -> None:
    """``p - c`` and ``c - 1`` bits for ``c = ceil(p / 2)``: Dekker's sign trick saves a bit."""
    values = torch.tensor([float(v) for v in grid_of(fmt).values])
    c = (fmt.precision + 1) // 2
    a = values[values * (2**c + 1) <= fmt.max]
    a = torch.cat((a, -a))
    hi, lo = expansion.split(a, fmt)
    assert torch.equal(hi.double() + lo.double(), a.double())
    assert significand_bits(hi).max() == fmt.precision - c
    assert significand_bits(lo).max() == c - 1


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_grow_adds_up_to_half_an_ulp_of_the_low_component(fmt: Format) -> None:
    """Only ``lo + v`` is rounded (Collage, Algorithm 1): that bounds the error of the whole."""
    hi, a, noise = related_operands(fmt, 3, 4000, seed=5)
    keep = (hi.abs() >= a.abs()) & ((hi.double() + a.double()).abs() * 1.5 <= fmt.max)
    hi, a, noise = hi[keep], a[keep], noise[keep]
    half = fmt.ulp(hi) / 2
    lo = expansion.encode(noise.clamp(-half, half), fmt)[0]
    lo = torch.where(lo.abs() <= half, lo, 0.0)
    u, v = expansion.fast2sum(hi, a, fmt)
    low = expansion.add(lo, v, fmt)
    ordered = (u == 0) | (u.abs() >= low.abs())
    assert ordered.float().mean() > 0.9
    hi, lo, a, low = hi[ordered], lo[ordered], a[ordered], low[ordered]
    # All operands are within a few binades, so FP64 holds every sum below exactly.
    exact = hi.double() + lo.double() + a.double()
    x, y = (v.double() for v in expansion.grow(hi, lo, a, fmt))
    error = (x + y - exact).abs()
    assert (error <= fmt.ulp(low.double()) / 2).all()
    assert (y.abs() <= fmt.ulp(x) / 2).all()
    without = (expansion.add(hi, a, fmt).double() - exact).abs()
    assert (error < without).float().mean() > 0.5, "the low component has to matter"


def test_grow_keeps_updates_that_bf16_loses() -> None:
    """200 + 0.1 is 200 in BF16 (Collage, section 3.1); a hundred times, an expansion has 210."""
    tenth = expansion.encode(fp32([0.1]), BF16)[0]
    plain = hi = fp32([200.0])
    lo = fp32([0.0])
    for _ in range(100):
        plain = expansion.add(plain, tenth, BF16)
        hi, lo = expansion.grow(hi, lo, tenth, BF16)
    assert plain.item() == 200.0
    exact = 200 + 100 * Fraction(tenth.item())
    assert abs(Fraction(hi.item()) + Fraction(lo.item()) - exact) < Fraction(1, 10)
    assert hi.item() == 210.0


def test_fast2sum_fails_out_of_order_where_encode_does_not() -> None:
    """A weight near zero and an update that is larger: ``x - a`` is not exact any more."""
    weight, update = fp32([1.9921875 * 2.0**-8]), fp32([1.9921875])
    exact = Fraction(weight.item()) + Fraction(update.item())
    x, y = expansion.fast2sum(weight, update, BF16)
    assert Fraction(x.item()) + Fraction(y.item()) != exact
    for hi, lo in (
        expansion.fast2sum(update, weight, BF16),
        expansion.two_sum(weight, update, BF16),
        expansion.encode(weight.double() + update.double(), BF16),
    ):
        assert Fraction(hi.item()) + Fraction(lo.item()) == exact


# Encode and decode -------------------------------------------------------------------------------


def check_encode(x: Tensor, fmt: Format) -> None:
    hi, lo = expansion.encode(x, fmt)
    expected = [oracle.encode(strict(fmt), v) for v in x.tolist()]
    assert_same_bits(hi, fp32([h for h, _ in expected]))
    assert_same_bits(lo, fp32([v for _, v in expected]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_encode_at_every_fp8_boundary(fmt: Format, dtype: torch.dtype) -> None:
    x = boundaries(fmt).to(dtype)
    if dtype == torch.float64:
        x = torch.cat((torch.nextafter(x, torch.tensor(INF).double()), x * (1 + 2.0**-30)))
    check_encode(x, fmt)


@settings(max_examples=300)
@given(
    patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    fmt=SIMULATED | st.sampled_from((*NARROW, FP32)),
)
def test_encode_any_fp32_value(patterns: list[int], fmt: Format) -> None:
    check_encode(from_patterns(patterns), fmt)


@settings(max_examples=300)
@given(
    values=st.lists(st.floats(), min_size=1, max_size=20),
    fmt=SIMULATED | st.sampled_from((*NARROW, FP32)),
)
def test_encode_any_fp64_value(values: list[float], fmt: Format) -> None:
    check_encode(torch.tensor(values, dtype=torch.float64), fmt)


def fp32_values(fmt: Format) -> Tensor:
    """Boundaries of the format, and dense mantissas in every binade of FP32."""
    generator = torch.Generator().manual_seed(6)
    mantissas = torch.randint(0, 2**23, (255, 64), generator=generator)
    mantissas[:, :4] = torch.tensor([0, 1, 2**23 - 1, 2**22 + 1])
    patterns = (torch.arange(255).unsqueeze(1) << 23) | mantissas
    x = torch.cat((boundaries(fmt), from_patterns(patterns.flatten().numpy())))
    return torch.cat((x, -x))


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_decode_is_exact_and_near(fmt: Format) -> None:
    """No rounding in ``hi + lo``, and what is lost is at most half an ulp of ``lo``."""
    x = fp32_values(fmt)
    x = x[x.isfinite() & (x.abs() < 2.0**128 - 2.0**111)]
    hi, lo = expansion.encode(x, fmt)
    joined = expansion.decode(hi, lo)
    assert joined.dtype == torch.float32
    # Both components are multiples of the ulp of x, so their sum and differences fit FP64.
    assert torch.equal(joined.double(), hi.double() + lo.double())
    inside = x.abs() <= fmt.max
    error = (joined.double() - x.double()).abs()
    assert (error <= fmt.ulp(lo.double()) / 2)[inside].all()
    assert (lo.double().abs() <= fmt.ulp(hi.double()) / 2)[inside].all()
    assert (error > 0)[inside].any()


def test_decode_beyond_fp32() -> None:
    """Next to FP32's largest value, a BF16 expansion rounds up to 2**128."""
    x = fp32([2.0**128 - 2.0**111])
    assert [v.item() for v in expansion.encode(x, BF16)] == [BF16.max, 2.0**120]
    assert expansion.decode(*expansion.encode(x, BF16)).item() == INF
    below = torch.nextafter(x, fp32([0.0]))
    assert expansion.decode(*expansion.encode(below, BF16)).item() == 2.0**128 - 2.0**112


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_an_expansion_encodes_to_itself(fmt: Format) -> None:
    """Once encoded, decoding and encoding again changes nothing."""
    x = fp32_values(fmt)
    x = x[x.abs() <= fmt.max]
    hi, lo = expansion.encode(x, fmt)
    once = expansion.decode(hi, lo)
    again = expansion.decode(*expansion.encode(once, fmt))
    assert torch.equal(again, once)


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_encode_specials(fmt: Format) -> None:
    hi, lo = expansion.encode(fp32([INF, -INF, NAN, 0.0, -0.0]), fmt)
    infinity = INF if fmt.has_infinity else NAN
    assert_same_bits(hi, fp32([infinity, -infinity, NAN, 0.0, -0.0]))
    assert_same_bits(lo, fp32([0.0] * 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_encode_takes_fp32_and_fp64(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"x has dtype {dtype}"):
        expansion.encode(torch.ones(3, dtype=dtype), BF16)


def test_decode_takes_stored_components() -> None:
    hi, lo = expansion.encode(fp32([0.1, 3.7]), BF16)
    assert_same_bits(expansion.decode(hi.bfloat16(), lo.bfloat16()), expansion.decode(hi, lo))


# Table 1 of Collage ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beta", "hi", "printed_hi", "printed_lo"),
    [
        (0.999, 1.0, "1.0000", "-0.0010"),
        # The paper prints (0.9893, 0.0017), whose sum is not 0.99: the nearest BF16 is 0.9883.
        (0.99, 0.98828125, "0.9883", "0.0017"),
        (0.95, 0.94921875, "0.9492", "0.0008"),
    ],
)
@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_table_1(
    beta: float, hi: float, printed_hi: str, printed_lo: str, default: torch.dtype
) -> None:
    """Expansions of beta2 in BF16, whatever the default dtype."""
    with default_dtype(default):
        components = expansion.encode(torch.tensor([beta], dtype=torch.float64), BF16)
        decoded = expansion.decode(*components).item()
    assert [v.dtype for v in components] == [torch.float32] * 2
    high, low = (v.item() for v in components)
    assert high == hi
    assert low == strict(BF16).round(float(Fraction(beta) - Fraction(hi)))
    assert (f"{high:.4f}", f"{low:.4f}") == (printed_hi, printed_lo)
    assert abs(decoded - beta) < 2.0**-18


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_the_default_dtype_does_not_matter(name: str, dtype: torch.dtype) -> None:
    operands = related_operands(BF16, operands_of(name), 200, seed=7)
    expected = getattr(expansion, name)(*operands, BF16)
    with default_dtype(dtype):
        ours = getattr(expansion, name)(*operands, BF16)
    pairs = zip(ours, expected, strict=True) if isinstance(ours, tuple) else [(ours, expected)]
    for one, other in pairs:
        assert_same_bits(one, other)


def test_shapes_are_kept() -> None:
    a, b = (o.view(10, 20) for o in related_operands(E4M3, 2, 200, seed=8))
    for name in TWO_OPERANDS:
        whole = getattr(expansion, name)(a.t(), b.t(), E4M3)
        flat = getattr(expansion, name)(a.flatten(), b.flatten(), E4M3)
        pairs = zip(whole, flat, strict=True) if isinstance(whole, tuple) else [(whole, flat)]
        for one, other in pairs:
            assert_same_bits(one, other.view(10, 20).t())


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=str)
def test_a_cancelled_sum_is_a_positive_zero(fmt: Format) -> None:
    x = all_codes(fmt)
    x = x[x.isfinite()]
    assert_same_bits(expansion.sub(x, x, fmt), torch.zeros_like(x))

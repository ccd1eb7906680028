import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subulp.numerics import BF16, E5M2, FP16, Format, extra_bits, round_to
from tests.numerics.support import (
    FP32_MAX,
    INF,
    NAN,
    all_codes,
    assert_same_bits,
    boundaries,
    default_dtype,
    fp32,
    from_patterns,
    grid_of,
)
from tests.numerics.test_stochastic_rounding import (
    BF16_PATTERNS,
    EDGE_PATTERNS,
    all_16_bit_patterns,
    random_bits,
)
from tests.oracles import extra_bits as oracle

WIDTHS = range(1, 17)
CODINGS = ("nearest", "truncate", "stochastic")


def check_split(x: Tensor, fmt: Format, k: int, coding: str, bits: Tensor | None = None) -> None:
    """``split`` and ``join`` against the oracle, at zero tolerance."""
    head, tail = extra_bits.split(x, fmt, k, coding, bits=bits)
    patterns = [None] * x.numel() if bits is None else bits.tolist()
    grid = grid_of(fmt)
    pairs = zip(x.tolist(), patterns, strict=True)
    expected = [oracle.split(v, grid, k, coding, b) for v, b in pairs]
    assert_same_bits(head, fp32([h for h, _ in expected]))
    assert tail.dtype == torch.int32
    assert tail.tolist() == [t for _, t in expected]

    joined = extra_bits.join(head, tail, fmt, k, coding)
    assert torch.equal(joined.signbit()[~x.isnan()], x.signbit()[~x.isnan()])
    finite = head.isfinite()
    assert_same_bits(joined[~finite], head[~finite])
    exact = [oracle.join(h, t, grid, k, coding) for h, t in expected if math.isfinite(h)]
    # Only where a value saturates can FP32 lack the last step; all others are exact.
    assert_same_bits(joined[finite].abs(), fp32([float(abs(v)) for v in exact]))
    for value, joined_value, joined_exact in zip(
        x[finite].tolist(), joined[finite].tolist(), exact, strict=True
    ):
        assert abs(value) > fmt.max or Fraction(joined_value) == joined_exact


def interesting(fmt: Format) -> Tensor:
    """Some of every kind: rounding boundaries near zero, one and the largest value, any pattern."""
    edges = boundaries(fmt)
    near = [0.0, fmt.smallest_subnormal, fmt.smallest_normal, 1.0, fmt.max]
    keep = torch.zeros(edges.shape, dtype=torch.bool)
    for value in near:
        ulp = fmt.ulp(fp32(value)).item()
        keep |= (edges.abs() - value).abs() <= ulp
    uniform = from_patterns(random_bits((150,), 1).numpy())
    # Uniform patterns are mostly out of FP16's range; these are mostly in it.
    scaled = fp32([1.0]).new_tensor(2.0) ** torch.arange(-30.0, 17.0)
    inside = scaled * (1 + random_bits(scaled.shape, 2) / 2**32).float()
    return torch.cat((edges[keep], uniform, inside, -inside, fp32([INF, -INF, NAN, FP32_MAX])))


@pytest.mark.parametrize("coding", ["nearest", "truncate"])
@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_without_bits_as_defined(fmt: Format, k: int, coding: str) -> None:
    check_split(interesting(fmt), fmt, k, coding)


@pytest.mark.parametrize("coding", ["nearest", "stochastic"])
@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_with_bits_as_defined(fmt: Format, k: int, coding: str) -> None:
    x = interesting(fmt)
    check_split(x, fmt, k, coding, random_bits(x.shape, k))
    some = x[:: len(EDGE_PATTERNS)]
    for pattern in EDGE_PATTERNS:
        check_split(some, fmt, k, coding, torch.full(some.shape, pattern))


PATTERNS = st.integers(0, 2**32 - 1)


@settings(max_examples=300)
@given(
    cases=st.lists(st.tuples(PATTERNS, PATTERNS), min_size=1, max_size=10),
    fmt=st.sampled_from((BF16, FP16, E5M2)),
    k=st.integers(1, 16),
    coding=st.sampled_from(CODINGS),
    random=st.booleans(),
)
def test_any_value_as_defined(
    cases: list[tuple[int, int]], fmt: Format, k: int, coding: str, random: bool
) -> None:
    x = from_patterns([pattern for pattern, _ in cases])
    drawn = coding == "stochastic" or (coding == "nearest" and random)
    check_split(x, fmt, k, coding, torch.tensor([b for _, b in cases]) if drawn else None)


@pytest.mark.parametrize("k", WIDTHS)
def test_tails_fit_their_width(k: int) -> None:
    for fmt in (BF16, FP16):
        x = interesting(fmt)
        bits = random_bits(x.shape, 0)
        for coding, given_bits in (("nearest", None), ("truncate", None), ("stochastic", bits)):
            width = extra_bits.tail_width(k, coding)
            assert width == k + (coding == "stochastic")
            tail = extra_bits.split(x, fmt, k, coding, bits=given_bits)[1]
            assert tail.min() >= 0
            assert 2 ** (width - 1) <= tail.max() < 2**width


# The ranges that are exact -----------------------------------------------------------------------


def assert_round_trip(x: Tensor, fmt: Format, k: int) -> None:
    head, tail = extra_bits.split(x, fmt, k, "truncate")
    assert_same_bits(head, round_to(x, fmt, "toward-zero"))
    assert_same_bits(extra_bits.join(head, tail, fmt, k, "truncate"), x)
    # Beyond half a step above the largest head the nearest coding saturates.
    inside = x[x.abs().double() < fmt.max + fmt.ulp(fp32([fmt.max])).double() / 2]
    assert len(inside) > 0.9 * len(x)
    for pattern in (None, 0, 2**32 - 1):
        bits = random_bits(x.shape, 0) if pattern is None else torch.full(x.shape, pattern)
        head, tail = extra_bits.split(x, fmt, k, "stochastic", bits=bits)
        assert_same_bits(extra_bits.join(head, tail, fmt, k, "stochastic"), x)
        bits = bits[: len(inside)]
        for given_bits in (None, bits):
            head, tail = extra_bits.split(inside, fmt, k, bits=given_bits)
            assert_same_bits(extra_bits.join(head, tail, fmt, k), inside)


def test_bf16_and_16_bits_hold_every_fp32_value() -> None:
    """Every code of BF16, subnormals included, with 16 dropped halves each."""
    halves = torch.tensor([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    halves = torch.cat((halves, random_bits((8,), 0) >> 16))
    patterns = (torch.arange(2**16) << 16).unsqueeze(1) | halves
    x = from_patterns(patterns.flatten().numpy())
    x = x[x.isfinite()]
    assert x.abs().max() == FP32_MAX
    assert x.abs()[x != 0].min() == 2.0**-149
    assert_round_trip(x, BF16, 16)


def test_fp16_and_13_bits_hold_every_fp32_value_in_the_normal_range() -> None:
    """Every normal code of FP16 with 16 of the 2**13 dropped parts, and some codes with all."""
    codes = all_codes(FP16)
    codes = codes[codes.isfinite() & (codes.abs() >= FP16.smallest_normal)]
    parts = torch.tensor([0, 1, 2, 0xFFF, 0x1000, 0x1001, 0x1FFE, 0x1FFF])
    parts = torch.cat((parts, random_bits((8,), 0) >> 19))
    x = (codes.view(torch.int32).unsqueeze(1) | parts.int()).view(torch.float32).flatten()
    assert_round_trip(x, FP16, 13)
    every_part = torch.arange(2**13, dtype=torch.int32)
    x = (codes[::4001].view(torch.int32).unsqueeze(1) | every_part).view(torch.float32).flatten()
    assert_round_trip(x, FP16, 13)


@pytest.mark.parametrize("k", [1, 8, 13, 16])
def test_fp16_below_the_normal_range_is_a_fixed_point_grid(k: int) -> None:
    """Steps of 2**-(24 + k), whatever the magnitude; finer bits are cut."""
    step = 2.0 ** -(24 + k)
    x = 2.0 ** -torch.arange(14.0, 50.0) * (1 + random_bits((36,), k) / 2**32).float()
    x = torch.cat((x, -x, fp32([step, step * 0.75, 1e-45])))
    x = x[x.abs() < FP16.smallest_normal]
    for coding, rounded in (("truncate", torch.floor), ("nearest", torch.round)):
        head, tail = extra_bits.split(x, FP16, k, coding)
        expected = torch.copysign(rounded(x.double().abs() / step) * step, x.double()).float()
        assert_same_bits(extra_bits.join(head, tail, FP16, k, coding), expected)
        assert (expected != x).any()


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("k", [1, 8, 13, 14, 16])
def test_fp16_beyond_the_largest_head_saturates_at_the_last_step(k: int, coding: str) -> None:
    # The head nearest to a value is half a step of the grid away from it at most.
    beyond = 16 if coding == "nearest" else 32
    last = 65504 + beyond - 32 * 2.0**-k
    x = fp32([last, 65504.0 + beyond, 1e30, FP32_MAX])
    x = torch.cat((x, -x))
    for pattern in {"nearest": (None, 0, 2**32 - 1), "truncate": (None,)}.get(
        coding, (0, 2**32 - 1)
    ):
        bits = None if pattern is None else torch.full(x.shape, pattern)
        head, tail = extra_bits.split(x, FP16, k, coding, bits=bits)
        assert_same_bits(head, torch.copysign(fp32(65504.0), x))
        assert (tail == beyond * 2**k // 32 - 1).all()
        joined = extra_bits.join(head, tail, FP16, k, coding)
        # FP32 has the last step for up to 13 extra bits; with more, its nearest is the next number.
        assert_same_bits(joined, torch.copysign(fp32(last if k <= 13 else 65504.0 + beyond), x))
        again = extra_bits.split(joined, FP16, k, "truncate" if coding == "stochastic" else coding)
        assert_same_bits(again[0], head)
        assert torch.equal(again[1], tail)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_infinities_nan_and_zeros_have_no_tail(fmt: Format, coding: str) -> None:
    x = fp32([INF, -INF, NAN, 0.0, -0.0])
    bits = None if coding == "truncate" else torch.full(x.shape, 2**32 - 1)
    head, tail = extra_bits.split(x, fmt, 8, coding, bits=bits)
    assert_same_bits(head, x)
    assert tail.tolist() == [0] * 5
    assert_same_bits(extra_bits.join(head, tail, fmt, 8, coding), x)


@pytest.mark.parametrize("k", [1, 8, 16])
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_any_tail_beside_any_head_is_a_number(fmt: Format, coding: str, k: int) -> None:
    """Also one that no split makes, for somebody has overwritten the head."""
    heads = all_codes(fmt)[::7]
    for tail in (0, 1, 2 ** (k - 1), 2 ** extra_bits.tail_width(k, coding) - 1):
        joined = extra_bits.join(
            heads, torch.full_like(heads, tail, dtype=torch.int32), fmt, k, coding
        )
        assert torch.equal(joined.isfinite(), heads.isfinite())
        assert torch.equal(joined.signbit()[~heads.isnan()], heads.signbit()[~heads.isnan()])


def test_the_nearest_coding_halves_the_error_of_the_head() -> None:
    """The head is the nearest 16-bit number of what is kept; the paper's is half an ulp short."""
    x = 1 + random_bits((1000,), 3).double().div(2**32).float()
    for k in (1, 8, 16):
        head, tail = extra_bits.split(x, BF16, k)
        assert (extra_bits.join(head, tail, BF16, k) - x).abs().max() <= 2.0 ** -(8 + k)
        assert (head - x).abs().max() <= 2.0**-8 + 2.0 ** -(8 + k)
        cut = extra_bits.split(x, BF16, k, "truncate")[0]
        assert (cut - x).abs().max() > 1.9 * 2.0**-8


def test_join_takes_heads_in_their_own_dtype() -> None:
    for fmt in (BF16, FP16):
        head, tail = extra_bits.split(interesting(fmt), fmt, 8)
        narrow = head.to(fmt.dtype)
        assert_same_bits(extra_bits.join(narrow, tail, fmt, 8), extra_bits.join(head, tail, fmt, 8))


def test_a_negative_value_below_the_smallest_head_keeps_its_sign() -> None:
    x = fp32([-1.5 * 2.0**-26])
    for coding in ("nearest", "truncate"):
        head, tail = extra_bits.split(x, FP16, 8, coding)
        assert_same_bits(head, fp32([-0.0]))
        assert_same_bits(extra_bits.join(head, tail, FP16, 8, coding), x)


# Stochastic rounding over all bits ---------------------------------------------------------------


def exact_mean(y: Tensor) -> Fraction:
    values, counts = y.double().unique(return_counts=True)
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return sum(Fraction(v) * n for v, n in pairs) / y.numel()


@pytest.mark.parametrize("k", [1, 3, 8, 15, 16])
def test_bf16_heads_and_joined_values_are_unbiased(k: int) -> None:
    """Over all 2**16 patterns of a 16-bit draw: both means are the value itself."""
    for pattern in BF16_PATTERNS:
        for sign in (0, 0x80000000):
            value = from_patterns([pattern | sign])
            x = value.expand(2**16)
            head, tail = extra_bits.split(x, BF16, k, "stochastic", bits=all_16_bit_patterns())
            assert exact_mean(head) == Fraction(value.item())
            joined = extra_bits.join(head, tail, BF16, k, "stochastic")
            assert exact_mean(joined) == Fraction(value.item())
            if k == 16:
                assert_same_bits(joined, x)
            head, tail = extra_bits.split(x, BF16, k, bits=all_16_bit_patterns())
            if head.abs().max() < BF16.max:
                joined = extra_bits.join(head, tail, BF16, k)
                assert exact_mean(joined) == Fraction(value.item())


@pytest.mark.parametrize("k", [1, 5, 8])
def test_fp16_heads_and_joined_values_are_unbiased(k: int) -> None:
    """Every point drops at most 13 bits, so the patterns of the top 16 are all that matter."""
    grid = grid_of(FP16)
    for code in (0, 1, 130, 1023, 1024, 2047, 15360, 31742):
        low, high = grid.value(code), grid.value(code + 1)
        for part in (Fraction(0), Fraction(1, 2**13), Fraction(2**13 - 1, 2**13), Fraction(5, 8)):
            exact = low + (high - low) * part
            x = fp32(float(exact)).expand(2**16)
            assert Fraction(x[0].item()) == exact
            head, tail = extra_bits.split(x, FP16, k, "stochastic", bits=all_16_bit_patterns())
            assert set(head.tolist()) <= {float(low), float(high)}
            assert exact_mean(head) == exact
            assert exact_mean(extra_bits.join(head, tail, FP16, k, "stochastic")) == exact


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_un_rounding_forgets_the_rounding_of_the_head(fmt: Format, k: int) -> None:
    """The bits that round the head leave no trace in the joined value."""
    x = interesting(fmt)
    low = random_bits(x.shape, k) & ((1 << (32 - k)) - 1)
    kept, moved = None, False
    for top in {0, 1, 2 ** (k - 1), 2**k - 1}:
        bits = low | (top << (32 - k))
        head, tail = extra_bits.split(x, fmt, k, "stochastic", bits=bits)
        moved |= bool((tail >> k).any())
        joined = extra_bits.join(head, tail, fmt, k, "stochastic")
        kept = joined if kept is None else kept
        assert_same_bits(joined, kept)
    assert moved


def test_a_head_on_the_grid_never_moves() -> None:
    for fmt in (BF16, FP16):
        x = all_codes(fmt)
        for k in (1, 8, 16):
            for bits in (random_bits(x.shape, k), torch.full(x.shape, 2**32 - 1)):
                head, tail = extra_bits.split(x, fmt, k, "stochastic", bits=bits)
                assert_same_bits(head, x)
                assert not tail.any()


# Packing -----------------------------------------------------------------------------------------

COUNTS = (0, 1, 31, 32, 33, 100)


@pytest.mark.parametrize("width", range(1, 18))
def test_pack_as_a_bit_string(width: int) -> None:
    for count in COUNTS:
        random = random_bits((count,), count).to(torch.int64) >> (32 - width)
        for tail in (random, torch.full((count,), 2**width - 1), torch.arange(count) % 2**width):
            words = extra_bits.pack(tail.int(), width)
            assert words.dtype == torch.int32
            assert words.tolist() == oracle.pack(tail.tolist(), width)
            assert words.numel() == extra_bits.packed_words(count, width)
            unpacked = extra_bits.unpack(words, count, width)
            assert unpacked.dtype == torch.int32
            assert unpacked.tolist() == tail.tolist()


def test_groups_of_32_take_as_many_words_as_bits() -> None:
    for width in range(1, 18):
        sizes = [extra_bits.packed_words(count, width) for count in COUNTS]
        assert sizes == [0, width, width, width, 2 * width, 4 * width]


def test_packing_flattens() -> None:
    tail = torch.arange(96, dtype=torch.int32).view(4, 24)
    assert torch.equal(extra_bits.pack(tail, 7), extra_bits.pack(tail.flatten(), 7))
    assert torch.equal(extra_bits.pack(tail.t(), 7), extra_bits.pack(tail.t().flatten(), 7))


def test_unpack_ignores_what_follows_the_last_value() -> None:
    words = torch.full((5,), -1, dtype=torch.int32)
    assert extra_bits.unpack(words, 3, 5).tolist() == [31, 31, 31]


@pytest.mark.parametrize(("count", "length"), [(0, 1), (1, 0), (32, 9), (33, 5), (33, 11)])
def test_unpack_of_the_wrong_length(count: int, length: int) -> None:
    with pytest.raises(
        ValueError, match=rf"words has {length} entries.*\b{count} values of 5 bits"
    ):
        extra_bits.unpack(torch.zeros(length, dtype=torch.int32), count, 5)


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [-1, 0, 17, 32])
def test_extra_bits_out_of_range(k: int) -> None:
    x = torch.ones(3)
    for call in (
        lambda: extra_bits.split(x, BF16, k),
        lambda: extra_bits.join(x, x.int(), BF16, k),
        lambda: extra_bits.tail_width(k, "truncate"),
    ):
        with pytest.raises(ValueError, match=f"k={k}"):
            call()


@pytest.mark.parametrize("coding", ["deterministic", "", None])
def test_unknown_coding(coding: str) -> None:
    x = torch.ones(3)
    for call in (
        lambda: extra_bits.split(x, BF16, 8, coding),
        lambda: extra_bits.join(x, x.int(), BF16, 8, coding),
        lambda: extra_bits.tail_width(8, coding),
    ):
        with pytest.raises(ValueError, match=f"coding={coding!r}"):
            call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_only_fp32_is_split(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"x has dtype {dtype}"):
        extra_bits.split(torch.ones(3, dtype=dtype), BF16, 8)


def test_bits_missing_superfluous_or_wrong() -> None:
    x, bits = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs bits"):
        extra_bits.split(x, BF16, 8, "stochastic")
    with pytest.raises(ValueError, match="bits are given"):
        extra_bits.split(x, BF16, 8, "truncate", bits=bits)
    with pytest.raises(ValueError, match="bits have shape"):
        extra_bits.split(x, BF16, 8, "stochastic", bits=bits[:2])
    with pytest.raises(ValueError, match=r"bits have dtype torch\.int32"):
        extra_bits.split(x, BF16, 8, "stochastic", bits=bits.int())


def test_uint32_and_int64_bits_are_the_same() -> None:
    x = interesting(BF16)
    bits = random_bits(x.shape, 0)
    wide = extra_bits.split(x, BF16, 8, "stochastic", bits=bits)
    narrow = extra_bits.split(x, BF16, 8, "stochastic", bits=bits.to(torch.uint32))
    assert_same_bits(wide[0], narrow[0])
    assert torch.equal(wide[1], narrow[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    x = interesting(FP16)
    head, tail = extra_bits.split(x, FP16, 8)
    joined = extra_bits.join(head, tail, FP16, 8)
    with default_dtype(dtype):
        again = extra_bits.split(x, FP16, 8)
        assert_same_bits(again[0], head)
        assert torch.equal(again[1], tail)
        assert_same_bits(extra_bits.join(head, tail, FP16, 8), joined)

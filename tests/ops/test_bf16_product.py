"""Products of BF16 operands: exact rationals for their sequence, float64 for their size."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subulp.numerics import BF16, format_of, round_to
from subulp.ops import bf16_product, facts, native
from subulp.ops.bf16_product import Blocks, bf16_mm

from .support import BF16 as BF16_DTYPE
from .support import DTYPES, E4M3, E5M2, FP16, FP32, environment, isas, short, threads

TILES = [name for name in isas() if name.endswith(("amx", "amx-bf16"))]
"""Instruction sets that sum in the order of AMX's tiles."""
PAIRS = [name for name in isas() if name not in (*bf16_product.UNITS, *TILES)]
"""Those that sum in pairs, in our order; that of the units of AVX-512 is the processor's."""


def matrix(rows, columns, dtype=FP32, *, transposed=False, seed=0):
    generator = torch.Generator().manual_seed(seed + 31 * rows + columns)
    shape = (columns, rows) if transposed else (rows, columns)
    x = (torch.randn(shape, generator=generator) * 0.3).to(dtype)
    return x.t() if transposed else x


def rounded(x):
    return round_to(x.float(), BF16)


def bits(x):
    return x.contiguous().view(torch.int32)


def exact(a, b, isa):
    """The documented sequence, each step an exact rational rounded once to FP32."""
    out = torch.zeros(a.shape[0], b.shape[1])
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            terms = [
                Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[:, j], strict=True)
            ]
            out[i, j] = float((of_tiles if isa in TILES else of_pairs)(terms))
    return out


def of_pairs(terms):
    order = [k for pair in range(0, len(terms), 2) for k in (pair + 1, pair) if k < len(terms)]
    return added(terms[k] for k in order)


def of_tiles(terms):
    """32 at a time: even ones, odd ones, both, to what was there."""
    total = np.float32(0)
    for first in range(0, len(terms), 32):
        evens, odds = (added(terms[first + place : first + 32 : 2]) for place in (0, 1))
        total = added((total, added((evens, odds))))
    return total


def added(terms):
    total = np.float32(0)
    for term in terms:
        total = nearest(
            Fraction(float(total)) + (term if isinstance(term, Fraction) else Fraction(float(term)))
        )
    return total


def nearest(x: Fraction) -> np.float32:
    """FP32 nearest to a rational of moderate size, ties to even."""
    guess = np.float32(float(x))
    near = [np.nextafter(guess, np.float32(s)) for s in (-np.inf, np.inf)]

    def distance(y):
        return abs(Fraction(float(y)) - x), int(y.view(np.uint32)) & 1

    return min((guess, *near), key=distance)


@pytest.mark.parametrize("isa", [*PAIRS, *TILES])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 3, 2), (3, 5, 7), (7, 9, 12), (2, 2, 33), (3, 2, 100)], ids=str
)
def test_the_sequence_is_the_documented_one(shape, isa):
    m, n, k = shape
    a, b = matrix(m, k), matrix(k, n, seed=1)
    with environment(SUBULP_ISA=isa):
        assert torch.equal(bits(bf16_mm(a, b)), bits(exact(rounded(a), rounded(b), isa)))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 140),
    st.integers(0, 150),
    st.integers(0, 600),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
)
def test_neither_blocks_nor_threads_nor_instruction_sets_show(m, n, k, of_a, of_b, first, second):
    a = matrix(m, k, of_a, transposed=first)
    b = matrix(k, n, of_b, transposed=second, seed=1)
    # The order of the units of AVX-512 is its own, and of theirs alone.
    units = [isa for isa in isas() if isa not in (*PAIRS, *TILES)]
    for alike in (PAIRS, TILES, units):
        results = []
        for isa in alike:
            for count in (1, 3):
                with environment(SUBULP_ISA=isa), threads(count):
                    results.append(bits(bf16_mm(a, b)))
        # One sum at a time: the only block there is.
        one = torch.zeros(m, n)
        with environment(SUBULP_ISA=alike[0] if alike else "plain"):
            for j in range(0, n, 37):
                one[:, j : j + 1] = bf16_mm(a, b[:, j : j + 1])
        for found in results:
            assert torch.equal(found, results[0])
            assert torch.equal(found[:, ::37], bits(one)[:, ::37])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("shape", [(128, 768, 1365), (200, 33, 4096), (1, 500, 2000)], ids=str)
def test_the_error_is_at_most_that_of_a_plain_fp32_product(shape, isa):
    m, n, k = shape
    a, b = matrix(m, k), matrix(k, n, E4M3, seed=1)
    left, right = rounded(a), b.float()
    expected = left.double() @ right.double()
    naive = torch.zeros(m, n)
    for i in range(k):
        naive += left[:, i : i + 1] * right[i]
    with environment(SUBULP_ISA=isa):
        error = (bf16_mm(a, b) - expected).abs().max()
    assert error <= (naive - expected).abs().max() + 1e-6 * expected.abs().max()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_operands_are_decoded_scaled_and_rounded(dtype, backend):
    a, b = matrix(9, 40, dtype), matrix(40, 11, dtype, seed=1)
    expected = rounded(a.float() * 0.25).double() @ rounded(b.float() * 8).double()
    with environment(SUBULP_BACKEND=backend):
        found = bf16_mm(a, b, a_scale=0.25, b_scale=8.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    if format_of(dtype).mantissa_bits <= BF16.mantissa_bits:
        whole = a.double() @ b.double() * 2
        torch.testing.assert_close(found.double(), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("isa", isas())
def test_special_numbers(isa):
    large, tiny = torch.finfo(FP32).max, 2.0**-130
    one = torch.ones(1, 1)
    with environment(SUBULP_ISA=isa):

        def product(*pairs):
            left, right = zip(*pairs, strict=True)
            return bf16_mm(torch.tensor([left]), torch.tensor([right]).t()).item()

        # Rounded to BF16, the largest number saturates instead of becoming infinite.
        assert product((large, 1.0)) == torch.finfo(BF16_DTYPE).max
        assert product((float("inf"), 2.0)) == float("inf")
        assert np.isnan(product((float("inf"), 0.0)))
        assert np.isnan(product((float("nan"), 1.0), (1.0, 1.0)))
        # Subnormal operands count as zero, whatever mode the caller has set.
        assert product((tiny, 2.0**100), (3.0, 1.0)) == 3.0
        # A sum begins at zero.
        assert str(product((-0.0, 1.0))) == "0.0"
        assert bf16_mm(one * (1 + 2.0**-8), one).item() == 1.0
        assert bf16_mm(one * (1 + 3 * 2.0**-8), one).item() == 1 + 2.0**-6


def test_views_and_results_in_place():
    whole = matrix(40, 64)
    a, b = whole[3:20, 5:40], matrix(64, 90, seed=1).t()[7:80:2, 10:45].t()
    room = torch.full((30, 64), 7.0)
    out = room[2:19, 1 : 1 + b.shape[1]]
    assert bf16_mm(a, b, out).data_ptr() == out.data_ptr()
    assert torch.equal(bits(out), bits(bf16_mm(a.contiguous(), b.contiguous())))
    out.fill_(7.0)
    assert bool((room == 7.0).all())
    # No dimension is contiguous: read from a copy.
    sparse = matrix(20, 30)[::2, ::3]
    assert torch.equal(bf16_mm(sparse, sparse.t()), bf16_mm(sparse.clone(), sparse.clone().t()))
    expanded = torch.ones(1, 5).expand(4, 5)
    assert torch.equal(bf16_mm(expanded, expanded.t()), torch.full((4, 4), 5.0))


def test_what_is_no_matrix_of_numbers_is_refused():
    a, b = matrix(3, 4), matrix(4, 5)
    strided = torch.zeros(5, 3).t()
    short_storage = torch.zeros(12)
    short_storage.untyped_storage().resize_(8)
    for arguments, message in (
        ((a[0], b), "a has shape \\(4,\\)"),
        ((a, b[:3]), "a is \\(3, 4\\) and b \\(3, 5\\)"),
        ((a.int(), b), "int32 is not a format"),
        ((a, b.double()), "float64 is not a format"),
        (
            (a, b, torch.zeros(3, 4)),
            "out is torch.float32 of \\(3, 4\\): expected FP32 or BF16 \\(3, 5\\)",
        ),
        ((a, b, torch.zeros(3, 5, dtype=FP16)), "out is torch.float16"),
        ((a, b, strided), "out has strides \\(1, 3\\): expected contiguous rows"),
        ((a, b.to("meta")), "b lies on meta and a on cpu"),
        ((short_storage.view(3, 4), b), "reaches beyond its storage of 8 bytes"),
        ((a.to_sparse(), b), "layout torch.sparse_coo"),
        ((torch._neg_view(a), b), "negated view"),
    ):
        with pytest.raises(ValueError, match=message):
            bf16_mm(*arguments)
    with pytest.raises(TypeError, match="a is a list"):
        bf16_mm([[1.0]], b)


def test_units_are_those_of_the_instruction_set_in_use(monkeypatch):
    cpu = torch.device("cpu")
    assert bf16_product.units_at(cpu) == bool({*bf16_product.UNITS} & {*isas()})
    assert not bf16_product.units_at(torch.device("cuda", 0))
    with environment(SUBULP_ISA="plain"):
        assert not bf16_product.units_at(cpu)
    for name in bf16_product.UNITS:
        monkeypatch.setattr(native, "isa", lambda name=name: facts.ISAS[name])
        assert bf16_product.units_at(cpu)
    with environment(SUBULP_BACKEND="reference"):
        assert not bf16_product.units_at(cpu)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(
    "shape", [(1, 33, 300), (3, 1, 7), (40, 50, 0), (130, 100, 520), (9, 1600, 40)], ids=str
)
@pytest.mark.parametrize("transposed", [False, True])
def test_results_are_scaled_and_biased_in_fp32_and_rounded_once(shape, transposed, isa, backend):
    m, n, k = shape
    a, b = matrix(m, k), matrix(k, n, E4M3, transposed=transposed, seed=1)
    bias = torch.linspace(-3, 5, n)
    with environment(SUBULP_ISA=isa, SUBULP_BACKEND=backend), threads(2):
        sums = bf16_mm(a, b)
        expected = sums * 0.3
        found = bf16_mm(a, b, out_scale=0.3)
        assert torch.equal(bits(found), bits(expected))
        expected += bias
        assert torch.equal(bits(bf16_mm(a, b, out_scale=0.3, bias=bias)), bits(expected))
        room = torch.full((m, n + 5), 7.0, dtype=BF16_DTYPE)
        narrow = bf16_mm(a, b, room[:, 2 : n + 2], out_scale=0.3, bias=bias)
        assert torch.equal(narrow, expected.to(BF16_DTYPE))
        assert bool((room[:, :2] == 7.0).all())
        assert bool((room[:, n + 2 :] == 7.0).all())


@pytest.mark.parametrize("isa", isas())
def test_what_is_too_large_for_bf16_becomes_infinite_as_in_torch(isa):
    large = torch.full((2, 2), 2.0**64)
    out = torch.empty(2, 2, dtype=BF16_DTYPE)
    with environment(SUBULP_ISA=isa):
        bf16_mm(large, large * 0.7, out)
        assert torch.equal(out, (large @ (large * 0.7)).to(BF16_DTYPE))
        assert bool(bf16_mm(torch.full((2, 2), float("nan")), large, out).isnan().all())


def test_a_bias_that_does_not_fit_is_refused():
    a, b = matrix(3, 4), matrix(4, 5)
    for bias in (torch.zeros(4), torch.zeros(5, dtype=FP16), torch.zeros(1, 5)):
        with pytest.raises(ValueError, match=r"bias is torch.float.*expected FP32 \(5,\)"):
            bf16_mm(a, b, bias=bias)
    sparse = torch.arange(10.0)[::2]
    assert torch.equal(bf16_mm(a, b, bias=sparse), bf16_mm(a, b) + sparse)


def in_blocks(lines, inner, size, *, types, transposed, seed=0):
    """A factor in blocks of such a size, its blocks, and its numbers, decoded block by block."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (lines, inner), dtype=torch.uint8, generator=generator)
    # E4M3 has one NaN of each sign, E5M2 three and infinity.
    codes[(codes & 0x7C) == 0x7C] = 0x38
    grid = -(-lines // size[0]), -(-inner // size[1])
    exponents = torch.randint(-20, 21, grid, dtype=torch.int8, generator=generator)
    kinds = torch.randint(0, 2, grid, dtype=torch.uint8, generator=generator) if types else None
    numbers = torch.empty(lines, inner)
    for i in range(grid[0]):
        for j in range(grid[1]):
            here = (
                slice(i * size[0], (i + 1) * size[0]),
                slice(j * size[1], (j + 1) * size[1]),
            )
            kind = E5M2 if types and kinds[i, j] else E4M3
            numbers[here] = codes[here].view(kind).float() * 2.0 ** -int(exponents[i, j])
    stored = codes.view(E4M3)
    blocks = Blocks(exponents, kinds, *size)
    return (stored.t() if transposed else stored), blocks, numbers.t() if transposed else numbers


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("types", [False, True], ids=["e4m3", "both"])
@pytest.mark.parametrize("first", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("second", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((130, 50, 300), (128, 128)),
        ((2, 3, 2), (32, 32)),
        ((200, 161, 520), (64, 32)),
        ((57, 1600, 33), (32, 96)),
    ],
    ids=str,
)
def test_blocks_are_decoded_while_they_are_packed(
    shape, size, first, second, types, isa, monkeypatch
):
    m, n, k = shape
    a, of_a, left = in_blocks(
        *((k, m) if first else (m, k)), size, types=types, transposed=first, seed=1
    )
    b, of_b, right = in_blocks(
        *((n, k) if second else (k, n)), size, types=types, transposed=second, seed=2
    )
    assert torch.equal(of_a.decoded(a), left)
    assert torch.equal(of_b.decoded(b), right)
    if isa in ("plain", "plain-amx"):
        # They pack pairs as units of BF16 take them.
        monkeypatch.setattr(bf16_product, "units_at", lambda device: True)
    with environment(SUBULP_ISA=isa), threads(2):
        expected = bits(bf16_mm(left, right))
        assert torch.equal(bits(bf16_mm(a, b, a_blocks=of_a, b_blocks=of_b)), expected)
        assert torch.equal(bits(bf16_mm(left, b, b_blocks=of_b)), expected)
        with threads(1):
            assert torch.equal(bits(bf16_mm(a, right, a_blocks=of_a)), expected)


@pytest.mark.parametrize("exponent", [-126, 126])
def test_exponents_of_blocks_reach_as_far_as_normal_numbers(exponent):
    codes = torch.full((32, 64), 0x38, dtype=torch.uint8).view(E4M3)
    exponents = torch.tensor([[exponent, 0]], dtype=torch.int8)
    found = bf16_mm(codes, torch.eye(64), a_blocks=Blocks(exponents, None, 32, 32))
    assert found[0].tolist() == [2.0**-exponent] * 32 + [1.0] * 32


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_blocks_that_do_not_fit_are_refused(backend):
    a, fit = matrix(64, 64, E4M3), torch.zeros(2, 2, dtype=torch.int8)
    odd, third = fit.clone(), torch.full((2, 2), 2, dtype=torch.uint8)
    odd[1, 1] = -128
    for left, blocks, message in (
        (a.float(), Blocks(fit, None, 32, 32), "a has blocks and dtype torch.float32"),
        (a[::2, ::2], Blocks(fit, None, 32, 32), r"strides \(128, 2\): expected contiguous"),
        (a[:1], Blocks(fit, None, 32, 32), r"shape \(1, 64\).*two at least"),
        (a, Blocks(fit, None, 32, 48), "a has blocks of 32 x 48: expected multiples of 32"),
        (a, Blocks(fit, None, 64, 32), r"exponents are .* \(2, 2\) .*expected .* \(1, 2\)"),
        (a, Blocks(fit.int(), None, 32, 32), "exponents are torch.int32"),
        (a, Blocks(fit.to("meta"), None, 32, 32), "on meta: expected .* on cpu"),
        (a, Blocks(odd, None, 32, 32), "exponents are from -128 to 0: expected -126 to 126"),
        (a, Blocks(fit, third, 32, 32), "types are from 2 to 2: expected 0 to 1"),
        (a, Blocks(fit, third[:1], 32, 32), r"types are .* \(1, 2\)"),
    ):
        b = torch.zeros(left.shape[1], 5)
        with environment(SUBULP_BACKEND=backend), pytest.raises(ValueError, match=message):
            bf16_mm(left, b, a_blocks=blocks)
    fits = Blocks(fit, None, 32, 32)
    with pytest.raises(ValueError, match=r"a has blocks and another scale, 2\.0"):
        bf16_mm(a, matrix(64, 5), a_scale=2.0, a_blocks=fits)
    if bf16_product.units_at(torch.device("cpu")):
        across = Blocks(torch.zeros(2, 4, dtype=torch.int8)[:, ::2], None, 32, 32)
        with pytest.raises(ValueError, match="exponents"):
            bf16_mm(a, matrix(64, 5), a_blocks=across)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Narrow formats in Triton: decode to FP32, encode by nearest-even or from random bits.

The algorithm of :mod:`subulp.numerics.rounding` and :mod:`subulp.numerics.extra_bits`, in integers:
the casts of the hardware saturate, round and treat NaN in ways of their own; :func:`converted`
uses those that are known to the bit. Tensors hold codes
(uint32, sign included) or FP32 values; a format is the constexpr name of a
:class:`subulp.numerics.Format`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from ...numerics.formats import STORED, Format

T = TypeVar("T")


class Named(dict[str, T]):
    """What the names of constexpr arguments stand for: more of them come, none changes.

    Triton refuses a kernel where a global is no longer what it was when the kernel was compiled,
    and keeps a copy to compare. A copy of this is itself: all that a kernel has read of it stays.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Named[T]:
        return self


FORMATS = Named({f.name: f for f in STORED})
"""The formats that dtypes store, and those that :func:`name_of` has named."""


def name_of(fmt: Format) -> str:
    """The constexpr name of a format: of its own also where two formats are called alike."""
    infinity = "" if fmt.has_infinity else "fn"
    name = f"simulated-e{fmt.exponent_bits}m{fmt.mantissa_bits}{infinity}"
    if fmt in STORED:
        return fmt.name
    FORMATS[name] = fmt
    return name


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""As what kernels are given a tensor of codes, by its bytes."""


@triton.constexpr_function
def width(fmt):
    """Stored bits, the sign included."""
    return 1 + FORMATS[fmt].exponent_bits + FORMATS[fmt].mantissa_bits


@triton.constexpr_function
def is_simulated(fmt):
    """Whether no dtype stores the format, so that tensors have its numbers in FP32."""
    return FORMATS[fmt].dtype is None


@triton.constexpr_function
def random_width(fmt):
    """Random bits that one stochastic rounding draws."""
    return FORMATS[fmt].random_width


@triton.constexpr_function
def mantissa_bits(fmt):
    """Width of the mantissa field."""
    return FORMATS[fmt].mantissa_bits


@triton.constexpr_function
def is_fp32_prefix(fmt):
    """Whether codes are FP32 patterns, or their upper halves."""
    return fmt in ("fp32", "bf16")


@triton.constexpr_function
def fraction_bits(fmt):
    """Bits of a position's fraction: 32, or the 16 that are all of FP32's bits beyond BF16's."""
    return 16 if fmt == "bf16" else 32


@triton.constexpr_function
def bias(fmt):
    """Bias of the exponent field."""
    return FORMATS[fmt].bias


@triton.constexpr_function
def first_normal(fmt):
    """FP32 exponent field of the smallest normal value."""
    return FORMATS[fmt].min_exponent + 127


@triton.constexpr_function
def has_infinity(fmt):
    """Whether the format has infinities."""
    return FORMATS[fmt].has_infinity


@triton.constexpr_function
def max_code(fmt):
    """Code of the largest finite value; all magnitudes above it are infinite or NaN."""
    return FORMATS[fmt].max_code


@triton.constexpr_function
def infinity_code(fmt):
    """Code that an infinity becomes: its own, or NaN where there is none."""
    return FORMATS[fmt].max_code + 1


@triton.constexpr_function
def nan_code(fmt):
    """Code of the quiet NaN."""
    f = FORMATS[fmt]
    return f.max_code + 1 + (1 << (f.mantissa_bits - 1) if f.has_infinity else 0)


@triton.constexpr_function
def two_to(exponent):
    """A power of two as a float."""
    return 2.0**exponent


# ------------------------------------------------------------------------------- codes and values


@triton.jit
def magnitude_of(x):
    """FP32 pattern of ``|x|``."""
    return x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def value(code, fmt: tl.constexpr):
    """FP32 value of each code."""
    if is_fp32_prefix(fmt):
        bits = code << (32 - width(fmt))
    else:
        sign = (code >> (width(fmt) - 1)) << 31
        magnitude = code & ((1 << (width(fmt) - 1)) - 1)
        # The code's fields, read as FP32's, are the value times 2^(bias - 127), subnormals too.
        fields = (magnitude << (23 - mantissa_bits(fmt))).to(tl.float32, bitcast=True)
        finite = (fields * two_to(127 - bias(fmt))).to(tl.uint32, bitcast=True)
        special = finite | 0x7F800000 if has_infinity(fmt) else 0x7FC00000
        bits = tl.where(magnitude > max_code(fmt), special, finite) | sign
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def stored_value(word, fmt: tl.constexpr):
    """FP32 value of what a tensor has; of a simulated format that is an FP32 number."""
    if is_simulated(fmt):
        x = word.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        x = value(word.to(tl.uint32) & ((1 << width(fmt)) - 1), fmt)
    return x


@triton.jit
def word(code, fmt: tl.constexpr):
    """What a tensor has for each code, uint32."""
    return value(code, fmt).to(tl.uint32, bitcast=True) if is_simulated(fmt) else code


@triton.jit
def position(magnitude, fmt: tl.constexpr):
    """Where FP32 magnitudes lie on the line of codes: ``code << fraction_bits | fraction``.

    uint64; uint32 for BF16, whose line of codes is FP32's own pattern.
    """
    if fmt == "bf16":
        where = magnitude
    else:
        field = magnitude >> 23
        grid = tl.maximum(field, first_normal(fmt))
        # FP32's own subnormals lie below every fraction bit: their implicit bit does not matter.
        significand = ((magnitude & 0x7FFFFF) | 0x800000).to(tl.uint64) << 32
        dropped = tl.minimum(grid - field + (23 - mantissa_bits(fmt)), 63)
        steps_below_binade = (grid - first_normal(fmt)).to(tl.uint64) << (32 + mantissa_bits(fmt))
        where = steps_below_binade + (significand >> dropped.to(tl.uint64))
    return where


@triton.jit
def restore_special(code, x, fmt: tl.constexpr):
    """Give the code of a magnitude the sign of ``x``, and NaN and infinities their place."""
    magnitude = magnitude_of(x)
    code = tl.where(magnitude >= 0x7F800000, infinity_code(fmt), code)
    code = tl.where(magnitude > 0x7F800000, nan_code(fmt), code)
    return code | ((x.to(tl.uint32, bitcast=True) >> 31) << (width(fmt) - 1))


@triton.jit
def fraction_of(bits, fmt: tl.constexpr):
    """Random bits (uint32) as a fraction of a position."""
    return bits >> 16 if fmt == "bf16" else bits.to(tl.uint64)


@triton.constexpr_function
def is_converted(fmt, converts):
    """Whether a GPU that converts to FP8 has this format."""
    return converts and fmt in ("e4m3", "e5m2")


@triton.jit
def put_right(code, x, fmt: tl.constexpr):
    """Our codes from those of a GPU's conversion, ``cvt.rn.satfinite``.

    It rounds as we do, subnormal numbers too, keeps the sign of a zero and saturates; but so do
    infinities, and NaN has no sign.
    """
    special = restore_special(tl.zeros(x.shape, tl.uint32), x, fmt)
    return tl.where(magnitude_of(x) < 0x7F800000, code, special)


@triton.jit
def cast(x, fmt: tl.constexpr):
    """By an instruction for two values; no interpreter's cast is to be trusted."""
    return x.to(tl.float8e4nv if fmt == "e4m3" else tl.float8e5)


@triton.jit
def converted(x, fmt: tl.constexpr):
    """:func:`nearest` by a GPU's conversion."""
    return put_right(cast(x, fmt).to(tl.uint8, bitcast=True).to(tl.uint32), x, fmt)


@triton.jit
def nearest(x, fmt: tl.constexpr, CONVERTS: tl.constexpr = False):
    """Codes of FP32 values, rounded to nearest-even, saturating.

    ``CONVERTS`` says that the GPU has conversions to FP8, see
    :func:`subulp.ops.triton.launch.converts`: the same bits in fewer instructions.
    """
    if is_converted(fmt, CONVERTS):
        code = converted(x, fmt)
    elif fmt == "fp32":
        code = x.to(tl.uint32, bitcast=True)
    else:
        magnitude = magnitude_of(x)
        if fmt == "bf16":
            rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        else:
            # As position, in 32 bits: a significand more than two steps below the grid rounds to
            # zero, however far below it lies.
            field = magnitude >> 23
            grid = tl.maximum(field, first_normal(fmt))
            significand = (magnitude & 0x7FFFFF) | 0x800000
            dropped = tl.minimum(grid - field + (23 - mantissa_bits(fmt)), 26)
            odd = (significand >> dropped) & 1
            almost_half = (tl.full(x.shape, 1, tl.uint32) << (dropped - 1)) - 1
            rounded = (significand + almost_half + odd) >> dropped
            rounded += (grid - first_normal(fmt)) << mantissa_bits(fmt)
        code = restore_special(tl.minimum(rounded, max_code(fmt)), x, fmt)
    return code


@triton.jit
def rounded(x, fmt: tl.constexpr, CONVERTS: tl.constexpr = False):
    """:func:`nearest` of finite FP32 values, and the values of these codes."""
    if is_converted(fmt, CONVERTS):
        narrow = cast(x, fmt)
        code, result = narrow.to(tl.uint8, bitcast=True).to(tl.uint32), narrow.to(tl.float32)
    else:
        code = nearest(x, fmt)
        result = value(code, fmt)
    return code, result


@triton.constexpr_function
def is_quick(fmt, converts):
    """Whether :func:`reciprocal` may leave out what only very small and large numbers need."""
    f = FORMATS[fmt]
    return converts and f.smallest_subnormal / 2 >= 2.0**-124 and f.max < 2.0**124


@triton.jit
def reciprocal(x, fmt: tl.constexpr, CONVERTS: tl.constexpr = False):
    """``1 / x``, rounded to nearest, of finite numbers that a format rounds to others than zero.

    What it is of other numbers has no meaning.

    On GPUs that ``CONVERTS`` is said of, these are the three instructions that their assembler
    itself makes of ``rcp.rn.f32``, without its test for numbers that need more.
    """
    if is_quick(fmt, CONVERTS):
        result = tl.inline_asm_elementwise(
            """{
            .reg .f32 near, minus, rest;
            rcp.approx.ftz.f32 near, $1;
            neg.f32 minus, $1;
            fma.rn.f32 rest, minus, near, 0f3F800000;
            fma.rn.f32 $0, near, rest, near;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        one = tl.full(x.shape, 1.0, tl.float32)
        result = tl.div_rn(one, tl.where(x == 0.0, one, x))
    return result


@triton.jit
def stochastic(x, bits, fmt: tl.constexpr):
    """Codes of FP32 values, rounded up exactly if the fraction plus ``bits`` (uint32) carries."""
    where = position(magnitude_of(x), fmt) + fraction_of(bits, fmt)
    code = tl.minimum(where >> fraction_bits(fmt), max_code(fmt))
    return restore_special(code.to(tl.uint32), x, fmt)


# ------------------------------------------------------------------------------------- extra bits


@triton.jit
def split(x, bits, fmt: tl.constexpr, k: tl.constexpr):
    """Codes of the heads, and tails of k bits (and bit k: rounded up); all-zero bits truncate."""
    drop: tl.constexpr = fraction_bits(fmt) - k
    last: tl.constexpr = ((max_code(fmt) + 1) << k) - 1
    increment = fraction_of(bits, fmt)
    where = position(magnitude_of(x), fmt)
    kept = tl.minimum((where + (increment & ((1 << drop) - 1))) >> drop, last)
    code = tl.minimum((kept + (increment >> drop)) >> k, max_code(fmt))
    tail = ((code - (kept >> k)) << k) | (kept & ((1 << k) - 1))
    tail = tl.where(magnitude_of(x) >= 0x7F800000, 0, tail)
    return restore_special(code.to(tl.uint32), x, fmt), tail.to(tl.uint32)


@triton.jit
def split_nearest(x, bits, fmt: tl.constexpr, k: tl.constexpr, random: tl.constexpr):
    """Codes of the nearest heads, and signed tails of k bits, rounded to nearest or by bits."""
    drop: tl.constexpr = fraction_bits(fmt) - k
    half: tl.constexpr = 1 << (k - 1)
    last: tl.constexpr = (max_code(fmt) << k) + half - 1
    where = position(magnitude_of(x), fmt)
    if random:
        where += fraction_of(bits, fmt) & ((1 << drop) - 1)
    elif drop > 0:
        where += ((1 << drop) >> 1) - 1 + ((where >> drop) & 1)
    kept = tl.minimum(where >> drop, last).to(tl.uint32)
    tail = tl.where(magnitude_of(x) >= 0x7F800000, 0, kept & ((1 << k) - 1))
    return restore_special((kept + half) >> k, x, fmt), tail


@triton.jit
def join(head, tail, fmt: tl.constexpr, k: tl.constexpr, signed: tl.constexpr):
    """FP32 values of the codes of heads and their tails; the inverse of both splits."""
    sign = (head >> (width(fmt) - 1)) << 31
    magnitude = head & ((1 << (width(fmt) - 1)) - 1)
    if signed:
        where = (magnitude << k) + tail - ((tail & (1 << (k - 1))) << 1)
    else:
        where = (magnitude << k) + tail - ((tail >> k) << (k + 1))
    # Below zero, where no split leads.
    where = tl.where((where >> 31) != 0, 0, where)
    if fmt == "bf16":
        bits = where << (16 - k)
        bits = tl.where(magnitude > max_code(fmt), magnitude << 16, bits)
    else:
        # No tail stands beside an infinity or NaN.
        where = tl.where(magnitude > max_code(fmt), magnitude << k, where)
        code = where >> k
        tail = where & ((1 << k) - 1)
        field = tl.maximum(code >> mantissa_bits(fmt), 1)
        step = (field + (127 - bias(fmt) - mantissa_bits(fmt) - k)) << 23
        part = tail.to(tl.float32) * step.to(tl.float32, bitcast=True)
        whole = value(code, fmt)
        finite = (whole + part).to(tl.uint32, bitcast=True)
        bits = tl.where(code > max_code(fmt), whole.to(tl.uint32, bitcast=True), finite)
    return (bits | sign).to(tl.float32, bitcast=True)

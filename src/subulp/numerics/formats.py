"""Narrow floating-point formats: what a (exponent bits, mantissa bits) pair can represent.

A format here is a *grid of values*. Values on the grid travel in FP32 tensors, which hold every
format of this module exactly; the formats that PyTorch stores have a ``dtype`` as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .whole import is_whole


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with gradual underflow (Collage, Table 9).

    Args:
        name: What tables and errors call it.
        exponent_bits: Width of the exponent field, 2 to 8.
        mantissa_bits: Width of the stored mantissa field (without the implicit bit), 1 to 23.
        has_infinity: ``True`` for IEEE-754 layouts. ``False`` for the "fn" layouts, which give the
            top exponent to finite values and keep only its last mantissa code for NaN.
        dtype: The PyTorch dtype that stores the format, or ``None`` for a simulated one.

    Raises:
        ValueError: A field width is out of range, or the format reaches beyond FP32.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("exponent_bits", "mantissa_bits"):
            if not is_whole(value := getattr(self, name)):
                raise ValueError(f"{name}={value!r} is not a whole number")
        if not 2 <= self.exponent_bits <= 8:
            raise ValueError(
                f"exponent_bits={self.exponent_bits} is out of range: values travel in FP32, so a "
                "format has 2 to 8 exponent bits"
            )
        if not 1 <= self.mantissa_bits <= 23:
            raise ValueError(
                f"mantissa_bits={self.mantissa_bits} is out of range: values travel in FP32, so a "
                "format has 1 to 23 mantissa bits"
            )
        if self.exponent_bits == 8 and not self.has_infinity:
            raise ValueError(
                "exponent_bits=8 does not go with has_infinity=False: values travel in FP32, and "
                "this format's largest ones lie beyond FP32's"
            )

    @property
    def precision(self) -> int:
        """Significand bits, the implicit one included (the ``p`` of the textbooks)."""
        return self.mantissa_bits + 1

    @property
    def bias(self) -> int:
        """The stored exponent field minus the exponent."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value."""
        return (1 << self.exponent_bits) - (2 if self.has_infinity else 1) - self.bias

    @property
    def max(self) -> float:
        """The largest finite value."""
        last_ulps = 1 if self.has_infinity else 2
        return (2.0 - last_ulps * 2.0**-self.mantissa_bits) * 2.0**self.max_exponent

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with a full significand."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def max_code(self) -> int:
        """Code (sign bit left out) of the largest finite value."""
        top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        return top - 1 if self.has_infinity else top + (1 << self.mantissa_bits) - 2

    @property
    def itemsize(self) -> int:
        """Bytes of one stored value.

        Raises:
            ValueError: The format is simulated and has no storage.
        """
        if self.dtype is None:
            raise ValueError(f"{self.name} is simulated: no dtype stores it")
        return self.dtype.itemsize

    @property
    def random_width(self) -> int:
        """Random bits that make stochastic rounding from FP32 exactly unbiased: 16 or 32.

        Formats with FP32's exponent range drop the same mantissa bits everywhere, so 16 bits do
        when at most 16 are dropped (BF16). The others drop more in their subnormal range.
        """
        return 16 if self.exponent_bits == 8 and self.mantissa_bits >= 7 else 32

    def ulp(self, x: Tensor) -> Tensor:
        """Unit in the last place of each value (Collage, Definition 3.1).

        Args:
            x: FP32 or FP64 tensor, any shape.

        Returns:
            Tensor like ``x``: ``2**(max(e, min_exponent) - mantissa_bits)`` for
            ``2**e <= |x| < 2**(e + 1)``; the smallest subnormal at zero; NaN where ``x`` is not
            finite.
        """
        wide = x.to(torch.float64)
        exponent = torch.frexp(wide).exponent.to(torch.int64) - 1
        exponent = torch.where(wide == 0, self.min_exponent, exponent).clamp(min=self.min_exponent)
        value = power_of_two(exponent - self.mantissa_bits)
        return torch.where(torch.isfinite(wide), value, torch.nan).to(x.dtype)

    def __str__(self) -> str:
        return self.name


def power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` in FP64 for an int64 tensor of exponents from -1022 to 1023, exactly.

    Built from its bits: ``torch.ldexp`` and ``torch.pow`` go through a rounded power function.
    """
    return ((exponent + 1023) << 52).view(torch.float64)


FP32 = Format("fp32", 8, 23, dtype=torch.float32)
BF16 = Format("bf16", 8, 7, dtype=torch.bfloat16)
FP16 = Format("fp16", 5, 10, dtype=torch.float16)
E4M3 = Format("e4m3", 4, 3, has_infinity=False, dtype=torch.float8_e4m3fn)
E5M2 = Format("e5m2", 5, 2, dtype=torch.float8_e5m2)

STORED = (FP32, BF16, FP16, E4M3, E5M2)
"""The formats that a dtype stores."""

_BY_DTYPE = {f.dtype: f for f in STORED}


def simulated(exponent_bits: int, mantissa_bits: int, *, has_infinity: bool = True) -> Format:
    """A format that no dtype stores, e.g. ``simulated(3, 4)``; its values live in FP32 tensors.

    Raises:
        ValueError: A field width is out of range.
    """
    return Format(f"e{exponent_bits}m{mantissa_bits}", exponent_bits, mantissa_bits, has_infinity)


def format_of(dtype: torch.dtype) -> Format:
    """The format that a PyTorch dtype stores.

    Raises:
        ValueError: ``dtype`` is none of FP32, BF16, FP16, ``float8_e4m3fn``, ``float8_e5m2``.
    """
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        names = ", ".join(str(d).removeprefix("torch.") for d in _BY_DTYPE)
        raise ValueError(f"dtype={dtype} is not a format of subulp: use one of {names}") from None

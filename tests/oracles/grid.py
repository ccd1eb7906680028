"""The values of a narrow format, enumerated from its bit fields."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

ENUMERABLE = 1 << 16


@dataclass(frozen=True)
class Grid:
    """A sign-less binary format: exponent field, mantissa field, gradual underflow.

    A code is the pattern of both fields, read as an integer. With infinities the top exponent
    field is not finite (IEEE 754); without ("fn"), only its last code is not.
    """

    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @cached_property
    def unit(self) -> Fraction:
        """The smallest subnormal; every value is an integer multiple of it."""
        return Fraction(2) ** (1 - self.bias - self.mantissa_bits)

    @cached_property
    def count(self) -> int:
        """How many codes are finite: 0 to ``count - 1``."""
        codes = 2 ** (self.exponent_bits + self.mantissa_bits)
        return codes - (2**self.mantissa_bits if self.has_infinity else 1)

    def value(self, code: int) -> Fraction:
        """``0.mantissa * 2**(1 - bias)`` for field 0, else ``1.mantissa * 2**(field - bias)``."""
        field, mantissa = divmod(code, 2**self.mantissa_bits)
        fraction = Fraction(mantissa, 2**self.mantissa_bits)
        if field == 0:
            return fraction * Fraction(2) ** (1 - self.bias)
        return (1 + fraction) * Fraction(2) ** (field - self.bias)

    @cached_property
    def values(self) -> list[Fraction]:
        """All finite non-negative values in ascending order."""
        assert self.count <= ENUMERABLE
        return [self.value(code) for code in range(self.count)]

    @property
    def largest(self) -> Fraction:
        return self.value(self.count - 1)

    def locate(self, magnitude: Fraction) -> tuple[int, Fraction]:
        """Where a magnitude lies: the code of the largest value not above it, and how far beyond.

        The second number is the part of the way to the next value. Above the largest value the
        steps go on as they were below it, so it may be 1 or more there.
        """
        # Whole multiples of the unit are compared: an integer is below x iff it is below floor(x).
        whole = magnitude // self.unit
        if self.count <= ENUMERABLE:
            code = bisect_right(self._multiples, whole) - 1
        else:
            code = bisect_right(range(self.count), whole, key=self._multiple) - 1
        lower = self._multiple(code)
        step = self._multiple(code + 1) - lower
        if code == self.count - 1:
            step = lower - self._multiple(code - 1)
        return code, (magnitude / self.unit - lower) / step

    def ulp(self, magnitude: Fraction) -> Fraction:
        """Collage, Definition 3.1: ``2**(max(e, e_min) - P)`` for ``2**e <= |x| < 2**(e + 1)``."""
        exponent = 1 - self.bias
        if magnitude >= Fraction(2) ** exponent:
            exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
            exponent -= Fraction(2) ** exponent > magnitude
        return Fraction(2) ** (exponent - self.mantissa_bits)

    def _multiple(self, code: int) -> int:
        field, mantissa = divmod(code, 2**self.mantissa_bits)
        return mantissa if field == 0 else (2**self.mantissa_bits + mantissa) << (field - 1)

    @cached_property
    def _multiples(self) -> list[int]:
        return [self._multiple(code) for code in range(self.count)]

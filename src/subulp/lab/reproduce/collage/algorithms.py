"""The papers' algorithms on expansions, against exact rationals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ....numerics import expansion as mcf
from ....numerics import round_to
from ....numerics.formats import BF16, FP16, Format
from ..found import Found, Observation

INEXACT = "inexact results"
WORST = "largest relative error in units of 2^-2p"

_FORMATS = {"BF16": BF16, "FP16": FP16}
# Binades of the operands: the errors of their products are still numbers of the format.
_BINADES = {"BF16": (-12, 12), "FP16": (0, 3)}


@dataclass(frozen=True)
class Operands:
    """Two expansions of each of many random numbers, all on the grid of a format."""

    a: Tensor
    a_low: Tensor
    b: Tensor
    b_low: Tensor

    @classmethod
    def draw(cls, name: str, count: int) -> Operands:
        """Numbers of some binades around 1, always the same ones."""
        generator = torch.Generator().manual_seed(0)
        drawn: list[Tensor] = []
        low, high = _BINADES[name]
        for _ in range(2):
            exponents = torch.randint(low, high + 1, (count,), generator=generator)
            wide = 1 + torch.rand(count, generator=generator, dtype=torch.float64)
            signs = 1 - 2 * torch.randint(2, (count,), generator=generator)
            drawn += mcf.encode(torch.ldexp(signs * wide, exponents), _FORMATS[name])
        return cls(*drawn)

    @property
    def ordered(self) -> tuple[Tensor, Tensor]:
        """The larger and the smaller of each pair of first components."""
        swap = self.b.abs() > self.a.abs()
        return torch.where(swap, self.b, self.a), torch.where(swap, self.a, self.b)


Run = Callable[[Operands, Format], tuple[tuple[Tensor, ...], Iterable[Fraction]]]
"""Components of the results of an algorithm, and the exact results."""


def _fast2sum(of: Operands, fmt: Format) -> tuple[tuple[Tensor, ...], Iterable[Fraction]]:
    large, small = of.ordered
    return mcf.fast2sum(large, small, fmt), map(_sum, _rows(large, small))


def _two_sum(of: Operands, fmt: Format) -> tuple[tuple[Tensor, ...], Iterable[Fraction]]:
    return mcf.two_sum(of.a, of.b, fmt), map(_sum, _rows(of.a, of.b))


def _split(of: Operands, fmt: Format) -> tuple[tuple[Tensor, ...], Iterable[Fraction]]:
    return mcf.split(of.a, fmt), map(_sum, _rows(of.a))


def _two_prod(of: Operands, fmt: Format) -> tuple[tuple[Tensor, ...], Iterable[Fraction]]:
    return mcf.two_prod(of.a, of.b, fmt), (a * b for a, b in _rows(of.a, of.b))


def _two_prod_fma(of: Operands, fmt: Format) -> tuple[tuple[Tensor, ...], Iterable[Fraction]]:
    return mcf.two_prod_fma(of.a, of.b, fmt), (a * b for a, b in _rows(of.a, of.b))


def _scaling(of: Operands, fmt: Format) -> tuple[tuple[Tensor, ...], Iterable[Fraction]]:
    exact = ((hi + lo) * b for hi, lo, b in _rows(of.a, of.a_low, of.b))
    return mcf.scaling(of.a, of.a_low, of.b, fmt), exact


def _mul(of: Operands, fmt: Format) -> tuple[tuple[Tensor, ...], Iterable[Fraction]]:
    rows = _rows(of.a, of.a_low, of.b, of.b_low)
    exact = ((a + a_low) * (b + b_low) for a, a_low, b, b_low in rows)
    return mcf.mul(of.a, of.a_low, of.b, of.b_low, fmt), exact


ALGORITHMS: dict[str, Run] = {
    "Fast2Sum": _fast2sum,
    "TwoSum": _two_sum,
    "Split": _split,
    "TwoProd": _two_prod,
    "TwoProdFMA": _two_prod_fma,
    "Scaling": _scaling,
    "Mul": _mul,
}


def errors(count: int) -> Found:
    """How far results, as the sums of their components, are from the exact ones.

    Args:
        count: Random operands of each algorithm and format.
    """
    found = []
    for name, fmt in _FORMATS.items():
        operands = Operands.draw(name, count)
        for algorithm, run in ALGORITHMS.items():
            components, exact = run(operands, fmt)
            pairs = list(zip(map(_sum, _rows(*components)), exact, strict=True))
            wrong = sum(got != want for got, want in pairs)
            worst = max(abs((got - want) / want) for got, want in pairs if want)
            case = f"{algorithm} in {name}"
            found.append(Observation(case, INEXACT, wrong))
            found.append(Observation(case, WORST, float(worst * 2 ** (2 * fmt.precision))))
    return Found(tuple(found))


OF_FIRST = "largest error in units of 2^-2p of the first component"
ADDENDS = ("a 64th", "less a 64th", "as large", "nearly cancelling", "of all magnitudes")
"""What :func:`grown` adds to an expansion."""


def _addends(of: Operands, fmt: Format) -> dict[str, Tensor]:
    """Addends of each kind, none larger than the first component."""
    generator = torch.Generator().manual_seed(1)
    count = len(of.a)

    def part(low: int, high: int) -> Tensor:
        exponents = torch.randint(low, high + 1, (count,), generator=generator)
        wide = torch.ldexp(0.5 + torch.rand(count, generator=generator) / 2, exponents)
        signs = 1 - 2 * torch.randint(2, (count,), generator=generator)
        return mcf.mult(of.a, round_to(signs * wide, fmt), fmt)

    small = mcf.mult(of.a, torch.full_like(of.a, 2.0**-6), fmt)
    # From none to a few units of the last place are left.
    left = torch.randint(0, 4, (count,), generator=generator) * 2.0 ** (1 - fmt.precision)
    cancelling = -mcf.mult(of.a, round_to(1 - left, fmt), fmt)
    return dict(zip(ADDENDS, (small, -small, part(0, 0), cancelling, part(-24, 0)), strict=True))


def grown(count: int) -> Found:
    """Algorithm 1 on addends of both signs and of all magnitudes that it allows.

    Args:
        count: Random expansions of each addend and format.
    """
    found = []
    for name, fmt in _FORMATS.items():
        of = Operands.draw(name, count)
        for kind, added in _addends(of, fmt).items():
            assert bool((added.abs() <= of.a.abs()).all())
            rows = _rows(*mcf.grow(of.a, of.a_low, added, fmt), of.a, of.a_low, added)
            worst = max(abs((hi + lo - _sum(terms)) / terms[0]) for hi, lo, *terms in rows)
            case = f"{kind}, {name}"
            found.append(Observation(case, OF_FIRST, float(worst * 2 ** (2 * fmt.precision))))
            cancelled = sum(2 * abs(_sum(terms)) < abs(terms[0]) for _, _, *terms in rows)
            found.append(Observation(case, "sums below half of the first component", cancelled))
    return Found(tuple(found))


def _sum(terms: Iterable[Fraction]) -> Fraction:
    return sum(terms, Fraction())


def _rows(*tensors: Tensor) -> list[tuple[Fraction, ...]]:
    return [tuple(map(Fraction, row)) for row in zip(*(t.tolist() for t in tensors), strict=True)]

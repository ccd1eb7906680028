"""Collage's Algorithm 2 in exact rationals, each operation rounded to BF16, beside ours."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch

from .... import optim
from ..found import Found, Observation

DIFFERENT = "numbers that differ"
COMPARED = "numbers compared"

_ZERO = Fraction()
_Expansion = tuple[Fraction, Fraction]


def bf16(x: Fraction) -> Fraction:
    """The nearest BF16 number, of two the even one; numbers are far from the largest one."""
    if not x:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 7)
    return round(x / unit) * unit


def bf16_root(x: Fraction) -> Fraction:
    """The BF16 number that is nearest to a root."""
    scale = 200
    square = x * 4**scale
    root = math.isqrt(square.numerator // square.denominator)
    # Between two whole numbers far above BF16's bits, a half stands for all that is there.
    inexact = root * root != square
    return bf16((root + Fraction(inexact, 2)) / 2**scale)


def _sum(a: Fraction, b: Fraction) -> _Expansion:
    """Theorem 4.1: the rounded sum, and its error, which is a BF16 number."""
    total = bf16(a + b)
    return total, bf16(a + b - total)


def _grow(x: Fraction, y: Fraction, a: Fraction) -> _Expansion:
    """Algorithm 1."""
    u, v = _sum(x, a)
    return _sum(u, bf16(y + v))


def _mul(a: _Expansion, b: _Expansion) -> _Expansion:
    """Algorithm 7."""
    x = bf16(a[0] * b[0])
    e = bf16(a[0] * b[0] - x)
    cross = bf16(bf16(a[0] * b[1]) + bf16(a[1] * b[0]))
    return _sum(x, bf16(e + cross))


@dataclass
class Element:
    """One parameter and its states; the second components stay zero where there are none."""

    theta: Fraction
    theta_low: Fraction = _ZERO
    m: Fraction = _ZERO
    v: Fraction = _ZERO
    v_low: Fraction = _ZERO

    @property
    def numbers(self) -> tuple[Fraction, ...]:
        """All of them: the parameter, then what optimizers keep under :data:`_KEPT`."""
        return self.theta, self.theta_low, self.m, self.v, self.v_low


@dataclass(frozen=True)
class Options:
    """What does not change from step to step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    light: bool
    plus: bool

    def step(self, e: Element, gradient: Fraction, t: int) -> None:
        """Lines 8 to 13 of Algorithm 2, of the element in place."""
        kept = bf16(_scalar(self.beta1) * e.m)
        e.m = bf16(kept + bf16(_scalar(1 - self.beta1) * gradient))
        square = bf16(_scalar(1 - self.beta2) * bf16(gradient * gradient))
        if self.plus:
            beta2 = _scalar(self.beta2)
            exact = Fraction(self.beta2)
            moved = _mul((beta2, bf16(exact - beta2)), (e.v, e.v_low))
            e.v, e.v_low = _grow(*moved, square)
        else:
            e.v = bf16(bf16(_scalar(self.beta2) * e.v) + square)
        mean = bf16(e.m / _scalar(1 - self.beta1**t))
        root = bf16(bf16_root(e.v) / _scalar(math.sqrt(1 - self.beta2**t)))
        update = bf16(mean / bf16(root + _scalar(self.eps)))
        update = bf16(update + bf16(_scalar(self.weight_decay) * e.theta))
        change = bf16(_scalar(-self.lr) * update)
        if self.light:
            e.theta, e.theta_low = _grow(e.theta, e.theta_low, change)
        else:
            e.theta = bf16(e.theta + change)


def _scalar(value: float) -> Fraction:
    """A scalar computed in FP64 and rounded once (section 4.2)."""
    return bf16(Fraction(value))


_KEPT = ("parameter_low", "exp_avg", "exp_avg_sq", "exp_avg_sq_low")


def compare(strategies: list[str], beta2s: list[float], elements: int, steps: int) -> Found:
    """How many stored numbers of ``optim.AdamW`` differ from Algorithm 2's, over all steps.

    Args:
        strategies: Of AdamW, among ``nearest``, ``collage-light`` and ``collage-plus``.
        beta2s: Decays of the second moment.
        elements: Parameters, of some binades, the first one zero.
        steps: Steps with gradients of some binades.
    """
    found = []
    for strategy in strategies:
        for beta2 in beta2s:
            different, compared = _run(strategy, beta2, elements, steps)
            case = f"{strategy}, β2 {beta2}"
            found.append(Observation(case, DIFFERENT, different))
            found.append(Observation(case, COMPARED, compared))
    return Found(tuple(found))


def _run(strategy: str, beta2: float, elements: int, steps: int) -> tuple[int, int]:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> torch.Tensor:
        exponents = torch.randint(low, high + 1, (elements,), generator=generator)
        normal = torch.randn(elements, generator=generator)
        return torch.ldexp(normal, exponents).to(torch.bfloat16)

    start = draw(-8, 0)
    start[0] = 0
    options = Options(
        lr=1e-2,
        beta1=0.9,
        beta2=beta2,
        eps=1e-8,
        weight_decay=0.1,
        light=strategy in ("collage-light", "collage-plus"),
        plus=strategy == "collage-plus",
    )
    p = torch.nn.Parameter(start)
    optimizer = optim.AdamW(
        [p],
        lr=options.lr,
        betas=(options.beta1, beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        precision=strategy,
        arithmetic="strict",
    )
    rows = [Element(x) for x in fractions(start)]
    different = compared = 0
    for t in range(1, steps + 1):
        p.grad = draw(-16, 0)
        for e, gradient in zip(rows, fractions(p.grad), strict=True):
            options.step(e, gradient, t)
        optimizer.step()
        kept = optimizer.state[p]
        stored = [p.detach(), *(kept.get(name) for name in _KEPT)]
        wanted = zip(*(e.numbers for e in rows), strict=True)
        for tensor, numbers in zip(stored, wanted, strict=True):
            if tensor is None:
                different += any(numbers)
                continue
            got = list(fractions(tensor))
            different += sum(a != b for a, b in zip(got, numbers, strict=True))
            compared += len(got)
    return different, compared


def fractions(tensor: torch.Tensor) -> Iterable[Fraction]:
    """The numbers of a tensor, exactly."""
    return map(Fraction, tensor.tolist())

"""Forward error of additions in 16 bits, with and without extra bits, against exact sums.

"Memory Efficient Mixed Precision Optimizers", Figure 6: random values from the standard normal
distribution are kept in 16 bits, and in 16 bits and k extra bits in three codings: the nearest head
with a stochastically rounded tail, both truncated, both stochastic. A sum is computed in FP32 from
the stored value and stored again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from ....numerics import BF16, FP16, Format, extra_bits, random_bits, round_to
from ..found import Curve, Found, Observation

ADDITIONS = 64

FORMATS: dict[str, Format] = {"fp16": FP16, "bf16": BF16}

Store = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Stores a value; returns what the model sees and what the next addition starts from."""


def forms(name: str, k: int) -> dict[str, Store]:
    """The ways to store a value in a format and k extra bits, by name.

    Args:
        name: Of a format, see :data:`FORMATS`.
        k: Extra bits.
    """
    fmt = FORMATS[name]

    def alone(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        head = round_to(x, fmt)
        return head, head

    def truncated(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        head, tail = extra_bits.split(x, fmt, k, "truncate")
        return head, extra_bits.join(head, tail, fmt, k, "truncate")

    def nearest(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        bits = random_bits.draw(x.shape, seed=0, step=step)
        head, tail = extra_bits.split(x, fmt, k, bits=bits)
        return head, extra_bits.join(head, tail, fmt, k)

    def stochastic(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        bits = random_bits.draw(x.shape, seed=0, step=step)
        head, tail = extra_bits.split(x, fmt, k, "stochastic", bits=bits)
        return head, extra_bits.join(head, tail, fmt, k, "stochastic")

    own = f"{name}+{k}"
    return {
        name: alone,
        own: nearest,
        f"{own} truncate": truncated,
        f"{own} stochastic": stochastic,
    }


def one_addition(store: Store, n: int, seed: int = 0) -> float:
    """Relative error of what the model sees (by norms) after one in-place addition to n values."""
    generator = torch.Generator().manual_seed(n + 1_000_003 * seed)
    x, y = (torch.randn(n, generator=generator) for _ in range(2))
    _, wide = store(x, 0)
    head, _ = store(wide + y, 1)
    exact = x.double() + y.double()
    return float((head.double() - exact).norm() / exact.norm())


def many_additions(store: Store, n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Condition numbers of n sums of 64 terms, and their relative errors."""
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randn(ADDITIONS, n, generator=generator)
    wide = torch.zeros(n)
    for step in range(ADDITIONS):
        _, wide = store(wide + terms[step], step)
    exact = terms.double().sum(0)
    condition = terms.double().abs().sum(0) / exact.abs()
    return condition, (wide.double() - exact).abs() / exact.abs()


def binned(condition: Tensor, error: Tensor) -> tuple[list[float], list[float]]:
    """Middles of ranges of condition numbers, and the median error in each."""
    edges = torch.logspace(0.5, 4, 15, dtype=torch.float64)
    centres, medians = [], []
    for low, high in itertools.pairwise(edges):
        inside = (condition >= low) & (condition < high)
        if int(inside.sum()) >= 20:
            centres.append(float((low * high).sqrt()))
            medians.append(float(error[inside].median()))
    return centres, medians


def errors(bits: list[int], values: int, seeds: list[int]) -> Found:
    """Errors after one addition and after 64, in units of the 16-bit format's round-off.

    Args:
        bits: Extra bits.
        values: Sums.
        seeds: Of the values.
    """
    found, curves = [], []
    for (name, fmt), k in itertools.product(FORMATS.items(), bits):
        unit = 2.0 ** -(fmt.mantissa_bits + 1)
        for form, store in forms(name, k).items():
            # A format alone has no extra bits: it is found once.
            if form == name and k != bits[0]:
                continue
            for seed in seeds:
                condition, error = many_additions(store, values, seed + 1)
                one = one_addition(store, values, seed)
                found += [
                    Observation(form, "error after one addition", one / unit, seed),
                    Observation(
                        form, "error after 64 additions", float(error.median()) / unit, seed
                    ),
                ]
                centres, medians = binned(condition, error / unit)
                curves.append(
                    Curve(form, "error by condition number", tuple(centres), tuple(medians), seed)
                )
    return Found(tuple(found), tuple(curves))

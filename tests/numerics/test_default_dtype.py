"""``torch.set_default_dtype`` is for what users make: no definition depends on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from subulp.diagnostics import exponent_histogram
from subulp.numerics import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    expansion,
    extra_bits,
    ieee,
    int_rows,
    logistic,
    metrics,
    mixture,
    random_bits,
    round_to,
    scaling,
    simulated,
)

FORMATS = (BF16, FP16, E4M3, E5M2, simulated(3, 4))


def results() -> Iterator[Tensor]:
    """What every part of ``numerics`` makes of the same FP32 numbers."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float32)
        return x * torch.randn(*shape, generator=generator, dtype=torch.float32).mul(9).exp2()

    x, y, z = drawn(40, 70), drawn(40, 70), drawn(40, 70)
    x[0, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan], dtype=torch.float32)
    bits = random_bits.draw(x.shape, seed=1, stream=2, step=3)
    yield bits
    yield random_bits.swap_halves(bits)
    yield random_bits.mix(torch.arange(5))
    for fmt in FORMATS:
        for rounding in ("nearest", "toward-zero"):
            yield round_to(x, fmt, rounding)
        yield round_to(x, fmt, "stochastic", bits=bits)
        yield fmt.ulp(x)
        if fmt.dtype is not None:
            a, b = (round_to(t.nan_to_num(), fmt) for t in (y, z))
            for pair in (
                expansion.encode(y, fmt),
                expansion.two_sum(a, b, fmt),
                expansion.two_prod(a, b, fmt),
                expansion.grow(a, torch.zeros_like(a), b, fmt, ordered=False),
            ):
                yield from pair
            yield from (expansion.div(a, b, fmt), expansion.sqrt(a.abs(), fmt))
    for fmt, width in ((BF16, 8), (FP16, 13)):
        head, tail = extra_bits.split(x, fmt, width)
        yield from (head, tail, extra_bits.join(head, tail, fmt, width))
        yield extra_bits.pack(tail, width)
    for width in (8, 4, 2):
        rows = int_rows.encode(y, width)
        yield from (rows.codes, rows.scale, rows.bias, int_rows.decode(rows))
        yield from (
            int_rows.to_bytes(rows),
            int_rows.encode(y, width, rounding="stochastic", random=bits).codes,
        )
    for value in (x, 30 * y, -1e4 * z.abs()):
        yield from (logistic.sigmoid(value), logistic.softplus(value))
    yield ieee.sqrt(x.abs())
    for scales in (
        scaling.group_amax_mantissa(x, E4M3, (1, 32)),
        scaling.amax_scaling(y * 2.0**-140, E5M2, (8, 16)),
        scaling.power_of_two_scaling(z, E4M3),
    ):
        yield from (scales.mantissa, scales.exponents, scales.per_block())
        yield scales.inverse_per_block()
    for metric in metrics.KNOWN:
        for recipe in (*mixture.RECIPES.values(), mixture.ALWAYS_E4M3):
            for values in (x, y.bfloat16(), z.half()):
                found, summary = mixture.encode(values, recipe, "subchannel-32", metric=metric)
                yield from (*found.tensors, mixture.decode(found))
                yield torch.tensor([summary.error, summary.first_error], dtype=torch.float64)
    yield torch.tensor(list(exponent_histogram([x, y, z]).shares().values()), dtype=torch.float64)


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return list(results())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype, expected: list[Tensor]) -> None:
    torch.set_default_dtype(dtype)
    try:
        found = list(results())
    finally:
        torch.set_default_dtype(torch.float32)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype, i
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b))), i

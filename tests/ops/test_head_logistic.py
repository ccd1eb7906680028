"""The logistic function: against double precision, and the same bits wherever it is computed."""

from __future__ import annotations

import math

import pytest
import torch

from subulp.numerics.logistic import sigmoid, softplus
from subulp.ops.head import triton_logistic
from subulp.ops.head.logistic import Positives, logistic_

from .support import environment, interpreted, isas

NONE = Positives(*torch.zeros(2, 0, dtype=torch.int64))


def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(40_000, generator=generator) * 10 ** torch.empty(40_000).uniform_(
        -30, 2.5, generator=generator
    )
    special = [0.0, -0.0, math.inf, -math.inf, 87.0, -87.0, -87.1, 88.8, 3e38, -3e38, 1e-45]
    return torch.cat([torch.tensor(special), spread, torch.linspace(-90, 90, 20_001)])


def ulps(found, exact):
    error = (found.double() - exact).abs()
    return (error / torch.finfo(torch.float32).eps / exact.abs().clamp(min=1e-37)).max().item()


def test_sigmoid_is_close_everywhere():
    z = logits()
    exact = torch.sigmoid(z.double())
    inside = z > -80
    assert ulps(sigmoid(z)[inside], exact[inside]) < 2
    # Below, the sigmoid is less than 2**-115 and may stop falling.
    assert (sigmoid(z)[~inside] <= 2.0**-115).all()
    assert (sigmoid(z) >= 0).all()
    assert sigmoid(torch.tensor([math.inf])) == 1


def test_softplus_is_close_everywhere():
    z = logits()
    exact = torch.nn.functional.softplus(z.double(), threshold=700)
    inside = (z > -80) & z.isfinite()
    assert ulps(softplus(z)[inside], exact[inside]) < 3
    assert softplus(torch.tensor([math.inf])) == math.inf


def test_nan_stays_nan():
    z = torch.tensor([math.nan, 0.0])
    assert sigmoid(z).isnan().tolist() == softplus(z).isnan().tolist() == [True, False]
    assert logistic_(z.view(2, 1), NONE, 1.0, gradient=True, loss=True, narrow=True).sum().isnan()
    assert z.isnan().tolist() == [True, False]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("columns", [1, 7, 16, 33, 1000])
@pytest.mark.parametrize("gain", [1.0, 0.3])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_kernel_is_the_reference(narrow, isa, columns, gain):
    z = logits()
    z[:4] = torch.tensor([3.4e38, -3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8])
    if not narrow:
        # When torch rounds a NaN to BF16, its bits depend on its place.
        z[5] = math.nan
    z = z[: len(z) // columns * columns].view(-1, columns)
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randperm(z.numel(), generator=generator)[: z.numel() // 7].sort().values
    positives = Positives(pairs // columns + 5, pairs % columns, 5)
    exact = z.bfloat16().float() if narrow else z
    exact = sigmoid(exact) * gain
    exact.view(-1)[pairs] = (
        sigmoid(-(z.bfloat16().float() if narrow else z).view(-1)[pairs]) * -gain
    )
    for gradient in (True, False):
        for loss in (True, False):
            results = []
            for variables in (
                {"SUBULP_BACKEND": "reference"},
                {"SUBULP_BACKEND": "cpu", "SUBULP_ISA": isa},
            ):
                with environment(**variables):
                    out = z.clone()
                    options = {"gradient": gradient, "loss": loss, "narrow": narrow}
                    results.append((out, logistic_(out, positives, gain, **options)))
            (a, total), (b, other) = results
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
            assert (total is None) == (other is None) == (not loss)
            if loss:
                assert torch.equal(total.nan_to_num(), other.nan_to_num())
            expected = (exact.bfloat16().float() if narrow else exact) if gradient else z
            assert torch.equal(a.nan_to_num(), expected.nan_to_num())


@interpreted
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (130, 7), (3, 200), (300, 16)], ids=str)
def test_the_triton_kernels_are_the_reference(narrow, shape):
    z = logits()
    if not narrow:
        z[5] = math.nan
    z = z[: shape[0] * shape[1]].view(shape)
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randperm(z.numel(), generator=generator)[: z.numel() // 3 + 1].sort().values
    rows, columns = pairs // shape[1], pairs % shape[1]
    for gradient in (True, False):
        for loss in (True, False):
            options = {"gradient": gradient, "loss": loss, "narrow": narrow}
            results = []
            for backend in ("reference", "triton"):
                with environment(SUBULP_BACKEND=backend):
                    out = z.clone()
                    results.append((out, logistic_(out, Positives(rows, columns), 0.3, **options)))
            (a, total), (b, other) = results
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
            assert (total is None) == (other is None) == (not loss)
            assert total is None or torch.equal(total.nan_to_num(), other.nan_to_num())


@interpreted
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("before", "height", "after"), [(130, 40, 300), (0, 7, 1), (5, 0, 4)])
def test_triton_writes_zeros_where_others_have_rows(before, height, after, narrow):
    z = torch.randn(height, 5, generator=torch.Generator().manual_seed(0)) * 5
    pairs = torch.arange(0, z.numel(), 3)
    positives = pairs // 5 + 9, pairs % 5
    options = {"loss": True, "narrow": narrow}
    alone = torch.empty_like(z)
    terms = triton_logistic.run(z, *positives, 9, 0.3, gradient=alone, **options)
    tile = torch.full((before + height + after, 5), math.nan)
    found = triton_logistic.run(z, *positives, 9, 0.3, gradient=tile, before=before, **options)
    assert torch.equal(found, terms)
    assert torch.equal(tile[before : before + height], alone)
    assert tile.count_nonzero() == alone.count_nonzero()
    # In place, too.
    tile = torch.full_like(tile, math.nan)
    own = tile[before : before + height].copy_(z)
    triton_logistic.run(own, *positives, 9, 0.3, gradient=tile, before=before, **options)
    assert torch.equal(own, alone)
    assert tile.count_nonzero() == alone.count_nonzero()


@interpreted
def test_triton_leaves_out_what_is_outside():
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([7, 8, 9, 11, 12, 12, 12, 13, 2**40])
    columns = torch.tensor([0, 1, 2, 3, 0, 4, -1, 1, 1])
    here = slice(1, 5)
    with environment(SUBULP_BACKEND="triton"):
        found, inside = z.clone(), z.clone()
        terms = logistic_(found, Positives(rows, columns, 8), 0.5, gradient=True, loss=True)
        alone = Positives(rows[here], columns[here], 8)
        expected = logistic_(inside, alone, 0.5, gradient=True, loss=True)
    assert torch.equal(found, inside)
    assert torch.equal(terms[5:][here], expected[5:])
    assert terms.sum() == expected.sum()
    assert terms[5:].count_nonzero() == 4


def test_the_loss_is_that_of_torch():
    z = torch.randn(9, 13, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(9, 13)
    y[[0, 3, 3, 8], [12, 0, 7, 5]] = 1
    rows, columns = y.nonzero().t().contiguous()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        z.double(), y.double(), reduction="sum"
    )
    for backend in ("cpu", "reference"):
        with environment(SUBULP_BACKEND=backend):
            found = logistic_(z, Positives(rows, columns), 1.0, gradient=False, loss=True)
        torch.testing.assert_close(found.sum(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("place", [(-1, 0), (3, 0), (0, -1), (0, 2), (2**62, 0)], ids=str)
def test_positives_outside_touch_nothing(place):
    z = torch.ones(3, 2)
    row, column = (torch.tensor([k]) for k in place)
    refused = pytest.raises(ValueError, match="a positive is outside of the 3 x 2 logits")
    with environment(SUBULP_BACKEND="cpu"), refused:
        logistic_(z, Positives(row, column), 1.0, gradient=True, loss=False)
    assert torch.equal(z, torch.ones(3, 2))

"""The logistic function: against double precision, and the same bits wherever it is computed."""

from __future__ import annotations

import math

import pytest
import torch

from subulp.numerics.logistic import sigmoid, softplus
from subulp.ops.head.logistic import logistic_

from .support import environment, isas


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
    sums = logistic_(z.view(2, 1), 1.0, gradient=True, loss=True, narrow=True)
    assert z.isnan().tolist() == sums.isnan().tolist() == [True, False]


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
    for gradient in (True, False):
        for loss in (True, False):
            results = []
            for variables in (
                {"SUBULP_BACKEND": "reference"},
                {"SUBULP_BACKEND": "cpu", "SUBULP_ISA": isa},
            ):
                with environment(**variables):
                    out = z.clone()
                    results.append(
                        (out, logistic_(out, gain, gradient=gradient, loss=loss, narrow=narrow))
                    )
            (a, sums), (b, others) = results
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
            assert (sums is None) == (others is None) == (not loss)
            if loss:
                assert torch.equal(sums.view(torch.int64), others.view(torch.int64))
            if not gradient:
                assert torch.equal(a.view(torch.int32), z.view(torch.int32))
            elif narrow:
                exact = sigmoid(z.bfloat16().float()) * gain
                assert torch.equal(a, exact.bfloat16().float())

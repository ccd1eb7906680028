"""Histograms of exponents against Python's own floating-point numbers."""

import math
from collections import Counter

import pytest
import torch

from subulp import nn, numerics, optim
from subulp.diagnostics import exponent_histogram


def naive(values):
    finite = [v for v in values if math.isfinite(v) and v != 0]
    return dict(sorted(Counter(math.frexp(v)[1] - 1 for v in finite).items()))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_exponents_of_every_dtype(dtype):
    torch.manual_seed(0)
    x = (torch.randn(500, dtype=torch.float64) * 2.0 ** torch.randint(-9, 8, (500,))).to(dtype)
    found = exponent_histogram(x)
    assert found.counts == naive(x.double().tolist())
    assert found.total == 500
    assert sum(found.shares().values()) == pytest.approx(1 - found.zeros / 500)


def test_powers_of_two_and_their_neighbours():
    x = torch.tensor([2.0**-149, 2.0**-126, 1.0, 2.0, -2.0, 2.0**127])
    x = torch.cat([x, torch.tensor([math.nextafter(2.0, 0)], dtype=torch.float64).float()])
    neighbours = torch.nextafter(torch.tensor([1.0, 4.0]), torch.zeros(2))
    found = exponent_histogram(torch.cat([x, neighbours]))
    assert found.counts == {-149: 1, -126: 1, -1: 1, 0: 1, 1: 4, 127: 1}


def test_zeros_and_what_is_not_finite_are_counted_apart():
    found = exponent_histogram(torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.0]))
    assert (found.zeros, found.nonfinite, found.counts) == (2, 3, {1: 1})
    assert exponent_histogram(torch.empty(0)).total == 0


def test_histograms_add_up():
    x = torch.randn(100)
    parts = exponent_histogram(x[:30]) + exponent_histogram(x[30:])
    assert parts == exponent_histogram(x) == exponent_histogram([x[:50], x[50:].view(5, 10)])


def test_slices_change_nothing(monkeypatch):
    x = torch.randn(100)
    whole = exponent_histogram(x)
    monkeypatch.setattr("subulp.diagnostics.exponents._SLICE", 7)
    assert exponent_histogram(x) == whole


def test_a_module_counts_all_its_parameters_and_its_rows_as_weights():
    model = torch.nn.ModuleDict(
        {
            "linear": torch.nn.Linear(5, 3),
            "head": nn.ExtremeClassifier(5, 40, scale="table", head_fraction=1.0, seed=0),
        }
    )
    values = [p.flatten() for p in model["linear"].parameters()]
    values.append(model["head"].weight(torch.arange(40)).flatten())
    assert exponent_histogram(model) == exponent_histogram(values)


def test_gradients():
    model = torch.nn.Linear(4, 3)
    with pytest.raises(ValueError, match="there are no gradients to count"):
        exponent_histogram(model, gradients=True)
    model(torch.randn(2, 4)).square().sum().backward()
    grads = [model.weight.grad, model.bias.grad]
    assert exponent_histogram(model, gradients=True) == exponent_histogram(grads)
    assert exponent_histogram(model.weight, gradients=True) == exponent_histogram(grads[0])


def test_ranges_are_the_papers():
    """E4M3: [-9, 8]; E5M2: [-16, 15]."""
    for format, low, high in ((numerics.E4M3, -9, 8), (numerics.E5M2, -16, 15)):
        exponents = [low - 1, low, high, high + 1]
        x = torch.tensor([0.0, math.nan, *(1.5 * 2.0**e for e in exponents)])
        shares = exponent_histogram(x).under(format)
        assert shares == pytest.approx((1 / 6, 1 / 6, 2 / 6, 1 / 6, 1 / 6))


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"dtype torch.int64: exponents are those of floating"):
        exponent_histogram(torch.arange(3))


@pytest.mark.parametrize("storage", ["int8", "bf16", "fp32"])
def test_rows_in_a_cache_count_as_they_are_there(storage):
    """Those are the rows that train; what is stored of them is out of date until they leave."""
    bag = nn.CachedEmbeddingBag(200, 8, storage, cache_fraction=0.1, seed=0)
    optim.RowSGD(bag, lr=50.0)
    for _ in range(3):
        bag(torch.arange(20).view(4, 5)).sum().backward()
    found = exponent_histogram(bag)
    assert found == exponent_histogram(bag.weight_fp32())
    bag.flush()
    if storage == "fp32":
        assert exponent_histogram(bag) == found

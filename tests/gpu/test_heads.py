"""Heads and narrow layers on a GPU, where matrix products round in an order of their own."""

from __future__ import annotations

import pytest
import torch

from subulp import nn, optim
from subulp.numerics.mixture import ALWAYS_E5M2
from tests.ops.support import environment

from .places import on_both, on_every_device, same_bits

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
OPTIONS = {"dropout": 0.3}, {"head_fraction": 0.3, "label_counts": torch.arange(70)}


def one_hot(place: torch.device, dim: int) -> torch.Tensor:
    """Inputs of which the products round nothing but their result."""
    x = torch.zeros(1, dim, device=place)
    x[0, 1], x[0, dim - 2] = 1.0, -0.5
    return x.requires_grad_()


@on_every_device
@pytest.mark.parametrize("products", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("loss", [True, False])
def test_a_step_has_the_cpus_bits(device, products, loss):
    def train(place):
        head = nn.ExtremeClassifier(
            32, 70, storage="e4m3", chunks=3, seed=1, products=products, device=place
        )
        optim.RowSGD(head, lr=0.5)
        x, positives = one_hot(place, 32), torch.tensor([3, 40, 69], device=place)
        value = head(x, torch.zeros_like(positives), positives, loss=loss)
        value.backward()
        return [head.weight(torch.arange(70, device=place)), x.grad, value.detach()]

    expected, found = on_both(device, train)
    assert same_bits(expected[0], found[0])
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-2, atol=1e-4)
    if loss:
        assert same_bits(expected[2], found[2])


@on_every_device
@pytest.mark.parametrize("options", OPTIONS, ids=["dropout", "remainder"])
def test_what_has_no_kernel_of_its_own(device, options):
    def train(place):
        head = nn.ExtremeClassifier(32, 70, seed=1, products="fp32", device=place, **options)
        optim.RowSGD(head, lr=0.5)
        x, positives = one_hot(place, 32), torch.tensor([3, 40, 69], device=place)
        head(x, torch.zeros_like(positives), positives).backward()
        return head.weight(torch.arange(70, device=place))

    expected, found = on_both(device, train)
    # A sum in another order may round to the neighbouring number of E4M3.
    torch.testing.assert_close(found.cpu(), expected, rtol=0.125, atol=2.0**-9)
    assert (found.cpu() != expected).float().mean() < 0.01


@on_every_device
@pytest.mark.parametrize("count", [0, 1])
def test_few_positives_and_instances(device, count):
    def train(place):
        head = nn.ExtremeClassifier(32, 70, chunks=2, seed=1, products="fp32", device=place)
        optim.RowSGD(head, lr=0.5)
        x, none = one_hot(place, 32)[:count], torch.zeros(0, dtype=torch.int64, device=place)
        value = head(x, none, none, loss=True)
        value.backward()
        return [head.weight(torch.arange(70, device=place)), value.detach()]

    for a, b in zip(*on_both(device, train), strict=True):
        assert same_bits(a, b)


@on_every_device
def test_the_reference_gets_a_chunks_own_positives(device):
    def train(place):
        head = nn.ExtremeClassifier(32, 70, chunks=7, seed=1, products="fp32", device=place)
        optim.RowSGD(head, lr=0.5)
        positives = torch.tensor([3, 40, 69], device=place)
        value = head(one_hot(place, 32), torch.zeros_like(positives), positives, loss=True)
        value.backward()
        return [head.weight(torch.arange(70, device=place)), value.detach()]

    expected = train(torch.device("cpu"))
    with environment(SUBULP_BACKEND="reference"):
        found = train(torch.device(device))
    for a, b in zip(expected, found, strict=True):
        assert same_bits(a, b)


@on_every_device
def test_topk(device):
    def best(place):
        head = nn.ExtremeClassifier(32, 70, storage="e4m3", seed=1, products="fp32", device=place)
        return head.topk(one_hot(place, 32).detach(), 5)

    (values, labels), (found, its) = on_both(device, best)
    assert same_bits(labels, its)
    torch.testing.assert_close(found.cpu(), values)


@on_every_device
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_linear_layers(device, dtype):
    def compute(place):
        torch.manual_seed(0)
        layer = nn.Linear(32, 16).to(dtype).to(place)
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(BF16).to(place)
        x.requires_grad_()
        layer(x).float().sum().backward()
        return [x.grad.float(), layer.weight.grad.float()]

    for a, b in zip(*on_both(device, compute), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0.1, atol=0.05)


@on_every_device
@pytest.mark.parametrize("partition", ["tensor", "block-128x128"])
@pytest.mark.parametrize("gradients", [None, ALWAYS_E5M2], ids=["alike", "by role"])
def test_mixtures(device, gradients, partition):
    roles = {} if gradients is None else {"output gradient": nn.MoR(gradients, partition)}

    def compute(place):
        torch.manual_seed(0)
        mor = nn.MoR("tensor", partition, roles=roles)
        layer = nn.MoRLinear(64, 32, mor=mor).to(BF16).to(place)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(BF16).to(place)
        x.requires_grad_()
        layer(x).float().square().sum().backward()
        return [x.grad.float(), layer.weight.grad.float()]

    for a, b in zip(*on_both(device, compute), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0.1, atol=0.1)

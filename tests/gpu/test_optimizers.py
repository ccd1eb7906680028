"""Optimizers on a GPU take the CPU's steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subulp import optim

from .places import kernels_of, on_both, on_every_device, same_bits, tensors_of

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SHAPES = ((1030,), (3, 5), ())
CASES = (
    (optim.AdamW, BF16, "collage-plus"),
    (optim.AdamW, BF16, "kahan"),
    (optim.AdamW, FP16, "extra-bits-8"),
    (optim.AdamW, E4M3, "stochastic"),
    (optim.AdamW, torch.float32, "fp32"),
    (optim.SGD, BF16, "collage-light"),
    (optim.SGD, E4M3, "nearest"),
)


def gradients(dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


class Sum(nn.Module):
    """Parameters whose gradients are numbers that are given."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        starts = gradients(dtype, 0)
        self.params = nn.ParameterList(nn.Parameter(t.to(device)) for t in starts)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        terms = [(p.float() * g.float()).sum() for p, g in zip(self.params, gradients, strict=True)]
        return torch.stack(terms).sum()


def made(kind, module, precision):
    options = {"momentum": 0.9} if kind is optim.SGD else {}
    return kind(module.parameters(), lr=0.01, precision=precision, seed=0, **options)


@on_every_device
@pytest.mark.parametrize(("kind", "dtype", "precision"), CASES, ids=str)
def test_steps(device, kind, dtype, precision):
    def train(place):
        module = Sum(dtype, place)
        optimizer = made(kind, module, precision)
        for step in range(1, 4):
            for p, g in zip(module.params, gradients(dtype, step), strict=True):
                p.grad = g.to(place)
            optimizer.step()
        return tensors_of([module.state_dict(), optimizer.state_dict()["state"]])

    for a, b in zip(*on_both(device, train), strict=True):
        assert same_bits(a, b)


@on_every_device
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_fused_backward(device, dtype):
    def train(place):
        module = Sum(dtype, place)
        optimizer = made(optim.AdamW, module, "collage-plus")
        with optim.fuse_backward(module, optimizer):
            for step in range(1, 4):
                module([g.to(place) for g in gradients(dtype, step)]).backward()
                optimizer.step()
        return tensors_of([module.state_dict(), optimizer.state_dict()["state"]])

    for a, b in zip(*on_both(device, train), strict=True):
        assert same_bits(a, b)


@on_every_device
def test_a_state_dict_goes_on_elsewhere(device):
    def halfway(place):
        module = Sum(BF16, place)
        optimizer = made(optim.AdamW, module, "collage-plus")
        go_on(module, optimizer, (1, 2))
        return module, optimizer

    def go_on(module, optimizer, steps):
        for step in steps:
            for p, g in zip(module.params, gradients(BF16, step), strict=True):
                p.grad = g.to(p.device)
            optimizer.step()

    module, optimizer = halfway(torch.device("cpu"))
    with kernels_of(device) as place:
        other, its = halfway(place)
        saved = other.state_dict(), its.state_dict()
    fresh = Sum(BF16, torch.device("cpu"))
    fresh_optimizer = made(optim.AdamW, fresh, "collage-plus")
    fresh.load_state_dict(saved[0])
    fresh_optimizer.load_state_dict(saved[1])
    go_on(module, optimizer, (3,))
    go_on(fresh, fresh_optimizer, (3,))
    for a, b in zip(module.params, fresh.params, strict=True):
        assert same_bits(a, b)

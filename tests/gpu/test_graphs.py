"""CUDA graphs of steps replay the CPU's steps."""

from __future__ import annotations

import pytest
import torch

from subulp import optim

from .places import same_bits, tensors_of
from .test_optimizers import BF16, E4M3, SHAPES, Sum, gradients

pytestmark = pytest.mark.gpu

CASES = (
    (optim.AdamW, BF16, "collage-plus", {}),
    (optim.AdamW, BF16, "extra-bits-8-stochastic", {}),
    (optim.AdamW, E4M3, "stochastic", {}),
    (optim.Adam, torch.float32, "fp32", {"weight_decay": 0.1}),
    (optim.SGD, BF16, "kahan", {"momentum": 0.9, "nesterov": True}),
    (optim.SGD, E4M3, "stochastic", {"momentum": 0.9}),
)
RATES = (0.01, 0.02, 0.005, 1 / 3, 0.03)


def on_the_cpu(kind, dtype, precision, options):
    module = Sum(dtype, torch.device("cpu"))
    optimizer = kind(module.parameters(), lr=0.0, precision=precision, seed=0, **options)
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for p, g in zip(module.params, gradients(dtype, step), strict=True):
            p.grad = g
        optimizer.step()
    return tensors_of([module.state_dict(), optimizer.state_dict()["state"]])


def made(kind, dtype, precision, options):
    module = Sum(dtype, torch.device("cuda"))
    lr = torch.tensor(0.0, dtype=torch.float64, device="cuda")
    given = {"lr": lr, "precision": precision, "seed": 0, "capturable": True, **options}
    return module, kind(module.parameters(), **given), lr


def beside(call) -> None:
    """Warm up on another stream, as torch demands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize(("kind", "dtype", "precision", "options"), CASES, ids=str)
@pytest.mark.parametrize("warm", [1, 2])
def test_steps_whose_gradients_stay(kind, dtype, precision, options, warm):
    module, optimizer, lr = made(kind, dtype, precision, options)
    for p in module.params:
        p.grad = torch.empty_like(p)

    def bring(step):
        lr.fill_(RATES[step])
        for p, g in zip(module.params, gradients(dtype, step), strict=True):
            p.grad.copy_(g)

    def warm_up():
        for step in range(warm):
            bring(step)
            optimizer.step()

    beside(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(warm, len(RATES)):
        bring(step)
        graph.replay()
    found = tensors_of([module.state_dict(), optimizer.state_dict()["state"]])
    for a, b in zip(on_the_cpu(kind, dtype, precision, options), found, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize(("kind", "dtype", "precision", "options"), CASES, ids=str)
def test_whole_training_steps(kind, dtype, precision, options):
    """The graph's backward pass makes gradients of its own, at addresses of its own."""
    module, optimizer, lr = made(kind, dtype, precision, options)
    static = [torch.empty(shape, dtype=dtype, device="cuda") for shape in SHAPES]

    def bring(step):
        lr.fill_(RATES[step])
        for place, g in zip(static, gradients(dtype, step), strict=True):
            place.copy_(g)

    def train_step():
        optimizer.zero_grad(set_to_none=True)
        module(static).backward()
        optimizer.step()

    def warm_up():
        bring(0)
        train_step()

    beside(warm_up)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        train_step()
    for step in range(1, len(RATES)):
        bring(step)
        graph.replay()
    found = tensors_of([module.state_dict(), optimizer.state_dict()["state"]])
    for a, b in zip(on_the_cpu(kind, dtype, precision, options), found, strict=True):
        assert same_bits(a, b)


def test_a_first_step_is_refused():
    module, optimizer, _ = made(optim.AdamW, BF16, "collage-plus", {})
    for p in module.params:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in module.params]
    refused = pytest.raises(RuntimeError, match="take a step before the capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    torch.cuda.synchronize()
    assert all(map(same_bits, before, module.params))

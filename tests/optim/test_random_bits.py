"""Stochastic rounding in training: decided by seed, stream, step and element, by nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from subulp import optim
from tests.oracles import philox

from .support import BF16, Case, Run, assert_same, cases, same_bits

STOCHASTIC = [c for c in cases() if c.values[0].stochastic]


@pytest.fixture(autouse=True)
def _generator():
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@pytest.mark.parametrize("case", STOCHASTIC)
def test_seed(case):
    """Large enough that some element differs whatever the format."""
    shapes = [(2000,)]
    run = case.fresh(shapes, seed=1).train()
    assert_same(case.fresh(shapes, seed=1).train(), run)
    assert not same_bits(case.fresh(shapes, seed=2).train().params[0], run.params[0])


@pytest.mark.parametrize("case", [c for c in cases(["adamw"]) if not c.values[0].stochastic])
def test_seed_does_not_matter_elsewhere(case):
    assert_same(case.fresh(seed=1).train(), case.fresh(seed=2).train())


def test_default_seed_follows_torch():
    case = Case("adamw", "stochastic", BF16)
    seeds = []
    for seed in (0, 0, 1, 2**40 + 1):
        torch.manual_seed(seed)
        seeds.append(case.fresh(seed=None).optimizer.param_groups[0]["seed"])
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3
    # The state of the generator does not count, nor is it advanced.
    torch.manual_seed(0)
    torch.rand(5)
    before = torch.get_rng_state()
    run = case.fresh(seed=None)
    run.optimizer.step()
    assert run.optimizer.param_groups[0]["seed"] == seeds[0]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("precision", ["stochastic", "extra-bits-5-stochastic"])
def test_every_parameter_has_bits_of_its_own(precision):
    """Equal parameters with equal gradients, of one group and of two; each is rounded alone."""
    a, b, c = (nn.Parameter(torch.linspace(1, 2, 500).to(BF16)) for _ in range(3))
    opt = optim.SGD([{"params": [a, b]}, {"params": [c]}], lr=0.01, precision=precision, seed=4)
    for p in (a, b, c):
        p.grad = torch.full_like(p, 0.1)
    opt.step()
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)
    assert not torch.equal(a, c)


def test_every_step_has_bits_of_its_own():
    p = nn.Parameter(torch.ones(500).to(BF16))
    opt = optim.SGD([p], lr=0.01, precision="stochastic", seed=4)
    seen = []
    for _ in range(3):
        p.data.fill_(1.0)
        p.grad = torch.full_like(p, 0.1)
        opt.step()
        seen.append(p.detach().clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_bits_are_philox_of_seed_stream_step_and_element():
    """SGD under "stochastic" rounds up exactly where the oracle's bits say."""
    a, b = (nn.Parameter(torch.ones(40).to(BF16)) for _ in range(2))
    opt = optim.SGD([a, b], lr=2.0**-9, precision="stochastic", seed=11)
    for p in (a, b):
        p.grad = torch.full_like(p, -1.0)
    opt.step()
    for stream, p in enumerate((a, b)):
        # 1 + 2**-9 lies a quarter of the way to the next BF16.
        words = [philox.draw(i, seed=11, stream=stream, step=1, width=16) for i in range(40)]
        up = torch.tensor([2**30 + word >= 2**32 for word in words])
        assert torch.equal(p > 1, up)
        assert 0 < up.sum() < 40


@pytest.mark.parametrize("case", [c for c in STOCHASTIC if c.values[0].optimizer == "adamw"])
def test_threads_do_not_matter(case):
    results = []
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(case.fresh([(40_001,), (77, 33)]).train(2).bits())
    finally:
        torch.set_num_threads(before)
    assert_same(*results)


def test_streams_are_places_among_all_parameters():
    """A parameter without gradient keeps its place, so the others' bits do not depend on it."""
    case = Case("adamw", "stochastic", BF16)
    both, second = case.fresh([(300,), (300,)]).train(1), case.fresh([(300,), (300,)])
    second.params[1].grad = both.params[1].grad
    second.optimizer.step()
    assert same_bits(second.params[1], both.params[1])
    alone = Run([nn.Parameter(case.fresh([(300,), (300,)]).params[1].detach())], None)
    alone.optimizer = case.make(alone.params)
    alone.params[0].grad = both.params[1].grad
    alone.optimizer.step()
    assert not same_bits(alone.params[0], both.params[1])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("precision", ["stochastic", "extra-bits-5-stochastic"])
def test_counts_that_fp32_cannot_go_on_from(precision, many):
    """Beyond 2**24 each step would draw the bits of the one before, and add up its roundings."""
    params = [nn.Parameter(torch.ones(500).to(BF16)) for _ in range(20 if many else 1)]
    opt = optim.SGD(params, lr=1e-4, precision=precision, seed=0)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    opt.step()
    for p in params:
        opt.state[p]["step"].fill_(2.0**24 - 2)
    rounds = []
    for _ in range(4):
        for p in params:
            p.data.fill_(1.0)
        opt.step()
        rounds.append(opt.wide_value(params[0]).clone())
    assert int(opt.state[params[0]]["step"]) == 2**23 + 3
    assert all(not same_bits(a, b) for a, b in pairwise(rounds))

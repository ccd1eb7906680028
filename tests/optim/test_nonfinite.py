"""Gradients that are not finite are a policy; nothing is half updated under any."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from subulp import optim

from .support import BF16, E4M3, FP16, FP32, Case, Run, assert_same, gradient, parameters, unchanged

BAD = [float("nan"), float("inf"), -float("inf")]
CASES = [
    Case("adamw", "fp32", FP32),
    Case("adamw", "collage-plus", BF16),
    Case("sgd-momentum", "stochastic", FP16),
    Case("adamw", "collage-light", E4M3),
    Case("adam", "extra-bits-5-stochastic", BF16),
]


def spoil(run: Run, value: float, index: int = 1) -> None:
    """The gradients of a next step, one element of one of them not finite.

    E4M3 has no infinity, and torch's cast to it saturates: there the element is NaN.
    """
    for i, p in enumerate(run.params):
        p.grad = gradient(p, run.t + 1, i)
    flat = run.params[index].grad.float().flatten()
    p = run.params[index]
    flat[-1] = value if p.dtype != E4M3 else torch.nan
    p.grad = flat.view(p.shape).to(p.dtype)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_raise(case, value):
    run = case.fresh(nonfinite="raise").train(2)
    spoil(run, value)
    message = (
        r"gradient of parameter 1 of group 0 \(shape \(33,\)\) has NaN or infinite values; nothing "
        "was updated.*nonfinite='skip'"
    )
    with unchanged(run), pytest.raises(FloatingPointError, match=message):
        run.optimizer.step()
    assert_same(run.train(2), case.fresh().train(4))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_raise_at_the_first_step(case):
    """No state comes to be, so that training begins with weights loaded after the error."""
    run = case.fresh(nonfinite="raise")
    spoil(run, float("nan"))
    with unchanged(run), pytest.raises(FloatingPointError, match="parameter 1"):
        run.optimizer.step()
    assert not any(p in run.optimizer.state for p in run.params)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_skip(case, value):
    run = case.fresh(nonfinite="skip").train(2)
    before = run.bits()
    for count in (1, 2):
        spoil(run, value)
        run.optimizer.step()
        assert_same(run, before)
        assert run.optimizer.skipped_steps == count
    # Random bits continue from the counted steps, so that nothing tells of the ones left out.
    assert_same(run.train(2), case.fresh().train(4))


def test_skipped_steps_are_kept():
    run = CASES[1].fresh(nonfinite="skip").train(1)
    spoil(run, float("nan"))
    run.optimizer.step()
    other = CASES[1].fresh(nonfinite="skip").train(1)
    assert other.optimizer.skipped_steps == 0
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    assert other.optimizer.skipped_steps == 1
    assert copy.deepcopy(other.optimizer).skipped_steps == 1


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_propagate(case):
    """As in torch.optim: the element is lost, the others go on."""
    run, expected = case.fresh().train(2), case.fresh().train(3)
    spoil(run, float("nan"))
    run.optimizer.step()
    run.t += 1
    spoiled = run.params[1].detach()
    assert spoiled[-1].isnan()
    assert torch.equal(spoiled[:-1], expected.params[1].detach()[:-1])
    assert run.optimizer.skipped_steps == 0


# ----------------------------------------------------------------------------- several groups


def two_groups(first: str, second: str) -> Run:
    a, b, c = parameters(BF16, [(3,), (4,), (5,)])
    groups = [{"params": [a], "nonfinite": first}, {"params": [b, c], "nonfinite": second}]
    return Run([a, b, c], optim.AdamW(groups, precision="collage-plus", seed=1))


def test_one_group_that_skips_leaves_the_whole_step_out():
    run = two_groups("propagate", "skip").train(1)
    before = run.bits()
    spoil(run, float("inf"), 2)
    run.optimizer.step()
    assert_same(run, before)
    assert run.optimizer.skipped_steps == 1


def test_skips_of_different_groups_add_up():
    run = two_groups("skip", "skip").train(1)
    for index in (0, 2):
        spoil(run, float("nan"), index)
        run.optimizer.step()
    assert run.optimizer.skipped_steps == 2


def test_a_group_that_raises_wins_over_one_that_skips():
    run = two_groups("skip", "raise").train(1)
    spoil(run, float("nan"), 2)
    run.params[0].grad.fill_(torch.nan)
    with unchanged(run), pytest.raises(FloatingPointError, match="parameter 1 of group 1"):
        run.optimizer.step()


def test_a_group_that_propagates_is_not_looked_at():
    run = two_groups("propagate", "raise").train(1)
    spoil(run, float("nan"), 0)
    run.optimizer.step()
    assert run.params[0].isnan().any()
    assert run.optimizer.state[run.params[2]]["step"] == 2


def test_names_are_used():
    net = nn.Linear(2, 2)
    opt = optim.SGD(net.named_parameters(), nonfinite="raise")
    net.weight.grad, net.bias.grad = torch.zeros(2, 2), torch.tensor([0.0, torch.nan])
    with pytest.raises(FloatingPointError, match="gradient of parameter 'bias' of group 0"):
        opt.step()

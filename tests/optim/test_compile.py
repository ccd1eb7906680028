"""Compiled training steps: the same bits, and no compilation after the first steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .support import Case, Run, assert_same, batch, cases

# Dynamo looks at every local variable where it resumes after backward(), the loss among them.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

# The step runs between graphs whatever the strategy: one case for each kind of state.
TRAINABLE = [
    Case("adamw", "fp32", torch.float32),
    Case("adamw", "stochastic", torch.bfloat16),
    Case("adamw", "collage-plus", torch.bfloat16),
    Case("adamw", "extra-bits-8", torch.float16),
    Case("sgd-momentum", "kahan", torch.bfloat16),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(case: Case, wrap, *, nonfinite: str = "propagate") -> Run:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).to(case.dtype)
    opt = case.make(net.parameters(), nonfinite=nonfinite)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

    def step(x):
        net(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()

    step = wrap(step)
    for t in range(5):
        # The first step makes states, the second sees that they exist.
        with torch._dynamo.config.patch(error_on_recompile=t >= 2):
            step(batch(t).to(case.dtype))
        schedule.step()
    return Run(list(net.parameters()), opt)


@pytest.mark.parametrize("case", TRAINABLE, ids=str)
def test_compiled_training_step(case):
    """Also under a schedule: a new learning rate is no reason to compile again."""
    compiled = train(case, lambda f: torch.compile(f, backend="aot_eager"))
    assert_same(compiled, train(case, lambda f: f))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_a_step_in_a_compiled_loop_warns_of_nothing(capfd):
    """Torch's own steps do, of the profiler that Dynamo leaves out. Hooks are called."""
    torch._logging._internal.warning_once.cache_clear()
    calls = []
    registers = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    hooks = [register(lambda *_: calls.append(1)) for register in registers]
    try:
        train(TRAINABLE[2], lambda f: torch.compile(f, backend="eager"))
    finally:
        for hook in hooks:
            hook.remove()
    assert len(calls) == 10
    assert "will be ignored" not in capfd.readouterr().err


def test_a_graph_that_must_be_one_has_no_place_for_a_step():
    run = TRAINABLE[2].fresh([(5,)])
    whole = torch.compile(run.optimizer.step, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it runs between graphs: call it out"):
        whole()


def test_compiled_step_with_policy():
    """Whether a step is left out depends on the gradients' values: no graph decides it."""
    case = Case("adamw", "collage-plus", torch.bfloat16)
    compiled = train(case, lambda f: torch.compile(f, backend="aot_eager"), nonfinite="skip")
    assert_same(compiled, train(case, lambda f: f))


@pytest.mark.parametrize("case", cases(["adamw"], ["collage-plus", "fp32", "stochastic"]))
def test_compiled_optimizer_step(case):
    run, expected = case.fresh(), case.fresh().train(4)
    eager = run.optimizer.step
    run.optimizer.step = torch.compile(eager, backend="aot_eager")
    run.train(2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        run.train(2)
    assert_same(run, expected)


def test_compiled_closure():
    case = Case("sgd", "kahan", torch.bfloat16)
    run, expected = case.fresh([(5,)]), case.fresh([(5,)])
    for each, wrap in ((run, lambda f: torch.compile(f, backend="aot_eager")), (expected, None)):
        (p,) = each.params

        def closure(p=p, opt=each.optimizer):
            opt.zero_grad()
            loss = p.square().sum()
            loss.backward()
            return loss

        step = wrap(each.optimizer.step) if wrap else each.optimizer.step
        losses = [step(closure).detach().item() for _ in range(3)]
        assert losses[2] < losses[0]
    assert_same(run, expected)

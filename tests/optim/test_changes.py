"""Options and precisions that change between steps, and steps that are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from subulp import optim

from .support import BF16, FP16, gradient, same_bits


def pair(dtype: torch.dtype, **options: object) -> tuple[list[nn.Parameter], optim.AdamW]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(9, generator=generator).to(dtype)) for _ in range(2)]
    groups = [{"params": [p]} for p in params]
    return params, optim.AdamW(groups, lr=0.01, seed=2, **options)


def give_gradients(params: list[nn.Parameter], t: int) -> None:
    for i, p in enumerate(params):
        p.grad = gradient(p, t, i)


# ------------------------------------------------------------------------- all or nothing

BREAKING = {
    "betas": lambda g: g.update(betas=(2.0, 0.5)),
    "nonfinite": lambda g: g.update(nonfinite="x"),
    "arithmetic": lambda g: g.update(arithmetic="loose"),
    "seed": lambda g: g.update(seed=-1),
    "precision": lambda g: g.update(precision="collage"),
    "strict": lambda g: g.update(precision="master", arithmetic="strict"),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", BREAKING)
def test_a_wrong_option_of_the_last_group_leaves_the_first_alone(name: str, fused: bool) -> None:
    params, optimizer = pair(BF16)
    give_gradients(params, 1)
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy([params, optimizer.state_dict()["state"]])
    BREAKING[name](optimizer.param_groups[1])
    module = nn.ParameterList(params)
    if fused:
        optim.fuse_backward(module, optimizer)
    loss = sum((p.float() ** 2).sum() for p in params)
    if not fused:
        give_gradients(params, 2)
    with pytest.raises(ValueError, match=r"unknown|out of range|not available"):
        loss.backward() if fused else optimizer.step()
    for p, q in zip(params, before[0], strict=True):
        assert same_bits(p.detach(), q.detach())
    for p, state in zip(params, before[1].values(), strict=True):
        for key, value in state.items():
            assert same_bits(optimizer.state[p][key], value), key


def test_a_damaged_state_of_the_last_group_leaves_the_first_alone() -> None:
    params, optimizer = pair(BF16)
    give_gradients(params, 1)
    optimizer.step()
    before = params[0].detach().clone()
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(3, dtype=BF16)
    with pytest.raises(ValueError, match="exp_avgs"):
        optimizer.step()
    assert same_bits(params[0].detach(), before)
    assert optimizer.state[params[0]]["step"] == 1


# ------------------------------------------------------------------- precision changed meanwhile


def changed(before: str, after: str, dtype: torch.dtype) -> tuple[nn.Parameter, optim.AdamW]:
    params, optimizer = pair(dtype, precision=before)
    for t in (1, 2, 3):
        give_gradients(params, t)
        optimizer.step()
    optimizer.param_groups[1]["precision"] = after
    return params[1], optimizer


def wide_moments(optimizer: optim.AdamW, p: Tensor) -> list[Tensor]:
    state = optimizer.state[p]
    zero = torch.zeros(p.shape)
    return [
        state["exp_avg"].float(),
        state["exp_avg_sq"].float() + state.get("exp_avg_sq_low", zero).float(),
    ]


EXACT = [
    ("stochastic", "collage-plus", BF16),
    ("nearest", "master", BF16),
    ("collage-plus", "master", BF16),
    ("kahan", "master", FP16),
    ("extra-bits-5", "extra-bits-9", BF16),
    ("extra-bits-8-truncate", "master", BF16),
    ("extra-bits-8", optim.ExtraBits(16), BF16),
    ("nearest", "collage-plus", torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("before", "after", "dtype"), EXACT, ids=str)
def test_a_wider_precision_takes_everything_over(before, after, dtype) -> None:
    p, optimizer = changed(before, before, dtype)
    value, moments = optimizer.wide_value(p).clone(), wide_moments(optimizer, p)
    q, other = changed(before, after, dtype)
    assert torch.equal(other.wide_value(q), value)
    assert all(torch.equal(a, b) for a, b in zip(wide_moments(other, q), moments, strict=True))
    assert other.state[q]["step"] == 3
    # And it can be saved, and trained on.
    fresh = pair(dtype, precision=before)[1]
    fresh.param_groups[1]["precision"] = optim.parse_precision(after)
    fresh.load_state_dict(other.state_dict())
    give_gradients([q], 4)
    other.step()
    assert other.state[q]["step"] == 4


@pytest.mark.parametrize(
    ("before", "after"),
    [("master", "nearest"), ("collage-plus", "nearest"), ("extra-bits-9", "extra-bits-5")],
)
def test_a_narrower_precision_is_refused(before: str, after: str) -> None:
    p, optimizer = changed(before, after, BF16)
    state = copy.deepcopy(dict(optimizer.state[p]))
    give_gradients([p], 4)
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.wide_value(p)):
        with pytest.raises(ValueError, match=f"changed from '{before}' to '{after}'.*cannot hold"):
            call()
    assert all(same_bits(optimizer.state[p][name], value) for name, value in state.items())
    optimizer.param_groups[1]["precision"] = before
    optimizer.step()


def test_a_changed_precision_survives_a_copy() -> None:
    _, optimizer = changed("master", "nearest", BF16)
    twin = copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="cannot hold"):
        twin.step()


# ------------------------------------------------------------------------------- momentum


def sgd_like_torch(schedule: list[float], late: bool) -> None:
    """Momentum that changes between steps, beside torch.optim.SGD."""
    torch.manual_seed(0)
    start = [torch.randn(7) for _ in range(2)]
    ours, theirs = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    options = {"lr": 0.1, "momentum": schedule[0], "dampening": 0.4}
    optimizers = optim.SGD(ours, **options), torch.optim.SGD(theirs, **options)
    for t, momentum in enumerate(schedule):
        for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
            optimizer.param_groups[0]["momentum"] = momentum
            for i, p in enumerate(params):
                # With ``late`` the second parameter has no gradient at first.
                p.grad = gradient(p, t, i) if t > 1 or i == 0 or not late else None
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-7, atol=1e-8)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [[0.9, 0.9, 0.0, 0.0, 0.9], [0.0, 0.0, 0.5, 0.9, 0.9], [0.9, 0.0, 0.0, 0.5, 0.0]],
    ids=str,
)
def test_momentum_that_comes_and_goes(schedule: list[float], late: bool) -> None:
    sgd_like_torch(schedule, late)


def test_a_refused_step_does_not_start_the_momentum() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    twin = copy.deepcopy(params)
    groups = [{"params": [p], "momentum": 0.0, "dampening": 0.5} for p in params]
    optimizer = optim.SGD(groups, lr=0.1)
    other = optim.SGD([{"params": [p], "momentum": 0.0, "dampening": 0.5} for p in twin], lr=0.1)
    for t in (1, 2, 3):
        give_gradients(params, t)
        give_gradients(twin, t)
        for o in (optimizer, other):
            if t == 2:
                o.param_groups[0]["momentum"] = 0.9
        if t == 2:
            optimizer.param_groups[1]["nonfinite"] = "x"
            with pytest.raises(ValueError, match="nonfinite"):
                optimizer.step()
            optimizer.param_groups[1]["nonfinite"] = "propagate"
        optimizer.step()
        other.step()
    for p, q in zip(params, twin, strict=True):
        assert same_bits(p.detach(), q.detach())


# ----------------------------------------------------------------------- before any gradient


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_before_any_backward_pass_can_be_saved(fused: bool) -> None:
    params, optimizer = pair(BF16)
    handle = optim.fuse_backward(nn.ParameterList(params), optimizer) if fused else None
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    if handle:
        handle.remove()
    _, other = pair(BF16)
    other.load_state_dict(saved)
    give_gradients(params, 1)
    optimizer.step()
    twins, third = pair(BF16)
    third.load_state_dict(saved)
    give_gradients(twins, 1)
    third.step()
    for p, q in zip(params, twins, strict=True):
        assert same_bits(p.detach(), q.detach())


def test_a_step_without_gradients_of_a_local_variable() -> None:
    """The garbage collector does not know the variables of functions that are running."""
    w = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([w])
    optimizer.step()
    w.grad = torch.ones(3)
    optimizer.step()
    assert int(optimizer.state[w]["step"]) == 1


def test_a_step_without_gradients_of_nobodys_parameters() -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.ones(3)) for _ in range(2)])
    with pytest.raises(RuntimeError, match="nothing else has them"):
        optimizer.step()


# --------------------------------------------------------------------------- inference mode


@pytest.mark.parametrize("what", ["load_state_dict", "the first step"])
@pytest.mark.parametrize("precision", ["nearest", "collage-plus", "extra-bits-8"])
def test_states_made_in_inference_mode_can_be_stepped(what: str, precision: str) -> None:
    """As in evaluation loops that load a checkpoint; torch fails in the next step."""
    (params, optimizer), (twins, plain) = (pair(BF16, precision=precision) for _ in range(2))
    for t in (1, 2, 3):
        give_gradients(params, t)
        give_gradients(twins, t)
        with torch.inference_mode(what == "the first step" and t == 1):
            optimizer.step()
        plain.step()
        if what == "load_state_dict" and t == 1:
            with torch.inference_mode():
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(params, twins, strict=True):
        assert same_bits(p.detach(), q.detach())


@pytest.mark.parametrize("what", ["precision", "layout"])
@pytest.mark.parametrize("arithmetic", ["wide", "strict"])
def test_states_changed_in_inference_mode_can_be_stepped(what: str, arithmetic: str) -> None:
    found = []
    for inference in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 6).bfloat16()) for _ in range(2)]
        groups = [{"params": [p]} for p in params]
        optimizer = optim.AdamW(groups, precision="collage-light", arithmetic=arithmetic, eps=1e-6)
        for t in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            if t == 0 and what == "layout":
                params[1].data = params[1].data.t().contiguous().t()
            with torch.inference_mode(inference):
                if t == 0 and what == "precision":
                    optimizer.change_precision("collage-plus", group=1)
                optimizer.wide_value(params[1])
        found.append(params)
    for p, q in zip(*found, strict=True):
        assert same_bits(p.detach(), q.detach())


def test_parameters_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"was made under torch\.inference_mode"):
        optim.AdamW([p])


# ------------------------------------------------------------------------------- by hand


def test_momentum_raised_before_a_checkpoint() -> None:
    """The next step begins it, before the checkpoint and after."""
    w = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([w], lr=0.125)
    w.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    saved = copy.deepcopy(optimizer.state_dict())
    v = nn.Parameter(w.detach().clone())
    other = optim.SGD([v], lr=0.125)
    other.load_state_dict(saved)
    for p, o in ((w, optimizer), (v, other)):
        p.grad = torch.ones(3)
        o.step()
    assert same_bits(w.detach(), v.detach())
    assert same_bits(optimizer.state[w]["momentum_buffer"], other.state[v]["momentum_buffer"])
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = state["state"][0].pop("momentum_buffer")
    with pytest.raises(ValueError, match="another optimizer saved it"):
        other.load_state_dict(state)


@pytest.mark.parametrize("change", ["pop", "append"])
def test_a_list_of_groups_changed_by_hand_is_refused(change: str) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([{"params": [a]}, {"params": [b]}])
    a.grad = b.grad = torch.ones(2)
    if change == "pop":
        optimizer.param_groups.pop()
    else:
        more = {**optimizer.param_groups[0], "params": [nn.Parameter(torch.ones(2))]}
        optimizer.param_groups.append(more)
    with pytest.raises(RuntimeError, match="param_groups was changed by hand"):
        optimizer.step()
    assert a.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("named", [True, False])
def test_a_parameter_put_into_a_second_group_is_refused(named: bool) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([{"params": [("a", a)]}, {"params": [("b", b)]}])
    a.grad = b.grad = torch.ones(2)
    optimizer.param_groups[1]["params"].append(a)
    if named:
        optimizer.param_groups[1]["param_names"].append("a")
    place = "'a'" if named else "1 of group 1"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"parameter {place} is in group 0 too, and would"):
            optimizer.step()
    assert a.tolist() == b.tolist() == [1.0, 1.0]
    optimizer.param_groups[1]["params"].pop()
    if named:
        optimizer.param_groups[1]["param_names"].pop()
    optimizer.step()
    assert a.tolist() != [1.0, 1.0]


@pytest.mark.parametrize("name", ["lr", "betas", "maximize", "seed", "precision"])
@pytest.mark.parametrize("stepped", [False, True])
def test_an_option_removed_from_a_group_is_refused(name: str, stepped: bool) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([{"params": [a]}, {"params": [b]}])
    a.grad = b.grad = torch.ones(2)
    if stepped:
        optimizer.step()
    before = a.detach().clone()
    option = optimizer.param_groups[1].pop(name)
    with pytest.raises(ValueError, match=rf"group 1 has no \['{name}'\]"):
        optimizer.step()
    assert torch.equal(a, before)
    optimizer.param_groups[1][name] = option
    optimizer.step()


NO_COUNTS = (-1.0, 0.5, float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("count", NO_COUNTS)
@pytest.mark.parametrize("many", [2, 20])
@pytest.mark.parametrize("stepped", [1, 3], ids=["prepared", "repeated"])
def test_a_step_counter_that_counts_no_steps_is_refused(
    count: float, many: int, stepped: int
) -> None:
    """Also where C++ counts them, and where a step repeats the one before it."""
    params = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(many)]
    optimizer = optim.AdamW(params, lr=0.1, precision="collage-light")
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(stepped):
        optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.state[params[1]]["step"].fill_(count)
    with pytest.raises(ValueError, match=rf"a step counter is {count}: expected how many steps"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert optimizer.state[params[0]]["step"] == stepped
    with pytest.raises(ValueError, match=rf"step in state_dict is {count}: expected how many"):
        optim.AdamW(params, precision="collage-light").load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("all_of_them", [False, True])
def test_what_others_put_into_states_is_refused(all_of_them: bool) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([a, b])
    a.grad = b.grad = torch.ones(2)
    optimizer.step()
    for p in (a, b) if all_of_them else (a,):
        optimizer.state[p]["age"] = 3
    before = a.detach().clone()
    with pytest.raises(ValueError, match="has 'age', of type int"):
        optimizer.step()
    assert same_bits(a.detach(), before)


# ------------------------------------------------------------------------------- arguments


def test_arguments_of_torch_at_their_defaults_change_nothing() -> None:
    runs = []
    options = {"foreach": None, "fused": None, "differentiable": False}
    for given in (
        {},
        options | {"amsgrad": False, "capturable": False},
        {"foreach": False, "fused": False},
    ):
        params, optimizer = pair(BF16, **given)
        give_gradients(params, 1)
        optimizer.step()
        runs.append([p.detach() for p in params])
        assert not set(options) & set(optimizer.param_groups[0])
    for other in runs[1:]:
        assert all(same_bits(p, q) for p, q in zip(runs[0], other, strict=True))
    with pytest.raises(TypeError, match="AdamW has no argument 'momentum'"):
        pair(BF16, momentum=0.9)


def test_fp8_steps_read_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of many tensors: one transfer for all scales, one for all counters."""
    params = [nn.Parameter(torch.ones(5).to(torch.float8_e4m3fn)) for _ in range(20)]
    optimizer = optim.AdamW(params, precision="collage-plus")
    reads = []
    for name in ("item", "tolist", "cpu"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda self, *a, f=original, n=name: (reads.append(n), f(self, *a))[1]
        )
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert len(reads) <= 6

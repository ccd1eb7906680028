"""State dicts: components keep dtype and bits, and nothing that means something else is taken."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from subulp import optim

from .support import (
    BF16,
    E4M3,
    FP16,
    FP32,
    SOME,
    Case,
    Net,
    Run,
    assert_same,
    cases,
    parameters,
    same_bits,
    train_net,
    unchanged,
)


def through_file(state_dict):
    """Written and read as a checkpoint is, by the reader that runs no code."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# --------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("case", cases())
def test_resumed_is_uninterrupted(case):
    run = case.fresh().train(3)
    saved = through_file(run.optimizer.state_dict())
    # The seed of the saved run replaces the fresh one's, so that random bits continue.
    resumed = case.fresh(seed=77)
    for p, q in zip(resumed.params, run.params, strict=True):
        p.data.copy_(q.data)
    resumed.optimizer.load_state_dict(saved)
    resumed.t = run.t
    assert_same(resumed, run)
    assert_same(resumed.train(3), run.train(3))
    assert resumed.optimizer.state[resumed.params[0]]["step"] == 6


@pytest.mark.parametrize("case", cases(["adamw"], dtypes=[FP32, BF16, FP16]))
def test_resumed_model_is_uninterrupted(case):
    """As a script does it: checkpoint of model and optimizer, gradients from the weights."""
    net = Net(case.dtype)
    opt = case.make(net.parameters())
    train_net(net, opt, range(3))
    checkpoint = through_file({"model": net.state_dict(), "optimizer": opt.state_dict()})
    train_net(net, opt, range(3, 6))

    other = Net(case.dtype)
    resumed = case.make(other.parameters(), seed=5)
    other.load_state_dict(checkpoint["model"])
    resumed.load_state_dict(checkpoint["optimizer"])
    train_net(other, resumed, range(3, 6))
    assert_same(Run(list(other.parameters()), resumed), Run(list(net.parameters()), opt))


@pytest.mark.parametrize(
    ("precision", "dtype", "name", "stored"),
    [
        ("master", BF16, "master", FP32),
        ("master", BF16, "exp_avg", FP32),
        ("extra-bits-8", FP16, "signed_bits", torch.int32),
        ("extra-bits-8-truncate", FP16, "extra_bits", torch.int32),
        ("nearest", FP16, "exp_avg_sq", BF16),
        ("extra-bits-8", FP16, "exp_avg_sq", FP32),
        ("collage-plus", E4M3, "exp_avg", E4M3),
        ("collage-plus", E4M3, "exp_avg_sq", torch.float8_e5m2),
        ("collage-plus", E4M3, "exp_avg_sq_low", torch.float8_e5m2),
        ("collage-plus", E4M3, "parameter_low", E4M3),
        ("collage-plus", E4M3, "gradient_amax", FP32),
        ("kahan", BF16, "compensation", BF16),
    ],
)
def test_stored_dtypes(precision, dtype, name, stored):
    """torch would cast all of them to the parameter's dtype."""
    case = Case("adamw", precision, dtype)
    run, other = case.fresh().train(2), case.fresh()
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    for p, q in zip(run.params, other.params, strict=True):
        loaded = other.optimizer.state[q][name]
        assert loaded.dtype == stored
        assert same_bits(loaded, run.optimizer.state[p][name])


def test_loaded_state_is_a_copy():
    case = Case("adamw", "master", BF16)
    run, other = case.fresh().train(2), case.fresh()
    saved = run.optimizer.state_dict()
    other.optimizer.load_state_dict(saved)
    before = run.bits()
    other.train(2)
    assert_same(run, before)


def test_parameters_without_state():
    """Saved before every parameter had a gradient, and loaded over states that exist."""
    case = Case("adamw", "collage-plus", BF16)
    fresh, run = case.fresh(), case.fresh().train(2)
    run.optimizer.load_state_dict(through_file(fresh.optimizer.state_dict()))
    assert not any(run.optimizer.state.get(p) for p in run.params)


def test_options_come_from_the_state_dict():
    case = Case("sgd-momentum", "collage-plus", BF16)
    run, other = case.fresh().train(2), case.fresh(lr=5.0, momentum=0.0, nonfinite="raise")
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    group = other.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nonfinite"]) == (0.01, 0.9, "propagate")


def test_auto_is_what_it_stands_for():
    case = Case("adamw", "collage-plus", BF16)
    run, other = case.fresh().train(2), case.fresh(precision="auto")
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    with pytest.raises(ValueError, match="'nearest'"):
        case.fresh(precision="nearest").optimizer.load_state_dict(other.optimizer.state_dict())


# ------------------------------------------------------------------------------------ hooks


def test_state_dict_hooks():
    run = Case("adamw", "extra-bits-8", BF16).fresh([(4, 3)]).train(1)
    seen = []
    run.optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))

    def wrap(opt, state_dict):
        seen.append("post")
        return {"wrapped": state_dict}

    run.optimizer.register_state_dict_post_hook(wrap)
    assert set(run.optimizer.state_dict()) == {"wrapped"}
    assert seen == ["pre", "post"]


def test_load_state_dict_hooks():
    """What a hook makes of the dict is what is checked and loaded."""
    case = Case("adamw", "master", BF16)
    run, other = case.fresh().train(2), case.fresh()
    seen = []
    other.optimizer.register_load_state_dict_pre_hook(lambda opt, d: d["wrapped"])
    other.optimizer.register_load_state_dict_post_hook(
        lambda opt: seen.append(opt.state[other.params[0]]["master"].clone())
    )
    other.optimizer.load_state_dict({"wrapped": run.optimizer.state_dict()})
    (master,) = seen
    assert same_bits(master, run.optimizer.state[run.params[0]]["master"])
    with pytest.raises(ValueError, match="precision='kahan'"):
        other.optimizer.load_state_dict(
            {"wrapped": case.fresh(precision="kahan").train(1).optimizer.state_dict()}
        )
    # The hooks of one call are gone after it, also after a failed one.
    assert len(other.optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert len(other.optimizer._optimizer_load_state_dict_post_hooks) == 1


# --------------------------------------------------------------------------- wrong state dicts


def saved(optimizer: str, precision: str, dtype=BF16, shapes=((6, 7), (33,)), **changes):
    return (
        Case(optimizer, precision, dtype).fresh(shapes, **changes).train(1).optimizer.state_dict()
    )


def torch_state_dict(cls):
    params = parameters(BF16, [(6, 7), (33,)])
    opt = cls(params)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    return opt.state_dict()


def two_groups():
    a, b = parameters(BF16, [(6, 7), (33,)])
    return Case("adamw", "collage-plus", BF16).make([{"params": [a]}, {"params": [b]}]).state_dict()


def damaged(change):
    state_dict = copy.deepcopy(saved("adamw", "collage-plus"))
    change(state_dict)
    return state_dict


WRONG = {
    "another strategy": (
        lambda: saved("adamw", "collage-light"),
        r"precision='collage-light'.*the optimizer has precision='collage-plus'",
    ),
    "another arithmetic": (
        lambda: saved("adamw", "collage-plus", arithmetic="strict"),
        r"arithmetic='strict', the optimizer has .*arithmetic='wide'",
    ),
    "SGD": (
        lambda: saved("sgd-momentum", "collage-plus"),
        r"lacks \['betas', 'eps'\] and has .*'momentum'.*AdamW",
    ),
    "torch's AdamW": (
        lambda: torch_state_dict(torch.optim.AdamW),
        r"lacks \['arithmetic', .*'precision'.*another optimizer saved it, not subulp's AdamW.*"
        "load_full_precision_state_dict",
    ),
    "another dtype": (
        lambda: saved("adamw", "collage-plus", FP16),
        r"parameter_low in state_dict is torch.float16 \(6, 7\), expected torch.bfloat16 \(6, 7\)",
    ),
    "other shapes": (
        lambda: saved("adamw", "collage-plus", shapes=((6, 7), (34,))),
        r"exp_avg in state_dict is torch.bfloat16 \(34,\), expected torch.bfloat16 \(33,\)",
    ),
    "fewer parameters": (
        lambda: saved("adamw", "collage-plus", shapes=((6, 7),)),
        "group 0 of state_dict has 1 parameters, the optimizer's has 2",
    ),
    "more groups": (two_groups, "state_dict has 2 parameter groups, the optimizer 1"),
    "a component less": (
        lambda: damaged(lambda d: d["state"][1].pop("parameter_low")),
        r"state_dict keeps \['exp_avg', .* AdamW keeps .*'parameter_low'",
    ),
    "a component more": (
        lambda: damaged(lambda d: d["state"][0].update(momentum_buffer=torch.zeros(6, 7))),
        "keeps .*'momentum_buffer'",
    ),
    "a number for a tensor": (
        lambda: damaged(lambda d: d["state"][0].update(step=3)),
        "step in state_dict is 3, expected torch.float32",
    ),
    "an unknown option": (
        lambda: damaged(lambda d: d["param_groups"][0].update(nonfinite="perhaps")),
        "nonfinite='perhaps' is unknown",
    ),
    "a model's": (lambda: nn.Linear(2, 2).state_dict(), r"\['bias', 'weight'\].*'param_groups'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_with_nothing_changed(name):
    make, message = WRONG[name]
    run = Case("adamw", "collage-plus", BF16).fresh([(6, 7), (33,)]).train(2)
    wrong = make()
    with unchanged(run), pytest.raises(ValueError, match=f"(?s){message}"):
        run.optimizer.load_state_dict(wrong)
    fresh = Case("adamw", "collage-plus", BF16).fresh([(6, 7), (33,)])
    with unchanged(fresh), pytest.raises(ValueError, match=f"(?s){message}"):
        fresh.optimizer.load_state_dict(wrong)


@pytest.mark.parametrize("case", cases(SOME, dtypes=[BF16]))
def test_every_other_strategy_is_refused(case):
    state_dict = case.fresh().train(1).optimizer.state_dict()
    for other in cases([case.optimizer], dtypes=[BF16]):
        (candidate,) = other.values
        run = candidate.fresh().train(1)
        if candidate.precision == case.precision:
            run.optimizer.load_state_dict(state_dict)
            continue
        with unchanged(run), pytest.raises(ValueError, match=f"{case.precision}'") as error:
            run.optimizer.load_state_dict(state_dict)
        assert repr(candidate.precision) in str(error.value)


def test_extra_bits_of_another_count():
    """The words alone would fit: 4 stochastic tails take as much as 5 truncated ones."""
    run = Case("sgd", "extra-bits-5", BF16).fresh().train(1)
    other = Case("sgd", "extra-bits-4-stochastic", BF16).fresh().train(1)
    with pytest.raises(ValueError, match=r"extra-bits-4-stochastic.*extra-bits-5"):
        run.optimizer.load_state_dict(other.optimizer.state_dict())


def test_groups_of_a_state_dict_are_refused_one_by_one():
    def make(second: str):
        a, b = parameters(BF16, [(6, 7), (33,)])
        groups = [{"params": [a]}, {"params": [b], "precision": second}]
        return Run([a, b], optim.AdamW(groups, precision="kahan", seed=1)).train(1)

    run = make("nearest")
    with unchanged(run), pytest.raises(ValueError, match=r"group 1 .*'master'.*'nearest'"):
        run.optimizer.load_state_dict(make("master").optimizer.state_dict())

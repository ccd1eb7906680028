"""State dicts that move: from torch and other libraries, between precisions, and back to torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from subulp import optim

from .support import (
    BF16,
    E4M3,
    FP16,
    FP32,
    HALVES,
    OPTIMIZERS,
    SOME,
    Case,
    Net,
    Run,
    assert_same,
    cases,
    gradient,
    parameters,
    same_bits,
    train_net,
    unchanged,
)
from .test_against_torch import TOLERANCE
from .test_state_dict import through_file


def clones(params, dtype=None):
    return [nn.Parameter(p.detach().to(dtype or p.dtype).clone()) for p in params]


def torch_run(name: str, dtype=FP32, steps: int = 3) -> Run:
    _, theirs, options = OPTIMIZERS[name]
    params = parameters(dtype)
    return Run(params, theirs(params, lr=0.01, **options)).train(steps)


def moments(state_dict):
    """The FP32 moments and step counts of a state dict of torch's."""
    return {
        (index, name): value
        for index, state in state_dict["state"].items()
        for name, value in state.items()
    }


# ------------------------------------------------------------------------------- torch's own


@pytest.mark.parametrize("through", [lambda d: d, through_file], ids=["", "file"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_torchs_would(name, through):
    theirs = torch_run(name)
    params = clones(theirs.params)
    ours = Run(params, OPTIMIZERS[name][0](params, precision="fp32", lr=9.0))
    ours.optimizer.import_state_dict(through(theirs.optimizer.state_dict()))
    ours.t = theirs.t
    assert ours.optimizer.param_groups[0]["lr"] == 0.01
    theirs.train(5)
    ours.train(5)
    for p, q in zip(ours.params, theirs.params, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", cases(SOME))
def test_moments_in_any_precision(case):
    """Rounded once, from torch's FP32 ones, to what the precision holds."""
    given = torch_run(case.optimizer).optimizer.state_dict()
    run = case.fresh()
    before = [p.detach().clone() for p in run.params]
    run.optimizer.import_state_dict(given)
    found = moments(run.optimizer.export_state_dict())
    expected = moments(given)
    assert set(expected) <= set(found)
    for key, want in expected.items():
        if key[1] == "step":
            assert found[key] == 3.0
        elif case.precision in ("fp32", "master", "fp32-states") or "extra" in case.precision:
            assert same_bits(found[key], want)
        elif case.dtype != E4M3:
            # An expansion of two BF16 numbers, or one.
            assert (found[key] - want).abs().le(want.abs() * 2.0**-8 + 1e-37).all()
        else:
            largest = want.abs().max() if want.numel() else 0.0
            ulp = 2.0**-4 if key[1] == "exp_avg" else 2.0**-3
            assert (found[key] - want).abs().le(ulp * want.abs() + 2e-3 * largest).all()
    # No weight moved, and the components beside it are those of a fresh parameter.
    for p, q in zip(run.params, before, strict=True):
        assert same_bits(p.detach(), q)
        assert torch.equal(run.optimizer.wide_value(p), q.float())
    run.t = 3
    run.train(2)


@pytest.mark.parametrize("case", cases(SOME))
def test_there_and_back(case):
    """What torch is given comes back as the same components, bit for bit; the weight's stay."""
    run = case.fresh().train(3)
    given = run.optimizer.export_state_dict()
    before = run.bits()
    beside = {"parameter_low", "compensation", "master", "signed_bits", "extra_bits"}
    run.optimizer.import_state_dict(through_file(given))
    after = run.bits()
    for name, value in before.items():
        kind = name.split()[0]
        if kind not in beside and not (kind == "gradient_amax" or case.dtype == E4M3):
            assert same_bits(after[name], value), name


def test_a_round_trip_through_torchs_optimizer():
    for name in OPTIMIZERS:
        run = Case(name, "fp32", FP32).fresh().train(3)
        params = clones(run.params)
        theirs = OPTIMIZERS[name][1](params, lr=5.0)
        theirs.load_state_dict(run.optimizer.export_state_dict())
        assert theirs.param_groups[0]["lr"] == 0.01
        twin_params = clones(run.params)
        twin = Run(twin_params, OPTIMIZERS[name][0](twin_params, seed=3), run.t)
        twin.optimizer.import_state_dict(theirs.state_dict())
        assert_same(twin, run)
        other = Run(params, theirs, run.t).train(4)
        run.train(4)
        for p, q in zip(other.params, run.params, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=TOLERANCE)


def test_what_torch_gets_are_copies():
    run = Case("adamw", "fp32", FP32).fresh().train(2)
    given = run.optimizer.export_state_dict()
    before = copy.deepcopy(given)
    run.train(2)
    for key, value in moments(before).items():
        assert same_bits(moments(given)[key], value)


def test_options_of_the_other_library_are_taken_and_ours_stay():
    params = parameters(FP32, [(3,), (4,)])
    groups = [{"params": [params[0]], "name": "a"}, {"params": [params[1]], "lr": 0.5}]
    theirs = torch.optim.AdamW(groups, lr=torch.tensor(0.25), betas=(0.5, 0.6), maximize=True)
    torch.optim.lr_scheduler.StepLR(theirs, 3)
    twins = clones(params, BF16)
    groups = [{"params": [p], "precision": n} for p, n in zip(twins, HALVES[:2], strict=True)]
    ours = optim.AdamW(groups, nonfinite="raise", seed=9)
    ours.import_state_dict(theirs.state_dict())
    first, second = ours.param_groups
    assert (first["lr"], second["lr"], first["betas"]) == (0.25, 0.5, (0.5, 0.6))
    assert first["lr"] is not theirs.param_groups[0]["lr"]
    assert (first["maximize"], first["name"]) == (True, "a")
    assert "initial_lr" in first
    assert (first["nonfinite"], first["seed"]) == ("raise", 9)
    assert [g["precision"] for g in (first, second)] == list(HALVES[:2])
    assert first["capturable"] is False
    assert not {"foreach", "fused", "amsgrad"} & set(first)


def test_frozen_and_unused_parameters_have_no_state():
    params = parameters(FP32, [(3,), (4,)])
    theirs = torch.optim.AdamW(params)
    params[0].grad = torch.ones(3)
    theirs.step()
    twins = clones(params, BF16)
    ours = optim.AdamW(twins, precision="master")
    ours.import_state_dict(theirs.state_dict())
    assert ours.state[twins[0]]["step"] == 1
    assert not ours.state.get(twins[1])
    ours.import_state_dict(torch.optim.AdamW(params).state_dict())
    assert not any(ours.state.get(p) for p in twins)


def test_other_groups_of_named_parameters():
    """One group there, one for each precision here."""
    net = Net(FP32)
    theirs = torch.optim.AdamW(net.named_parameters())
    train_net(net, theirs, range(2))
    twin = Net(FP32).to(BF16)
    ours = optim.AdamW(twin.named_parameters(), precision={"*bias": "master", "*": "kahan"})
    assert len(ours.param_groups) == 2
    ours.import_state_dict(theirs.state_dict())
    bias = ours.state[twin.first.bias]["exp_avg"]
    assert same_bits(bias, theirs.state[net.first.bias]["exp_avg"])
    unnamed = torch.optim.AdamW(net.parameters()).state_dict()
    with pytest.raises(ValueError, match="has 1 parameter groups, the optimizer 2"):
        ours.import_state_dict(unnamed)


# ----------------------------------------------------------------------- another precision


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3], ids=str)
def test_from_every_precision_to_every_other(name, dtype):
    """Imported and changed in place: the same bits, as near as the new precision can be."""
    options = [each.values[0] for each in cases([name], dtypes=[dtype])]
    for old in options:
        saved = old.fresh([(6, 7), ()]).train(3)
        given = through_file(saved.optimizer.state_dict())
        wide = [saved.optimizer.wide_value(p).clone() for p in saved.params]
        exported = moments(saved.optimizer.export_state_dict())
        for new in options:
            params = clones(saved.params)
            run = Run(params, new.make(params, seed=77), saved.t)
            run.optimizer.import_state_dict(given)
            twin = copy.deepcopy(saved)
            twin.optimizer.change_precision(new.precision)
            assert_same(run, twin)
            if new.precision == old.precision:
                assert_same(run, saved)
            for p, value in zip(params, wide, strict=True):
                unit = {BF16: 2.0**-8, FP16: 2.0**-11, E4M3: 2.0**-4}[dtype]
                assert (run.optimizer.wide_value(p) - value).abs().le(unit * value.abs()).all()
                if new.precision == "master":
                    assert torch.equal(run.optimizer.wide_value(p), value)
                assert run.optimizer.state[p]["step"] == 3
            for key, value in moments(run.optimizer.export_state_dict()).items():
                if new.precision in ("master", "fp32-states"):
                    assert torch.equal(value, exported[key])
            assert_same(run.train(1), twin.train(1))


@pytest.mark.parametrize("precision", [*HALVES])
@pytest.mark.parametrize("first", [False, True], ids=["narrow", "wide"])
def test_from_narrow_to_fp32(precision, first):
    """Into an FP32 model that has the narrow weights, or the full ones: nothing is added twice."""
    net = Net(BF16)
    old = Case("adamw", precision, BF16).make(net.parameters())
    train_net(net, old, range(3))
    weights = old.full_precision_state_dict(net)
    twin = Net(FP32)
    twin.load_state_dict(weights if first else net.state_dict())
    new = optim.AdamW(twin.parameters(), precision="fp32")
    given = old.state_dict()
    if not first and precision.startswith("extra-bits"):
        with pytest.raises(ValueError, match=r"16-bit parameter.*load the weights first"):
            new.import_state_dict(given)
        return
    new.import_state_dict(given)
    for name, value in new.full_precision_state_dict(twin).items():
        assert same_bits(value, weights[name]), name
    exported = moments(old.export_state_dict())
    assert all(same_bits(v, exported[k]) for k, v in moments(new.export_state_dict()).items())


def test_a_weight_changed_meanwhile_keeps_its_own_value():
    net = Net(BF16)
    old = optim.AdamW(net.parameters(), precision="master")
    train_net(net, old, range(3))
    given = copy.deepcopy(old.state_dict())
    with torch.no_grad():
        net.first.weight[0] = 0.5
    new = optim.AdamW(net.parameters(), precision="collage-plus")
    new.import_state_dict(given)
    assert new.wide_value(net.first.weight)[0].eq(0.5).all()
    assert not torch.equal(new.wide_value(net.first.weight)[1], net.first.weight[1].float())


@pytest.mark.parametrize(("new", "kept"), [("master", 80_000.0), ("collage-plus", 65_504.0)])
def test_a_master_weight_beyond_the_largest_number_is_taken_along(new, kept):
    """Its parameter is the largest number; PyTorch's own cast would have it at infinity."""
    p = torch.nn.Parameter(torch.tensor([60_000.0, 1.0]).to(FP16))
    old = optim.SGD([p], lr=1.0, precision="master")
    for _ in range(2):
        p.grad = torch.tensor([-10_000.0, 0.0]).to(FP16)
        old.step()
    assert p[0] == 65_504.0
    assert old.wide_value(p)[0] == 80_000.0
    given = old.state_dict()
    twin = torch.nn.Parameter(p.detach().clone())
    run = optim.SGD([twin], lr=1.0, precision=new)
    run.import_state_dict(given)
    old.change_precision(new)
    assert same_bits(run.wide_value(twin), old.wide_value(p))
    assert run.wide_value(twin)[0] == kept


def test_a_group_is_changed_alone_and_wrong_changes_leave_all():
    a, b = parameters(BF16, [(9,), (9,)])
    run = Run([a, b], optim.AdamW([{"params": [a]}, {"params": [b]}], precision="master", seed=1))
    run.train(2)
    with unchanged(run), pytest.raises(ValueError, match="not available for a parameter of dtype"):
        run.optimizer.change_precision("fp32", group=1)
    run.optimizer.change_precision("nearest", group=1)
    assert [g["precision"] for g in run.optimizer.param_groups] == ["master", "nearest"]
    assert run.optimizer.state[b].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert run.optimizer.state[a]["step"] == run.optimizer.state[b]["step"] == 2
    run.train(1)


def test_while_the_step_is_fused():
    net, twin = Net(BF16), Net(BF16)
    runs = []
    for model, fused in ((net, True), (twin, False)):
        optimizer = optim.AdamW(model.parameters(), precision="collage-plus", seed=1)
        if fused:
            optim.fuse_backward(model, optimizer)
        train_net(model, optimizer, range(2))
        optimizer.change_precision("master")
        train_net(model, optimizer, range(2, 4))
        optimizer.import_state_dict(torch_adamw_of(model))
        train_net(model, optimizer, range(4, 6))
        runs.append(Run(list(model.parameters()), optimizer))
    assert_same(*runs)


def torch_adamw_of(model: nn.Module):
    params = [nn.Parameter(torch.zeros(p.shape)) for p in model.parameters()]
    theirs = torch.optim.AdamW(params)
    for i, p in enumerate(params):
        p.grad = gradient(p, 1, i)
    theirs.step()
    return theirs.state_dict()


def test_memory_formats():
    params = [nn.Parameter(torch.randn(2, 3, 4, 5)) for _ in range(2)]
    theirs = Run(params, torch.optim.AdamW(params)).train(2)
    for precision in ("master", "collage-plus", "extra-bits-8-deterministic"):
        plain, last = clones(params, BF16), clones(params, BF16)
        for p in last:
            p.data = p.data.to(memory_format=torch.channels_last)
        runs = []
        for each in (plain, last):
            run = Run(each, optim.AdamW(each, precision=precision, seed=1), 2)
            run.optimizer.import_state_dict(theirs.optimizer.state_dict())
            run.train(1)
            back = Run(each, optim.AdamW(each, precision="master", seed=1), 3)
            back.optimizer.import_state_dict(run.optimizer.state_dict())
            runs.append(back)
        assert_same(runs[0], runs[1])


def test_hooks_see_what_was_given_first():
    theirs = torch_run("adamw")
    run = Case("adamw", "master", BF16).fresh()
    seen = []
    run.optimizer.register_load_state_dict_pre_hook(lambda opt, d: d["wrapped"])
    run.optimizer.register_load_state_dict_post_hook(
        lambda opt: seen.append(opt.state[run.params[0]]["step"].item())
    )
    run.optimizer.import_state_dict({"wrapped": theirs.optimizer.state_dict()})
    assert seen == [3.0]


# ------------------------------------------------------------------------ torch refuses ours


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd-momentum"])
@pytest.mark.parametrize("precision", ["fp32", *HALVES])
def test_torch_does_not_go_on_with_components(name, precision):
    run = Case(name, precision, FP32 if precision == "fp32" else BF16).fresh([(6, 7)]).train(2)
    params = clones(run.params)
    theirs = Run(params, OPTIMIZERS[name][1](params, lr=0.1))
    theirs.optimizer.load_state_dict(through_file(run.optimizer.state_dict()))
    before = params[0].detach().clone()
    with pytest.raises(RuntimeError, match=f"precision='{precision}'.*export_state_dict"):
        theirs.train(1)
    assert same_bits(params[0].detach(), before)
    theirs.optimizer.load_state_dict(run.optimizer.export_state_dict())
    theirs.train(1)


# --------------------------------------------------------------------------- what is refused


def saved_by(cls, options, change=lambda d: None):
    def make():
        params = parameters(FP32, [(6, 7), (33,)])
        theirs = Run(params, cls(params, **options)).train(1).optimizer.state_dict()
        change(theirs)
        return theirs

    return make


def ours_with(change):
    state_dict = copy.deepcopy(
        Case("adamw", "master", BF16).fresh([(6, 7), (33,)]).train(1).optimizer.state_dict()
    )
    change(state_dict)
    return state_dict


ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
REFUSED = {
    "amsgrad": (saved_by(ADAMW, {"amsgrad": True}), "amsgrad=True.*weights alone"),
    "Adam's decay": (
        saved_by(torch.optim.Adam, {"weight_decay": 0.1}),
        "weight_decay=0.1 added to the gradient, unlike subulp's AdamW",
    ),
    "SGD": (saved_by(SGD, {"momentum": 0.9}), r"group 0 .*'momentum'.*another algorithm"),
    "RAdam": (saved_by(torch.optim.RAdam, {}), "another algorithm than AdamW"),
    "NAdam": (saved_by(torch.optim.NAdam, {}), "another algorithm than AdamW"),
    "RMSprop": (saved_by(torch.optim.RMSprop, {}), "another algorithm than AdamW"),
    "our SGD": (
        Case("sgd-momentum", "fp32", FP32).fresh([(6, 7), (33,)]).train(1).optimizer.state_dict,
        "'momentum'.*another algorithm than AdamW saved it",
    ),
    "another shape": (
        saved_by(ADAMW, {}, lambda d: d["state"][1].update(exp_avg=torch.zeros(34))),
        r"exp_avg in state_dict is torch.float32 \(34,\), expected a tensor of shape \(33,\)",
    ),
    "complex": (
        saved_by(ADAMW, {}, lambda d: d["state"][1].update(exp_avg=torch.zeros(33) + 0j)),
        "exp_avg in state_dict is torch.complex64",
    ),
    "a state less": (
        saved_by(ADAMW, {}, lambda d: d["state"][1].pop("exp_avg_sq")),
        r"keeps \['exp_avg'\] .*AdamW keeps \['exp_avg', 'exp_avg_sq'\]",
    ),
    "a step that is none": (
        saved_by(ADAMW, {}, lambda d: d["state"][1].update(step="3")),
        "step in state_dict is '3', expected a number",
    ),
    "a number of ours that is none": (
        lambda: ours_with(lambda d: d["state"][1].update(step=None)),
        "step in state_dict is None, expected a number",
    ),
    "no number of ours": (
        lambda: ours_with(lambda d: d["state"][1].pop("step")),
        "step in state_dict is None, expected a number",
    ),
    "an unknown precision of ours": (
        lambda: ours_with(lambda d: d["param_groups"][0].update(precision="x")),
        "precision='x' is unknown",
    ),
    "a tensor of ours that is none": (
        lambda: ours_with(lambda d: d["state"][1].update(master=None)),
        "master in state_dict is None, expected a tensor",
    ),
    "a number for a state": (
        saved_by(ADAMW, {}, lambda d: d["state"].update({1: 3})),
        "state_dict has 3 as the state of parameter 1",
    ),
    "fewer parameters": (
        saved_by(ADAMW, {}, lambda d: d["param_groups"][0]["params"].pop()),
        "group 0 of state_dict has 1 parameters, the optimizer's has 2",
    ),
    "an option out of range": (
        saved_by(ADAMW, {}, lambda d: d["param_groups"][0].update(eps=-1.0)),
        "eps=-1.0 is out of range",
    ),
    "a model's": (lambda: nn.Linear(2, 2).state_dict(), r"\['bias', 'weight'\].*'param_groups'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_nothing_changed(name):
    make, message = REFUSED[name]
    run = Case("adamw", "collage-plus", BF16).fresh([(6, 7), (33,)]).train(2)
    wrong = make()
    with unchanged(run), pytest.raises(ValueError, match=f"(?s){message}"):
        run.optimizer.import_state_dict(wrong)

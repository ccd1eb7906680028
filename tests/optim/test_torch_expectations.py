"""Torch's own expectations of its optimizers, from its own tables, held by ``"fp32"``.

``torch.testing._internal.common_optimizers`` lists for every optimizer of torch the arguments, the
schedulers and the errors that torch's tests run it with. What subulp's do otherwise is listed here,
and argued in docs/state-dicts.md.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

from subulp import optim

from .support import same_bits
from .test_against_torch import TOLERANCE
from .test_state_dict import through_file

OURS = {"AdamW": optim.AdamW, "Adam": optim.Adam, "SGD": optim.SGD}
INFOS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in OURS}
INPUTS = [
    pytest.param(name, given, id=f"{name} {given.desc}")
    for name, info in INFOS.items()
    for given in info.optim_inputs_func(device="cpu", dtype=torch.float32)
]
# What has no counterpart here, and is refused by name.
UNAVAILABLE = ("amsgrad", "differentiable")
TAKEN = [each for each in INPUTS if not set(UNAVAILABLE) & set(each.values[1].kwargs)]
ERRORS = [
    pytest.param(name, each, id=f"{name} {each.optimizer_error_input.desc}")
    for name, info in INFOS.items()
    for each in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
]
# Errors of torch that concern its implementations, or its own check of a type, alone.
ACCEPTED = (
    "lr as Tensor doesn't work with foreach & not capturable",
    "betas must be either both floats or both Tensors",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True",
)


def weights() -> tuple[nn.Parameter, nn.Parameter, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(2, 3, generator=generator))
    bias = nn.Parameter(torch.randn(2, generator=generator))
    return weight, bias, torch.randn(3, generator=generator)


def closure_of(opt, weight, bias, x):
    def closure():
        opt.zero_grad()
        loss = (weight.mv(x) + bias).square().sum()
        loss.backward()
        return loss

    return closure


def make(name: str, kwargs, cls=None):
    """A problem of torch's tests, and an optimizer of it: ours, or another class."""
    weight, bias, x = weights()
    # Tensors among the arguments are stepped by schedulers.
    opt = (cls or OURS[name])([weight, bias], **copy.deepcopy(kwargs))
    return weight, bias, opt, closure_of(opt, weight, bias, x)


# ------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize(("name", "given"), TAKEN)
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_steps_are_torchs(name, given, flags):
    kwargs = {"lr": 0.01} | given.kwargs
    weight, bias, opt, closure = make(name, kwargs | flags)
    w, b, theirs, reference = make(name, kwargs, INFOS[name].optim_cls)
    first = closure().item()
    for _ in range(20):
        opt.step(closure)
        theirs.step(reference)
    for p, q in ((weight, w), (bias, b)):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=TOLERANCE)
    assert (closure().item() > first) == kwargs.get("maximize", False)


@pytest.mark.parametrize(("name", "given"), INPUTS)
def test_what_has_no_counterpart_is_refused_by_name(name, given):
    refused = [flag for flag in UNAVAILABLE if flag in given.kwargs]
    for flag in refused or UNAVAILABLE:
        if name == "SGD" and flag != "differentiable":
            continue
        with pytest.raises(ValueError, match=f"{flag}=True is not available .* leave {flag} out"):
            make(name, given.kwargs | {flag: True})


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, i) for name, info in INFOS.items() for i in range(len(info.scheduler_inputs))],
)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_schedulers_set_the_rates_that_torchs_have(name, number, tensor):
    lr = torch.tensor(0.01) if tensor else 0.01
    runs = []
    for cls in (None, INFOS[name].optim_cls):
        weight, bias, opt, closure = make(name, {"lr": lr}, cls)
        schedulers = [each(opt) for each in INFOS[name].scheduler_inputs[number]]
        rates = []
        for _ in range(20):
            loss = opt.step(closure).item()
            for scheduler in schedulers:
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(loss) if plateau else scheduler.step()
            rates.append(float(opt.param_groups[0]["lr"]))
        runs.append((weight, bias, rates))
    assert runs[0][2] == runs[1][2]
    for p, q in zip(runs[0][:2], runs[1][:2], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=TOLERANCE)


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
@pytest.mark.parametrize("name", OURS)
def test_groups_have_options_of_their_own(name, option):
    results = []
    for cls in (OURS[name], INFOS[name].optim_cls):
        weight, bias, x = weights()
        groups = [{"params": [weight]}, {"params": [bias], option: 0.3}]
        opt = cls(groups, lr=0.01, weight_decay=0.0)
        for _ in range(10):
            opt.step(closure_of(opt, weight, bias, x))
        results.append((weight, bias))
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "given"), TAKEN)
def test_no_gradients_and_zero_gradients(name, given):
    weight, _, opt, _ = make(name, given.kwargs)
    before = weight.detach().clone()
    opt.step()
    assert same_bits(weight.detach(), before)
    assert not opt.state_dict()["state"]
    weight.grad = torch.zeros_like(weight)
    opt.step()
    decay = opt.param_groups[0]["weight_decay"] != 0
    assert torch.equal(weight, before) != decay


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(("name", "each"), ERRORS)
def test_errors(name, each):
    given = each.optimizer_error_input
    assert each.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    params = given.params if given.params is not None else [nn.Parameter(torch.ones(2))]
    if given.desc in ACCEPTED:
        OURS[name](params, **given.kwargs)
        return
    if issubclass(each.error_type, Warning):
        with pytest.warns(each.error_type, match=each.error_regex):
            OURS[name](params, **given.kwargs)
        return
    # Of what torch's base checks, in its words; of the rest, in ours.
    own = "nvalid" in each.error_regex or "1-element" in each.error_regex
    words = "out of range|has shape" if own else each.error_regex
    with pytest.raises(each.error_type, match=words):
        OURS[name](params, **given.kwargs)


@pytest.mark.parametrize("name", OURS)
def test_complex_and_sparse_are_refused_with_the_way_out(name):
    with pytest.raises(ValueError, match="view_as_real"):
        OURS[name]([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    weight, _, opt, _ = make(name, {})
    weight.grad = torch.ones_like(weight).to_sparse()
    with pytest.raises(ValueError, match="only dense gradients"):
        opt.step()


# ------------------------------------------------------------------------------- state dicts


@pytest.mark.parametrize(("name", "given"), TAKEN)
def test_saved_and_loaded_in_every_way(name, given):
    """State dict, file, copy and pickle: the same, and the next steps have the same bits."""
    weight, bias, opt, closure = make(name, given.kwargs)
    for _ in range(3):
        opt.step(closure)
    twins = []
    for way in (lambda d: d, copy.deepcopy, through_file):
        w, b, other, again = make(name, {})
        other.load_state_dict(way(opt.state_dict()))
        other.load_state_dict(way(other.state_dict()))
        twins.append((w, b, other, again))
    x = weights()[2]
    for way in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        w, b, other = way((weight, bias, opt))
        assert {k for k in vars(other) if k[0] != "_"} == {k for k in vars(opt) if k[0] != "_"}
        twins.append((w, b, other, closure_of(other, w, b, x)))
    start = weight.detach().clone(), bias.detach().clone()
    for _ in range(3):
        opt.step(closure)
    for w, b, other, again in twins:
        w.data.copy_(start[0])
        b.data.copy_(start[1])
        for _ in range(3):
            other.step(again)
        assert same_bits(w.detach(), weight.detach())
        assert same_bits(b.detach(), bias.detach())


@pytest.mark.parametrize(("name", "given"), TAKEN)
def test_state_dicts_are_deterministic_and_have_a_state_each(name, given):
    first, second = (make(name, given.kwargs) for _ in range(2))
    for _, _, opt, closure in (first, second):
        for _ in range(2):
            opt.step(closure)
    a, b = first[2].state_dict(), second[2].state_dict()
    assert str(a) == str(b)
    assert set(a) == {"state", "param_groups"}
    assert len(a["state"]) == 2
    assert all(len(state) > 0 for state in a["state"].values())
    assert str(first[2]).startswith(f"{name} (\nParameter Group 0")


@pytest.mark.parametrize(("name", "given"), TAKEN)
def test_older_dicts_and_steps_that_are_no_tensors(name, given):
    """torch loads its older formats; import_state_dict takes them."""
    theirs = make(name, given.kwargs, INFOS[name].optim_cls)
    theirs[2].step(theirs[3])
    state_dict = copy.deepcopy(theirs[2].state_dict())
    for group in state_dict["param_groups"]:
        for flag in ("foreach", "fused", "differentiable", "capturable"):
            group.pop(flag, None)
        if not group["maximize"]:
            del group["maximize"]
    for state in state_dict["state"].values():
        if "step" in state:
            state["step"] = state["step"].item()
    weight, bias, opt, closure = make(name, {})
    opt.import_state_dict(state_dict)
    for p, q in zip((weight, bias), theirs[:2], strict=True):
        p.data.copy_(q.data)
    for _ in range(3):
        opt.step(closure)
        theirs[2].step(theirs[3])
    torch.testing.assert_close(weight, theirs[0], rtol=1e-6, atol=TOLERANCE)


@pytest.mark.parametrize("name", OURS)
def test_names_of_parameters_are_kept(name):
    weight, bias, _ = weights()
    named = OURS[name]([("weight", weight), ("bias", bias)])
    plain = OURS[name]([weight, bias])
    saved = named.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["param_names"] == ["weight", "bias"]
    unnamed = OURS[name]([weight, bias]).state_dict()
    named.load_state_dict(unnamed)
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("name", OURS)
def test_other_numbers_of_groups_are_refused(name):
    weight, bias, opt, _ = make(name, {})
    two = OURS[name]([{"params": [weight]}, {"params": [bias]}])
    with pytest.raises(ValueError, match="2 parameter groups"):
        opt.load_state_dict(two.state_dict())
    with pytest.raises(ValueError, match="has 1 parameters"):
        opt.load_state_dict(OURS[name]([weight]).state_dict())


@pytest.mark.parametrize("name", OURS)
def test_deep_copies_of_state_survive_the_next_steps(name):
    weight, bias, opt, closure = make(name, {})
    opt.step(closure)
    saved = copy.deepcopy(opt.state_dict())
    text = str(saved)
    opt.step(closure)
    assert str(saved) == text
    assert {id(p) for g in opt.param_groups for p in g["params"]} == {id(weight), id(bias)}


# ------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("name", OURS)
def test_step_hooks_run_in_torchs_order(name):
    _, _, opt, closure = make(name, {})
    seen = []
    handles = [
        opt.register_step_pre_hook(lambda opt, args, kwargs: seen.append("before")),
        opt.register_step_post_hook(lambda opt, args, kwargs: seen.append("after")),
        register_optimizer_step_pre_hook(lambda opt, args, kwargs: seen.append("global before")),
        register_optimizer_step_post_hook(lambda opt, args, kwargs: seen.append("global after")),
    ]
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        opt.step(closure)
    assert seen == ["global before", "before", "after", "global after"]
    opt.step(closure)
    assert len(seen) == 4


@pytest.mark.parametrize("name", OURS)
def test_a_pre_hook_may_replace_the_arguments(name):
    _, _, opt, closure = make(name, {})
    handle = opt.register_step_pre_hook(lambda opt, args, kwargs: ((opt, closure), {}))
    assert opt.step() > 0
    handle.remove()
    wrong = opt.register_step_pre_hook(lambda opt, args, kwargs: 1)
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        opt.step()
    wrong.remove()


@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_state_dict_hooks(name, prepend):
    _, _, opt, closure = make(name, {})
    opt.step(closure)
    seen = []
    opt.register_state_dict_pre_hook(lambda opt: seen.append("first"))
    opt.register_state_dict_pre_hook(lambda opt: seen.append("second"), prepend=prepend)
    opt.register_state_dict_post_hook(lambda opt, d: {**d, "extra": 1})
    opt.register_load_state_dict_pre_hook(
        lambda opt, d: {k: v for k, v in d.items() if k != "extra"}
    )
    opt.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    opt.register_load_state_dict_post_hook(lambda opt: seen.append("last"), prepend=prepend)
    saved = opt.state_dict()
    assert saved["extra"] == 1
    opt.load_state_dict(saved)
    first, last = ["first", "second"], ["loaded", "last"]
    assert seen == (first[::-1] + last[::-1] if prepend else first + last)


@pytest.mark.parametrize("name", OURS)
def test_groups_added_and_no_warnings_of_schedulers(name):
    weight, bias, opt, closure = make(name, {"lr": 0.1})
    extra = nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": extra, "lr": 0.5})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    extra.grad = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(closure)
        scheduler.step()
    assert [g["lr"] for g in opt.param_groups] == [0.05, 0.25]
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [bias]})
    with pytest.raises(TypeError, match="ordered collections"):
        opt.add_param_group({"params": {weight}})
    with pytest.raises(TypeError, match="must be a dict"):
        opt.add_param_group([weight])
    with pytest.raises(ValueError, match="non-leaf"):
        opt.add_param_group({"params": [weight * 2]})

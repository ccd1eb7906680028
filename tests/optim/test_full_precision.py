"""FP32 weights out of all components, and into them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from subulp import optim
from subulp.ops.strategy import parse_strategy

from .support import (
    BF16,
    E4M3,
    FP16,
    FP32,
    Case,
    Net,
    Run,
    assert_same,
    cases,
    same_bits,
    train_net,
    unchanged,
)

WITHOUT_FP8 = cases(["adamw"], dtypes=[FP32, BF16, FP16])


class OneWeight(nn.Module):
    def __init__(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(values.to(dtype))


def values_of(dtype: torch.dtype) -> torch.Tensor:
    """FP32 values over many binades; for FP16 within its normal range."""
    generator = torch.Generator().manual_seed(8)
    exponents = torch.randint(-13, 14, (1000,), generator=generator)
    if dtype == BF16:
        exponents *= 4
    mantissa = 1 + torch.rand(1000, generator=generator)
    sign = torch.randint(0, 2, (1000,), generator=generator) * 2 - 1
    return torch.ldexp(sign * mantissa, exponents)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd-momentum"])
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp32", FP32),
        ("master", BF16),
        ("master", FP16),
        ("extra-bits-16", BF16),
        ("extra-bits-16-stochastic", BF16),
        ("extra-bits-13", FP16),
        ("extra-bits-13-stochastic", FP16),
    ],
)
def test_whole_fp32_comes_back(optimizer, precision, dtype):
    wide = values_of(dtype)
    model = OneWeight(torch.zeros(1000), dtype)
    opt = Case(optimizer, precision, dtype).make(model.parameters())
    opt.load_full_precision_state_dict(model, {"weight": wide})
    assert same_bits(opt.full_precision_state_dict(model)["weight"], wide)


@pytest.mark.parametrize(
    "case",
    [c for c in cases(["adamw", "sgd"]) if c.values[0].precision != "extra-bits-5-stochastic"],
)
def test_exported_weights_give_the_same_components(case):
    model = OneWeight(values_of(FP16), case.dtype)
    opt = case.make(model.parameters())
    opt.load_full_precision_state_dict(model, {"weight": values_of(FP16).clamp(-400, 400)})
    run = Run([model.weight], opt)
    first = opt.full_precision_state_dict(model)
    # Two components may hold the midpoint between two heads, and only then change: once, to the
    # even head.
    opt.load_full_precision_state_dict(model, first)
    before = run.bits()
    second = opt.full_precision_state_dict(model)
    assert same_bits(second["weight"], first["weight"])
    opt.load_full_precision_state_dict(model, second)
    assert_same(run, before)


@pytest.mark.parametrize("case", cases(["adamw"]))
def test_wide_value_is_as_near_as_components_allow(case):
    """Relative error, from the mantissa bits that the components have together."""
    wide = values_of(FP16).clamp(-400, 400)
    # Where the second component is not subnormal.
    least = {E4M3: 2.0**-4, FP16: 2.0**-2}.get(case.dtype, 0.0)
    wide = torch.where(wide.abs() < least, 1.3, wide)
    model = OneWeight(torch.zeros(1000), case.dtype)
    opt = case.make(model.parameters())
    opt.load_full_precision_state_dict(model, {"weight": wide})
    one = {FP32: 24, BF16: 8, FP16: 11, E4M3: 4}[case.dtype]
    # The second component starts a bit below the last of the first; it is signed.
    two = {BF16: 17, FP16: 23, E4M3: 9}.get(case.dtype, 24)
    strategy = parse_strategy(case.precision)
    tails = {"extra-bits": one + strategy.k - 1, "signed-bits": one + strategy.k}
    bits = (tails | {"master": 24, "kahan": two, "expansion": two}).get(strategy.weight, one)
    found = opt.full_precision_state_dict(model)["weight"]
    error = ((found - wide).abs() / wide.abs()).max()
    assert error <= 2.0**-bits
    if bits < 24:
        assert error > 2.0 ** -(bits + 3)


@pytest.mark.parametrize("case", WITHOUT_FP8)
def test_model_with_tied_and_frozen_parameters(case):
    net = Net(case.dtype)
    opt = case.make([p for p in net.parameters() if p.requires_grad])
    train_net(net, opt, range(3))
    state_dict = opt.full_precision_state_dict(net)
    assert list(state_dict) == list(net.state_dict())
    assert state_dict["count"].dtype == torch.int64
    assert same_bits(state_dict["frozen"], net.frozen.detach().float())
    assert same_bits(state_dict["first.weight"], state_dict["second.weight"])
    assert same_bits(state_dict["first.weight"], opt.wide_value(net.first.weight))
    for value in state_dict.values():
        assert value.dtype in (torch.float32, torch.int64)

    other = Net(case.dtype)
    other.count.fill_(0)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    fresh = case.make([p for p in other.parameters() if p.requires_grad])
    fresh.load_full_precision_state_dict(other, state_dict)
    assert other.count == 7
    assert same_bits(other.frozen, net.frozen)
    assert other.first.weight is other.second.weight
    for name, value in fresh.full_precision_state_dict(other).items():
        assert same_bits(value, state_dict[name]), name


def test_exported_tensors_are_copies():
    for precision in ("master", "nearest"):
        net = Net(BF16)
        opt = optim.AdamW(net.parameters(), precision=precision)
        train_net(net, opt, range(1))
        state_dict = opt.full_precision_state_dict(net)
        before = {name: value.clone() for name, value in state_dict.items()}
        train_net(net, opt, range(1, 3))
        assert all(same_bits(state_dict[name], value) for name, value in before.items())


def test_moments_and_counters_stay():
    net = Net(BF16)
    opt = optim.AdamW(net.parameters(), precision="collage-plus")
    train_net(net, opt, range(2))
    state = {k: v.clone() for k, v in opt.state[net.first.weight].items()}
    opt.load_full_precision_state_dict(net, {k: 0 * v for k, v in net.state_dict().items()})
    after = opt.state[net.first.weight]
    for name in ("step", "exp_avg", "exp_avg_sq", "exp_avg_sq_low"):
        assert same_bits(after[name], state[name])
    assert net.first.weight.eq(0).all()
    assert after["parameter_low"].eq(0).all()


def test_weights_of_an_fp32_model_and_extra_state():
    class Counted(OneWeight):
        def get_extra_state(self):
            return {"seen": getattr(self, "seen", 0)}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    wide, narrow = Counted(values_of(BF16), FP32), Counted(torch.zeros(1000), BF16)
    wide.seen = 12
    opt = optim.AdamW(narrow.parameters(), precision="master")
    opt.load_full_precision_state_dict(narrow, wide.state_dict())
    assert narrow.seen == 12
    assert same_bits(opt.full_precision_state_dict(narrow)["weight"], wide.weight.detach())
    assert opt.full_precision_state_dict(narrow)["_extra_state"] == {"seen": 12}


def test_wider_parameters_of_others_are_not_narrowed():
    model = nn.ModuleDict({"mine": nn.Linear(2, 2).to(BF16), "other": nn.Linear(2, 2).double()})
    opt = optim.AdamW(model["mine"].parameters())
    state_dict = opt.full_precision_state_dict(model)
    assert same_bits(state_dict["other.weight"], model["other"].weight.detach())


@pytest.mark.parametrize("averaged", [False, True])
def test_a_model_in_wrappers_of_activation_checkpoints(averaged):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8)).to(BF16)

    plain, wrapped = make(), make()
    apply_activation_checkpointing(
        wrapped,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: isinstance(module, nn.Sequential) and module is not wrapped,
    )
    found = []
    for model in (plain, wrapped):
        opt = optim.AdamW(model.named_parameters(), lr=1e-3, precision="master")
        average = optim.AveragedModel(model, opt) if averaged else None
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(4, 8, dtype=BF16)).float().square().mean().backward()
            opt.step()
            if average:
                average.update_parameters(model)
        whole = average or opt
        found.append(whole.full_precision_state_dict(*(() if averaged else (model,))))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert value.dtype == FP32
        assert same_bits(found[1][name], value)
    shifted = {name: value + 2**-20 for name, value in found[0].items()}
    opt.load_full_precision_state_dict(wrapped, shifted)
    for name, value in opt.full_precision_state_dict(wrapped).items():
        assert same_bits(value, shifted[name])


ERRORS = {
    "missing": (lambda d: d.pop("first.weight"), r"lacks \['first.weight'\]"),
    "unexpected": (lambda d: d.update(third=torch.ones(1)), r"unexpected \['third'\]"),
    "shape": (
        lambda d: d.update({"second.weight": torch.ones(6, 5)}),
        r"second.weight is torch.float32 \(6, 5\) in state_dict, the model has .*\(6, 6\)",
    ),
    "no tensor": (lambda d: d.update({"first.bias": "x"}), "first.bias is 'x' in state_dict"),
    "complex": (
        lambda d: d.update({"first.bias": torch.ones(6, dtype=torch.complex64)}),
        "first.bias is torch.complex64",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_weights_change_nothing(name):
    change, message = ERRORS[name]
    net = Net(BF16)
    opt = optim.AdamW(net.parameters(), precision="collage-light")
    train_net(net, opt, range(2))
    wrong = {k: v + 1 for k, v in opt.full_precision_state_dict(net).items()}
    change(wrong)
    with unchanged(Run(list(net.parameters()), opt)), pytest.raises(ValueError, match=message):
        opt.load_full_precision_state_dict(net, wrong)
    assert net.count == 7


def test_wide_value_of_a_stranger():
    opt = optim.AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=r"shape \(3,\) is not in this optimizer"):
        opt.wide_value(nn.Parameter(torch.zeros(3)))

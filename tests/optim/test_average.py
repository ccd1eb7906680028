"""Averages follow the values that all components stand for, in narrow storage too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from subulp import optim

from .support import BF16, E4M3, FP16, FP32, Net, batch, same_bits, train_net
from .test_state_dict import through_file

PRECISIONS = ("master", "collage-light", "stochastic")


class Weight(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


def averaged_over(count: int, *options):
    """A weight that grows by less than half an ulp a step, averages of it, and FP64's of each."""
    model = Weight(torch.ones(32, dtype=BF16))
    opt = optim.SGD(model.parameters(), lr=2.5e-4, precision="collage-plus")
    averages = [optim.AveragedModel(model, opt, **each) for each in options]
    exact = [torch.ones(32, dtype=torch.float64) for _ in options]
    for t in range(count):
        model.weight.grad = -torch.ones_like(model.weight)
        opt.step()
        wide = opt.wide_value(model.weight).double()
        for averaged, sofar in zip(averages, exact, strict=True):
            averaged.update_parameters(model)
            decay = options[averages.index(averaged)].get("decay")
            part = 1.0 / (t + 1) if decay is None or t == 0 else 1.0 - decay
            sofar.add_((wide - sofar) * part)
    return model, averages, exact


def test_updates_are_not_lost():
    kinds = [(p, d) for p in PRECISIONS for d in (0.999, None)]
    _, averages, exact = averaged_over(400, *({"precision": p, "decay": d} for p, d in kinds))
    for (precision, decay), averaged, want in zip(kinds, averages, exact, strict=True):
        found = averaged.full_precision_state_dict()["weight"].double()
        assert want[0] > 1.015
        # FP32; two BF16 numbers; one, whose ulp is 2**-7: random walks around the average.
        bound = {"master": 2e-5, "collage-light": 5e-4, "stochastic": 0.04}[precision]
        assert (found - want).abs().max() <= bound, (precision, decay)
        assert (found - want).mean().abs() <= bound / 3, (precision, decay)


def test_torchs_average_of_narrow_weights_does_not_move():
    """What these averages are for."""
    function = swa_utils.get_ema_multi_avg_fn(0.999)
    theirs = swa_utils.AveragedModel(Weight(torch.ones(3, dtype=BF16)), multi_avg_fn=function)
    theirs.update_parameters(theirs.module)
    moved = Weight(torch.full((3,), 1.0625, dtype=BF16))
    ours = optim.AveragedModel(theirs.module, decay=0.999, precision="collage-light")
    ours.update_parameters(theirs.module)
    for _ in range(500):
        theirs.update_parameters(moved)
        ours.update_parameters(moved)
    assert theirs.module.weight.eq(1.0).all()
    assert ours.module.weight.gt(1.0).all()


@pytest.mark.parametrize("decay", [0.9, None], ids=["EMA", "SWA"])
def test_fp32_is_torchs(decay):
    model = Net(FP32)
    opt = optim.AdamW(model.parameters(), lr=0.01)
    ours = optim.AveragedModel(model, opt, decay=decay)
    theirs = swa_utils.AveragedModel(
        model, multi_avg_fn=None if decay is None else swa_utils.get_ema_multi_avg_fn(decay)
    )
    for t in range(6):
        train_net(model, opt, [t])
        model.count += 1
        ours.update_parameters(model)
        theirs.update_parameters(model)
    expected = theirs.module.state_dict()
    for name, value in ours.module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    assert ours.n_averaged == theirs.n_averaged == 6
    assert ours.module.count == 13
    torch.testing.assert_close(ours(batch(1)), theirs(batch(1)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_resumed_is_uninterrupted(dtype, precision):
    def make():
        model = Net(dtype)
        opt = optim.AdamW(model.parameters(), lr=0.01, precision="master", seed=1)
        return model, opt, optim.AveragedModel(model, opt, decay=0.9, precision=precision)

    model, opt, averaged = make()
    other, again, resumed = make()
    for t in range(6):
        if t == 3:
            saved = through_file([model.state_dict(), opt.state_dict(), averaged.state_dict()])
            for target, state in zip((other, again, resumed), saved, strict=True):
                target.load_state_dict(state)
        for m, o, a in [(model, opt, averaged), (other, again, resumed)][: 1 + (t >= 3)]:
            train_net(m, o, [t])
            a.update_parameters(m)
    expected = averaged.state_dict()
    assert set(resumed.state_dict()) == set(expected)
    for name, value in resumed.state_dict().items():
        assert same_bits(value, expected[name]), name


def test_another_precision_is_not_loaded():
    averages = averaged_over(2, *({"precision": p} for p in PRECISIONS))[1]
    states = dict(zip(PRECISIONS, averages, strict=True))
    for name, averaged in states.items():
        for other, given in states.items():
            if name != other:
                with pytest.raises(RuntimeError, match=r"nexpected key|issing key"):
                    averaged.load_state_dict(given.state_dict())


def test_while_the_step_is_fused():
    results = []
    for fused in (True, False):
        model = Net(BF16)
        opt = optim.AdamW(model.parameters(), lr=0.01, precision="collage-plus")
        if fused:
            optim.fuse_backward(model, opt)
        averaged = optim.AveragedModel(model, opt, decay=0.9)
        for t in range(4):
            train_net(model, opt, [t])
            averaged.update_parameters(model)
        results.append(averaged.state_dict())
    for name, value in results[0].items():
        assert same_bits(value, results[1][name]), name


def test_swapped_in_and_back():
    model = Net(BF16)
    opt = optim.AdamW(model.parameters(), lr=0.1, precision="master")
    averaged = optim.AveragedModel(model, opt, decay=0.9)
    for t in range(3):
        train_net(model, opt, [t])
        averaged.update_parameters(model)
    before = copy.deepcopy(model.state_dict())
    wide = opt.wide_value(model.first.weight).clone()
    with averaged.swapped_in(model) as inside:
        assert inside is model
        assert same_bits(model(batch(1).to(BF16)), averaged(batch(1).to(BF16)))
        assert not torch.equal(model.first.weight, before["first.weight"])
    for name, value in model.state_dict().items():
        assert same_bits(value, before[name])
    assert same_bits(opt.wide_value(model.first.weight), wide)
    assert wide.to(BF16).float().ne(wide).any()


def test_trained_on_from_the_average():
    model, (averaged,), (exact,) = averaged_over(50, {"decay": 0.9})
    opt = optim.SGD(model.parameters(), lr=0.1, precision="master")
    opt.load_full_precision_state_dict(model, averaged.full_precision_state_dict())
    torch.testing.assert_close(opt.wide_value(model.weight).double(), exact, rtol=0, atol=1e-6)
    assert same_bits(model.weight.detach(), averaged.module.weight.detach())


def test_buffers_and_batch_statistics():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    opt = optim.SGD(model.parameters(), lr=0.1)
    mean = optim.AveragedModel(model, opt, use_buffers=True)
    last = optim.AveragedModel(model, opt, avg_fn=lambda average, weight, count: weight)
    total = torch.zeros(4)
    for t in range(3):
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(t))).sum().backward()
        opt.step()
        mean.update_parameters(model)
        last.update_parameters(model)
        total += model[1].running_mean
    torch.testing.assert_close(mean.module[1].running_mean, total / 3)
    assert same_bits(last.module[1].running_mean, model[1].running_mean)
    assert same_bits(last.module[0].weight.detach(), model[0].weight.detach())
    assert mean.module[1].num_batches_tracked == 3
    swa_utils.update_bn([torch.full((8, 4), 2.0), torch.ones(8, 4)], mean)
    assert mean.module[1].num_batches_tracked == 2


def test_copies_and_models_of_others():
    model = Net(BF16)
    opt = optim.AdamW(model.parameters(), precision="master")
    averaged = optim.AveragedModel(model, opt, decay=0.5)
    model_copy, opt_copy, averaged_copy = copy.deepcopy((model, opt, averaged))
    for m, o, a in ((model, opt, averaged), (model_copy, opt_copy, averaged_copy)):
        train_net(m, o, range(2))
        a.update_parameters(m)
    for name, value in averaged.state_dict().items():
        assert same_bits(value, averaged_copy.state_dict()[name])
    with pytest.raises(ValueError, match="no parameter of this model"):
        copy.deepcopy(averaged).update_parameters(model)
    with pytest.raises(ValueError, match="other parameters than"):
        averaged.update_parameters(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="other parameters than"), averaged.swapped_in(nn.ReLU()):
        pass


def test_without_an_optimizer():
    model = Weight(torch.full((3,), 1.0, dtype=E4M3))
    averaged = optim.AveragedModel(model, decay=0.5, precision="collage-light")
    averaged.update_parameters(model)
    model.weight.data = torch.full((3,), 2.0).to(E4M3)
    averaged.update_parameters(model)
    assert averaged.full_precision_state_dict()["weight"].eq(1.5).all()


REFUSED = {
    "precision": ({"precision": "kahan"}, "precision='kahan' is not available for averages"),
    "decay": ({"decay": 1.5}, r"decay=1.5 is out of range: use a number from 0 to 1"),
    "both": ({"decay": 0.5, "avg_fn": max}, "decay and avg_fn both say how"),
    "seed": ({"seed": -1}, "seed=-1 is out of range"),
    "optimizer": (
        {"optimizer": torch.optim.SGD([torch.zeros(1)])},
        "optimizer is of type SGD: pass one of subulp's",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        optim.AveragedModel(Net(BF16), **options)


def test_dtypes_without_such_averages():
    for dtype, message in ((torch.float64, r"model\.float\(\)"), (E4M3, "collage-light")):
        with pytest.raises(ValueError, match=f"parameter 'weight': .*{message}"):
            optim.AveragedModel(Weight(torch.zeros(2, dtype=dtype)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cast", ["float", "half", "double"])
def test_other_dtypes_would_lose_what_lies_beside(precision, cast):
    model, (averaged,), _ = averaged_over(5, {"precision": precision})
    before = averaged.full_precision_state_dict()["weight"]
    with pytest.raises(ValueError, match="would lose what is kept beside it"):
        getattr(nn.Sequential(averaged), cast)()
    assert same_bits(averaged.full_precision_state_dict()["weight"], before)
    moved = averaged.to("cpu").bfloat16()
    assert same_bits(moved.full_precision_state_dict()["weight"], before)
    assert model.weight.dtype == BF16

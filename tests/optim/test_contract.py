"""What torch.optim promises, these optimizers keep."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from subulp import optim

from .support import (
    BF16,
    E4M3,
    FP16,
    FP32,
    OPTIMIZERS,
    SOME,
    Case,
    Run,
    assert_same,
    cases,
    gradient,
    parameters,
    same_bits,
)

# ----------------------------------------------------------------------------------- groups


def test_groups_are_separate_optimizers():
    """Each with a precision, a rate and options of its own."""
    settings = [
        {"precision": "collage-light", "lr": 0.1},
        {
            "precision": optim.ExtraBits(8, "deterministic"),
            "betas": (0.5, 0.9),
            "weight_decay": 0.0,
        },
        {"precision": "nearest", "eps": 1e-2, "maximize": True},
        {"precision": "collage-plus", "arithmetic": "strict"},
        {"precision": "fp32"},
    ]
    dtypes = (BF16, FP16, BF16, BF16, FP32)
    together = [parameters(dtype) for dtype in dtypes]
    alone = [parameters(dtype) for dtype in dtypes]
    groups = [{"params": p, **s} for p, s in zip(together, settings, strict=True)]
    one = optim.AdamW(groups, lr=0.01)
    many = [optim.AdamW(p, **({"lr": 0.01} | s)) for p, s in zip(alone, settings, strict=True)]
    for t in (1, 2, 3):
        for params, others in zip(together, alone, strict=True):
            for i, (p, q) in enumerate(zip(params, others, strict=True)):
                p.grad, q.grad = gradient(p, t, i), gradient(q, t, i)
        one.step()
        for each in many:
            each.step()
    for params, others, each in zip(together, alone, many, strict=True):
        assert_same(Run(params, one), Run(others, each))


def test_group_takes_defaults():
    a, b = parameters(BF16, [(3,), (4,)])
    opt = optim.SGD([{"params": [a], "momentum": 0.5}, {"params": [b]}], lr=0.2, precision="kahan")
    first, second = opt.param_groups
    assert (first["momentum"], first["lr"], first["precision"]) == (0.5, 0.2, "kahan")
    assert (second["momentum"], second["lr"], second["precision"]) == (0.0, 0.2, "kahan")
    assert first["seed"] == second["seed"]


@pytest.mark.parametrize(
    ("dtype", "equals"), [(FP32, "fp32"), (BF16, "collage-plus"), (FP16, "collage-plus")]
)
def test_default_precision(dtype, equals):
    case = Case("adamw", equals, dtype)
    assert_same(case.fresh(precision="auto").train(), case.fresh().train())


def test_named_parameters():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    opt = optim.AdamW(net.named_parameters(), nonfinite="raise")
    assert opt.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert opt.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"
    net[1].bias.grad = torch.full((2,), torch.nan)
    with pytest.raises(FloatingPointError, match=r"'1\.bias'"):
        opt.step()


def test_group_added_later():
    case = Case("adamw", "collage-plus", BF16)
    run, late = case.fresh([(5,)]).train(2), case.fresh([(4, 3)], precision="master")
    params = parameters(BF16, [(4, 3)])
    run.optimizer.add_param_group({"params": params, "precision": "master"})
    for t in (1, 2):
        late.params[0].grad, params[0].grad = gradient(params[0], t, 0), gradient(params[0], t, 0)
        late.optimizer.step()
        run.optimizer.step()
    assert_same(Run(params, run.optimizer), late)
    assert run.optimizer.state[run.params[0]]["step"] == 4


# ------------------------------------------------------------------------------------ steps


def test_closure():
    p = nn.Parameter(torch.ones(3))
    opt = optim.SGD([p], lr=0.5)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert opt.step(closure).item() == 3.0
    assert calls == [True]
    assert p.eq(0.0).all()
    assert opt.step() is None


@pytest.mark.parametrize("case", cases())
def test_maximize_is_negated_gradients(case):
    ascent = case.fresh(maximize=True, lr=0.5).train()
    assert_same(ascent, case.fresh(lr=0.5).train(change=lambda g: (-g.float()).to(g.dtype)))
    assert not same_bits(ascent.params[0], case.fresh(lr=0.5).train().params[0])


@pytest.mark.parametrize("case", cases(["adamw", "sgd-momentum"]))
def test_without_gradient_untouched(case):
    run = case.fresh(lr=1.0)
    before = run.bits()
    run.params[1].grad = gradient(run.params[1], 1, 1)
    run.optimizer.step()
    after = run.bits()
    for i in (0, 2, 3):
        assert same_bits(after[f"parameter {i}"], before[f"parameter {i}"])
        assert run.params[i] not in run.optimizer.state
    assert not same_bits(after["parameter 1"], before["parameter 1"])


@pytest.mark.parametrize("case", cases(SOME))
def test_together_is_one_by_one(case):
    """Batching small tensors changes no bit, random ones included."""
    shapes = [(n,) for n in range(40)]
    together, alone = case.fresh(shapes).train(2), case.fresh(shapes)
    for t in (1, 2):
        for i, p in enumerate(alone.params):
            alone.optimizer.zero_grad()
            p.grad = gradient(p, t, i)
            alone.optimizer.step()
    assert_same(alone, together)


@pytest.mark.parametrize("case", cases(["adamw"]))
def test_scalar_is_vector_of_one(case):
    scalar, vector = case.fresh([()]), case.fresh([(1,)])
    scalar.train(), vector.train()
    assert scalar.params[0].shape == ()
    for name, value in vector.bits().items():
        assert same_bits(scalar.bits()[name].reshape(value.shape), value), name


@pytest.mark.parametrize("case", cases(["adamw"], dtypes=[BF16]))
def test_gradient_dtypes_in_one_group(case):
    """A bucket has one gradient dtype; FP32 gradients of narrow values are the same numbers."""
    mixed = case.fresh()
    mixed.params[1].grad_dtype = torch.float32
    mixed.t = 1
    for i, p in enumerate(mixed.params):
        p.grad = gradient(p, 1, i).to(p.grad_dtype)
    mixed.optimizer.step()
    assert_same(mixed, case.fresh().train(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", cases(["adamw", "sgd-momentum"], dtypes=[BF16]))
def test_default_dtype_does_not_matter(case, dtype):
    expected = case.fresh().train()
    run = case.fresh()
    torch.set_default_dtype(dtype)
    try:
        for t in (1, 2, 3):
            for i, p in enumerate(run.params):
                with torch.no_grad():
                    torch.set_default_dtype(torch.float32)
                    p.grad = gradient(p, t, i)
                    torch.set_default_dtype(dtype)
            run.optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(run, expected)


def test_momentum_that_begins_later():
    """Schedulers raise it from zero; then the buffer begins, as torch's does."""
    ours, theirs = parameters(FP32, [(9,)]), parameters(FP32, [(9,)])
    run = optim.SGD(ours, lr=0.1)
    expected = torch.optim.SGD(theirs, lr=0.1)
    for t in range(1, 6):
        for opt, params in ((run, ours), (expected, theirs)):
            opt.param_groups[0]["momentum"] = 0.0 if t < 3 else 0.9
            params[0].grad = gradient(params[0], t, 0)
            opt.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-6)


def test_step_hooks():
    p = nn.Parameter(torch.ones(2))
    opt = optim.AdamW([p])
    seen = []
    before = opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", p[0].item())))
    after = opt.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o is opt)))
    p.grad = torch.ones(2)
    opt.step()
    assert seen == [("pre", 1.0), ("post", True)]
    before.remove(), after.remove()
    opt.step()
    assert len(seen) == 2


def test_zero_grad():
    (p,) = parameters(BF16, [(3,)])
    opt = optim.AdamW([p])
    p.grad = torch.ones_like(p)
    opt.zero_grad(set_to_none=False)
    assert p.grad.eq(0).all()
    opt.zero_grad()
    assert p.grad is None


# ---------------------------------------------------------------------------- learning rates

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.25, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=13),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[3],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}


def test_every_scheduler_of_torch_is_tried():
    shipped = set(lr_scheduler.__all__) - {"LRScheduler"}
    assert shipped - set(SCHEDULERS) == set()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name, optimizer):
    """The same rates and momenta as with torch.optim, and they reach the parameters."""
    ours_class, theirs_class, options = OPTIMIZERS[optimizer]
    options = {"lr": 0.02} | options | {"weight_decay": 0.0}
    runs = []
    for cls in (ours_class, theirs_class):
        params = parameters(FP32, [(9,)])
        opt = cls(params, **options)
        scheduler = SCHEDULERS[name](opt)
        seen = []
        for t in range(1, 13):
            params[0].grad = gradient(params[0], t, 0)
            opt.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            group = opt.param_groups[0]
            seen.append((group["lr"], group.get("momentum"), group.get("betas")))
        runs.append((seen, params[0].detach()))
    (ours, ours_p), (theirs, theirs_p) = runs
    assert ours == theirs
    assert len(set(ours)) > 1
    torch.testing.assert_close(ours_p, theirs_p, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("number", "tensor"),
    [
        (1e-3, torch.tensor(1e-3, dtype=torch.float64)),
        (2.0**-7, torch.tensor(2.0**-7)),
        (float(torch.tensor(0.01)), torch.tensor([0.01])),
    ],
    ids=["fp64", "fp32", "one-element"],
)
def test_tensor_learning_rate_is_the_number(optimizer, number, tensor):
    case = Case(optimizer, "fp32", FP32)
    assert_same(case.fresh(lr=tensor.clone()).train(8), case.fresh(lr=number).train(8))


def test_tensor_learning_rate_is_read_at_each_step():
    case = Case("adamw", "collage-plus", BF16)
    lr = torch.tensor(0.01, dtype=torch.float64)
    run, expected = case.fresh(lr=lr).train(1), case.fresh(lr=0.01).train(1)
    lr.fill_(0.25)
    expected.optimizer.param_groups[0]["lr"] = 0.25
    assert_same(run.train(1), expected.train(1))


def test_scheduler_keeps_tensor_learning_rate():
    (p,) = parameters(BF16, [(4,)])
    lr = torch.tensor(0.5)
    opt = optim.AdamW([p], lr=lr)
    scheduler = lr_scheduler.StepLR(opt, 1)
    p.grad = torch.ones_like(p)
    opt.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.05)


# -------------------------------------------------------------------------- copies and scalers


def through_file(obj):
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": through_file,
}


# torch cannot unpickle a plain FP8 tensor; torch.save is for that.
COPIED = [
    pytest.param(case.values[0], how, id=f"{case.id}-{how}")
    for case in cases(SOME)
    for how in COPIES
    if (how, case.values[0].dtype) != ("pickle", E4M3)
]


@pytest.mark.parametrize(("case", "how"), COPIED)
def test_copies_continue_identically(case, how):
    run = case.fresh().train(2)
    copied = COPIES[how]((run.params, run.optimizer))
    other = Run(*copied, t=run.t)
    assert_same(other, run)
    before = other.bits()
    run.train(2)
    # The copy shares no memory with the original.
    assert_same(other, before)
    assert_same(other.train(2), run)


def test_pickle_of_module_and_optimizer_keeps_them_tied():
    net = nn.Linear(3, 2).to(BF16)
    opt = optim.AdamW(net.parameters(), precision="kahan")
    net, opt = through_file((net, opt))
    before = net.weight.detach().clone()
    net(torch.ones(1, 3, dtype=BF16)).sum().backward()
    opt.step()
    assert not torch.equal(net.weight, before)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_grad_scaler(dtype):
    """A power of two comes off without rounding; an overflow skips the step, halves the scale."""
    case = Case("adamw", "auto", dtype)
    scaled, plain = case.fresh(), case.fresh()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for t in (1, 2, 3):
        loss = sum((p * gradient(p, t, i)).sum() for i, p in enumerate(scaled.params))
        scaled.optimizer.zero_grad()
        scaler.scale(loss).backward()
        if t == 2:
            scaled.params[0].grad[0, 0] = torch.inf
        scaler.step(scaled.optimizer)
        scaler.update()
        if t == 2:
            assert_same(scaled, plain)
            assert scaler.get_scale() == 2.0**7
            plain.t += 1
        else:
            plain.train(1)
    assert_same(scaled, plain)

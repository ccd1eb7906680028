"""Every bad input is refused with its name, its value and a remedy; nothing is half done."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from subulp import optim
from subulp.ops import native

from .support import BF16, E4M3, FP16, FP32, Case, Run, assert_same, gradient, parameters, unchanged

NAN, INF = float("nan"), float("inf")


def weight(dtype: torch.dtype = BF16) -> nn.Parameter:
    return nn.Parameter(torch.ones(4).to(dtype), requires_grad=dtype.is_floating_point)


def adamw(dtype: torch.dtype = BF16, **options):
    return lambda: optim.AdamW([weight(dtype)], **options)


def sgd(**options):
    return lambda: optim.SGD([weight()], **options)


OPTIONS = {
    "unknown strategy": (
        adamw(precision="collage"),
        r"precision='collage' is unknown: use one of fp32, nearest, stochastic, kahan, "
        r"collage-light, collage-plus, fp32-states, master, extra-bits-K, "
        r"extra-bits-K-deterministic, extra-bits-K-truncate, extra-bits-K-stochastic "
        r"\(K from 1 to 16\)",
    ),
    "strategy of another type": (adamw(precision=8), r"precision=8 is neither .*ExtraBits\(8\)"),
    "no extra bits": (lambda: optim.ExtraBits(0), "k=0 is out of range: keep 1 to 16 bits"),
    "17 extra bits": (lambda: optim.ExtraBits(17), "k=17 is out of range: keep 1 to 16 bits"),
    "extra bits as text": (lambda: optim.ExtraBits("8"), "bits='8' is not an integer: keep 1"),
    "extra bits as bool": (lambda: optim.ExtraBits(True), "bits=True is not an integer"),
    "rounding": (
        lambda: optim.ExtraBits(8, rounding="x"),
        "rounding='x' is unknown: use one of 'nearest', 'deterministic', 'truncate', 'stochastic'",
    ),
    "extra-bits-0": (adamw(precision="extra-bits-0"), "k=0 is out of range: keep 1 to 16"),
    "extra-bits-17": (adamw(precision="extra-bits-17"), "k=17 is out of range: keep 1 to 16"),
    "extra bits, rounding": (
        adamw(precision="extra-bits-8-nearest"),
        "'extra-bits-8-nearest' is unknown: use one of",
    ),
    "fp32 for bf16": (
        adamw(precision="fp32"),
        r"parameter 0: precision='fp32' is not available for .* torch.bfloat16: it needs float32\. "
        "For this dtype use one of: nearest, stochastic, kahan, collage-light, collage-plus, ",
    ),
    "nearest for fp32": (
        adamw(FP32, precision="nearest"),
        "it needs bfloat16, float16, float8_e4m3fn. For this dtype use one of: fp32",
    ),
    "master for fp8": (
        adamw(E4M3, precision="master"),
        "it needs bfloat16, float16. For this dtype use one of: nearest, stochastic, "
        "collage-light, collage-plus",
    ),
    "extra bits for fp8": (adamw(E4M3, precision="extra-bits-4"), "it needs bfloat16, float16"),
    "kahan for e5m2": (
        adamw(torch.float8_e5m2, precision="nearest"),
        "torch.float8_e5m2: .*Convert the model first",
    ),
    "fp64": (adamw(torch.float64), "torch.float64: it needs .*Convert the model first"),
    "integers": (adamw(torch.int64), "parameter 0: .*torch.int64: it needs .*Convert the model"),
    "strict for master": (
        adamw(precision="master", arithmetic="strict"),
        "arithmetic='strict' is not available for precision='master' .* it exists for nearest, "
        "kahan, collage-light, collage-plus with bfloat16; use 'wide'",
    ),
    "strict for fp8": (
        adamw(E4M3, precision="nearest", arithmetic="strict"),
        "arithmetic='strict' is not available .*use 'wide'",
    ),
    "strict for fp16": (
        adamw(FP16, precision="nearest", arithmetic="strict"),
        "arithmetic='strict' is not available .*with torch.float16 parameters.*use 'wide'",
    ),
    "strict eps": (
        adamw(precision="nearest", arithmetic="strict", eps=1e-42),
        "eps=1e-42 rounds to zero in torch.bfloat16, and arithmetic='strict' .*use for example",
    ),
    "amsgrad": (adamw(amsgrad=True), "amsgrad=True is not available for subulp's AdamW"),
    "capturable": (adamw(capturable=1), "capturable=1 is unknown: use True or False"),
    "foreach": (sgd(foreach="all"), "foreach='all' is not available for subulp's SGD"),
    "differentiable": (
        sgd(differentiable=True),
        "differentiable=True is not available for subulp's SGD, whose step is always",
    ),
    "arithmetic": (adamw(arithmetic="x"), "arithmetic='x' is unknown: use 'wide' or 'strict'"),
    "nonfinite": (
        adamw(nonfinite="ignore"),
        "nonfinite='ignore' is unknown: use 'raise' or 'skip' or 'propagate'",
    ),
    "seed": (adamw(seed=-1), r"seed=-1 is out of range: use an integer from 0 to 2\*\*32 - 1"),
    "large seed": (adamw(seed=2**32), "seed=4294967296 is out of range"),
    "seed no integer": (adamw(seed=1.5), "seed=1.5 is out of range: use an integer"),
    "lr": (adamw(lr=-1e-3), "lr=-0.001 is out of range: use a finite number of FP32, 0 or more"),
    "lr NaN": (adamw(lr=NAN), "lr=nan is out of range"),
    "lr infinite": (sgd(lr=INF), "lr=inf is out of range"),
    "lr text": (sgd(lr="0.1"), "lr='0.1' is not a number: use 0 or more"),
    "lr None": (sgd(lr=None), "lr=None is not a number"),
    "lr tensor": (adamw(lr=torch.tensor(-1.0)), "lr=-1.0 is out of range"),
    "lr shape": (adamw(lr=torch.ones(2)), r"lr has shape \(2,\): .*one element; .*several groups"),
    "eps": (adamw(eps=-1e-8), "eps=-1e-08 is out of range: use a finite number of FP32, 0 or more"),
    "weight_decay": (adamw(weight_decay=-0.1), "weight_decay=-0.1 is out of range"),
    "beta1": (adamw(betas=(1.0, 0.9)), r"betas=\(1.0, 0.9\) is out of range: use .* in \[0, 1\)"),
    "beta2": (adamw(betas=(0.9, -0.1)), r"betas=\(0.9, -0.1\) is out of range"),
    "betas": (adamw(betas=0.9), r"betas=0.9 is not a pair of numbers: use for example \(0.9, "),
    "one beta": (adamw(betas=(0.9,)), r"betas=\(0.9,\) is not a pair of numbers"),
    "momentum": (sgd(momentum=-0.5), "momentum=-0.5 is out of range: use"),
    "dampening": (sgd(dampening=NAN), "dampening=nan is out of range: use"),
    "SGD weight_decay": (sgd(weight_decay=-1.0), "weight_decay=-1.0 is out of range: use"),
    "nesterov": (sgd(nesterov=True), "nesterov=True needs momentum > 0 .* got momentum=0.0"),
    "nesterov dampening": (
        sgd(nesterov=True, momentum=0.9, dampening=0.1),
        "dampening = 0, got momentum=0.9 and dampening=0.1",
    ),
    "complex": (
        lambda: optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))]),
        r"parameter 0 is complex \(torch.complex64\).*torch.view_as_real",
    ),
    "sparse": (
        lambda: optim.AdamW([nn.Parameter(torch.eye(3).to_sparse())]),
        "parameter 0 has layout torch.sparse_coo: only dense .* use to_dense",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_refused(name):
    make, message = OPTIONS[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "x"}, "precision='x' is unknown"),
        ({"precision": "fp32"}, "parameter 1: precision='fp32' is not available"),
        ({"nonfinite": "x"}, "nonfinite='x'"),
        ({"seed": 2**40}, "seed=1099511627776"),
        ({"arithmetic": "x"}, "arithmetic='x'"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (2.0, 0.5)}, r"betas=\(2.0, 0.5\)"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"lr": 1e39}, r"lr=1e\+39 is out of range: use a finite number of FP32"),
        ({"amsgrad": True}, "amsgrad=True is not available for subulp's AdamW"),
        ({"differentiable": True}, "differentiable=True is not available"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay=False .* has Adam for"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_group_refused_and_not_added(options, message):
    """A group's options are checked as the optimizer's own, also when it comes later."""
    params = [*parameters(FP32, [(3,)]), *parameters(BF16, [(3,)])]
    if options.get("precision") != "fp32":
        params = params[1:]
    run = Case("adamw", "kahan", BF16).fresh([(4,)])
    with unchanged(run), pytest.raises(ValueError, match=message):
        run.optimizer.add_param_group({"params": params, **options})
    with pytest.raises(ValueError, match=message):
        optim.AdamW([{"params": params, **options}])
    run.optimizer.add_param_group({"params": parameters(BF16, [(3,)])})


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.SGD])
def test_options_of_torch_set_in_a_group_later(kind):
    opt = kind([weight()], lr=0.5)
    group = opt.param_groups[0]
    group["params"][0].grad = torch.ones(4, dtype=BF16)
    name = "differentiable" if kind is optim.SGD else "amsgrad"
    before = group["params"][0].clone()
    group[name] = True
    with pytest.raises(ValueError, match=f"{name}=True is not available for subulp's"):
        opt.step()
    assert torch.equal(group["params"][0], before)
    # At its default value, and names that mean nothing to anybody, as with torch's.
    group.update({name: False, "foreach": True, "max_lr": 3.0})
    opt.step()
    assert not torch.equal(group["params"][0], before)


@pytest.mark.parametrize("value", [None, "no", 1.0, torch.tensor(1.0)])
@pytest.mark.parametrize("name", ["maximize", "nesterov"])
def test_flags_of_another_kind_are_refused_before_anything_steps(name, value):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = optim.SGD([{"params": [p]} for p in params], lr=0.1, momentum=0.9)
    for p in params:
        p.grad = torch.ones(4)
    optimizer.param_groups[1][name] = value
    with pytest.raises(ValueError, match=f"{name}=.* is unknown: use True or False"):
        optimizer.step()
    assert all(torch.equal(p.detach(), torch.ones(4)) for p in params)


def test_defaults_are_checked_also_where_groups_override_them():
    with pytest.raises(ValueError, match=r"lr=-1\.0"):
        optim.AdamW([{"params": [weight()], "lr": 0.1}], lr=-1.0)


def test_group_without_a_seed_takes_the_default():
    opt = optim.AdamW([{"params": [weight()], "seed": None}], seed=9)
    assert opt.param_groups[0]["seed"] == 9


# -------------------------------------------------------------------------------- gradients


GRADIENTS = {
    "sparse": (
        lambda p: torch.eye(4, dtype=p.dtype).to_sparse(),
        r"gradient of parameter 0 of group 1 has layout torch.sparse_coo: .*sparse=False",
    ),
    "complex": (
        lambda p: torch.ones(4, 4, dtype=torch.complex64),
        r"gradient of parameter 0 of group 1 is complex \(torch.complex64\)",
    ),
    "fp64": (
        lambda p: torch.ones(4, 4, dtype=torch.float64),
        "gradient of parameter 0 of group 1: dtype=torch.float64 is not a format of subulp: use",
    ),
}


@pytest.mark.parametrize("policy", ["propagate", "raise", "skip"])
@pytest.mark.parametrize("fresh", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_refused_with_nothing_updated(name, fresh, policy):
    """Also what comes before it: the gradients of all groups are looked at first."""
    make, message = GRADIENTS[name]
    a, b = parameters(BF16, [(3, 3), (4, 4)])
    b.grad_dtype = None
    groups = [{"params": [a]}, {"params": [b]}]
    run = Run([a, b], optim.AdamW(groups, precision="collage-plus", nonfinite=policy))
    if not fresh:
        run.train(2)
    a.grad, b.grad = gradient(a, 9, 0), make(b)
    with unchanged(run), pytest.raises(ValueError, match=message):
        run.optimizer.step()


# --------------------------------------------------------------------------------- backends


@contextlib.contextmanager
def no_library():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library_path", lambda: Path("nowhere") / "libsubulp.so")
        native.library.cache_clear()
        try:
            yield
        finally:
            native.library.cache_clear()


STEPPING = [
    Case("adamw", "collage-plus", BF16),
    Case("sgd", "kahan", FP16),
    # Its running largest gradient is updated before the kernel runs.
    Case("adamw", "collage-light", E4M3),
]


@pytest.mark.parametrize("case", STEPPING, ids=str)
def test_missing_library(case):
    run = case.fresh().train(2)
    for i, p in enumerate(run.params):
        p.grad = gradient(p, 50, i)
    message = (
        r"C\+\+ kernels are missing: there is no file .*libsubulp.so. "
        r".*pip install .*SUBULP_BACKEND=reference"
    )
    with no_library(), unchanged(run), pytest.raises(RuntimeError, match=message):
        run.optimizer.step()
    assert_same(run.train(2), case.fresh().train(4))


@pytest.mark.parametrize("case", STEPPING, ids=str)
def test_remedy_of_a_missing_library_works(case, monkeypatch):
    expected = case.fresh().train(1)
    monkeypatch.setenv("SUBULP_BACKEND", "reference")
    with no_library():
        assert_same(case.fresh(nonfinite="raise").train(1), expected)


@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_unknown_backend(policy, monkeypatch):
    run = STEPPING[0].fresh(nonfinite=policy).train(1)
    monkeypatch.setenv("SUBULP_BACKEND", "bogus")
    message = re.escape("SUBULP_BACKEND='bogus' is unknown: use one of")
    with unchanged(run), pytest.raises(ValueError, match=message):
        run.optimizer.step()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shared", ["all", "a part"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_parameters_that_share_memory_are_refused(dtype, shared, late):
    """A call updates them at once: which comes first would depend on the number of threads."""
    buffer = torch.ones(3000).to(dtype)
    first, second = nn.Parameter(buffer[:2000]), nn.Parameter(torch.ones(2000).to(dtype))
    other = nn.Parameter(torch.ones(7).to(dtype))
    optimizer = optim.AdamW([other, first, second], lr=0.1)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    for _ in range(3 if late else 0):
        optimizer.step()
    second.data = first.data if shared == "all" else buffer[1000:]
    before = [p.detach().clone() for p in (other, first, second)]
    with pytest.raises(ValueError, match="parameter 1 and parameter 2 share memory"):
        optimizer.step()
    assert all(map(torch.equal, before, [p.detach() for p in (other, first, second)]))
    second.data = torch.ones(2000).to(dtype)
    optimizer.step()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("of", ["another", "its own", "a part of another"])
@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_in_the_memory_of_parameters_are_refused(dtype, make, of, late):
    """They would be read while the parameter is updated, before or after by the threads."""
    begin = 700 if of == "a part of another" else 0
    first, second = (nn.Parameter(torch.ones(n).to(dtype)) for n in (2000, 2000 - begin))
    empty = nn.Parameter(first.detach()[500:500])
    optimizer = make([empty, first, second], lr=0.1)
    for p in (empty, first, second):
        p.grad = torch.ones_like(p)
    for _ in range(3 if late else 0):
        optimizer.step()
    second.grad = (second if of == "its own" else first).detach()[begin:]
    before = [p.detach().clone() for p in (first, second)]
    name = "parameter 2" if of == "its own" else "parameter 1"
    message = rf"gradient of parameter 2 lies in the memory of {name}, .* nothing was updated"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(map(torch.equal, before, [p.detach() for p in (first, second)]))
    second.grad = second.grad.clone()
    optimizer.step()
    assert not torch.equal(before[1], second.detach())


def test_gradients_may_share_memory_with_each_other():
    params = [weight(), weight()]
    expected = [weight(), weight()]
    gradient = torch.tensor([1.0, -2.0, 3.0, 4.0]).to(params[0].dtype)
    for p, q in zip(params, expected, strict=True):
        p.grad, q.grad = gradient, gradient.clone()
    for group in (params, expected):
        optim.AdamW(group, lr=0.1).step()
    assert all(map(torch.equal, params, expected))


def test_a_parameter_twice_in_a_group_is_refused():
    """torch warns when it is added, and steps it twice."""
    p, other = weight(), weight()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = optim.AdamW([other, p, p])
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"parameter 2 is in its group twice, .* Leave one"):
        optimizer.step()
    assert p.tolist() == [1.0] * 4
    p.grad = None
    with pytest.raises(ValueError, match="is in its group twice"):
        optim.fuse_backward(nn.ParameterList([p, other]), optimizer)


def test_strict_arithmetic_under_another_default_device():
    with torch.device("meta"):
        optim.AdamW(
            [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device="cpu"))],
            arithmetic="strict",
        )

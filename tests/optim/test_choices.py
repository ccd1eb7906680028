"""A precision for each dtype, for patterns of names, or by a function."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from subulp import optim

from .support import BF16, FP32, Run, assert_same, gradient, parameters
from .test_state_dict import through_file

MIXED = {BF16: "collage-light", FP32: "fp32"}


def model() -> nn.Sequential:
    """BF16 layers with FP32 norms."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(BF16)
    net[1].float()
    return net


def run_of(net: nn.Module, **options) -> Run:
    names = options.pop("names", False)
    params = net.named_parameters() if names else net.parameters()
    return Run(list(net.parameters()), optim.AdamW(params, lr=0.01, seed=1, **options))


def by_hand() -> Run:
    """The same parameters in groups that a user makes."""
    net = model()
    groups = [
        {"params": [p for p in net.parameters() if p.dtype == dtype], "precision": precision}
        for dtype, precision in MIXED.items()
    ]
    return Run(list(net.parameters()), optim.AdamW(groups, lr=0.01, seed=1))


WAYS = {
    "dtype": {"precision": MIXED},
    "canonical": {"precision": "float32:fp32,bfloat16:collage-light"},
    "name": {"precision": {"1.*": "fp32", "*": "collage-light"}, "names": True},
    "function": {"precision": lambda name, p: MIXED[p.dtype]},
    "named function": {
        "precision": lambda name, p: "fp32" if name.startswith("1.") else "collage-light",
        "names": True,
    },
    "pattern of dtypes": {"precision": {"*": MIXED}, "names": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_steps_are_those_of_groups_made_by_hand(way):
    expected = by_hand().train(3)
    run = run_of(model(), **WAYS[way]).train(3)
    assert_same(run, expected)
    groups = 1 if way in ("dtype", "canonical", "pattern of dtypes") else 2
    assert len(run.optimizer.param_groups) == groups
    bytes_ = run.optimizer.bytes_per_parameter()
    assert bytes_["total"] == pytest.approx(expected.optimizer.bytes_per_parameter()["total"])


@pytest.mark.parametrize("way", WAYS)
def test_resumed_is_uninterrupted(way):
    run = run_of(model(), **WAYS[way]).train(3)
    other = run_of(model(), **WAYS[way])
    for p, q in zip(other.params, run.params, strict=True):
        p.data.copy_(q.data)
    other.optimizer.load_state_dict(through_file(run.optimizer.state_dict()))
    other.t = run.t
    assert_same(other.train(2), run.train(2))


def test_one_group_stays_one_to_a_scheduler():
    run = run_of(model(), precision=MIXED)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, [lambda t: 0.5**t])
    run.train(1)
    scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] == 0.005
    assert run.optimizer.param_groups[0]["precision"] == "bfloat16:collage-light,float32:fp32"


def test_groups_that_were_split_have_the_options_of_one():
    net = model()
    groups = [
        {"params": list(net.named_parameters())[:4], "lr": 0.5, "tag": "a"},
        {"params": list(net.named_parameters())[4:], "precision": "master"},
    ]
    opt = optim.AdamW(groups, lr=0.1, precision={"1.*": "fp32", "*": "kahan"})
    found = [(g["lr"], g.get("tag"), g["precision"], g["param_names"]) for g in opt.param_groups]
    assert found == [
        (0.5, "a", "kahan", ["0.weight", "0.bias"]),
        (0.5, "a", "fp32", ["1.weight", "1.bias"]),
        (0.1, None, "master", ["2.weight", "2.bias"]),
    ]
    opt.add_param_group({"params": [("1.extra", nn.Parameter(torch.ones(2)))]})
    assert opt.param_groups[3]["precision"] == "fp32"


def test_copies_choose_as_before():
    run = run_of(model(), **WAYS["name"]).train(1)
    for twin in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        twin.optimizer.add_param_group({"params": [("1.x", nn.Parameter(torch.ones(2)))]})
        assert twin.optimizer.param_groups[-1]["precision"] == "fp32"
        twin.optimizer.param_groups.pop()
        twin.optimizer._stored.pop()
        assert_same(twin.train(1), copy.deepcopy(run).train(1))


def test_a_dtype_may_be_chosen_later():
    run = run_of(model(), precision="auto").train(1)
    run.optimizer.change_precision({BF16: "master", FP32: "fp32"})
    run.train(1)
    assert run.optimizer.state[run.params[0]]["step"] == 2
    assert "master" in run.optimizer.state[run.params[0]]
    run.optimizer.param_groups[0]["precision"] = {BF16: optim.ExtraBits(16), FP32: "fp32"}
    run.train(1)
    assert "signed_bits" in run.optimizer.state[run.params[0]]


def test_fused_steps_are_the_same():
    runs = []
    for fused in (True, False):
        run = run_of(net := model(), precision=MIXED)
        if fused:
            optim.fuse_backward(net, run.optimizer)
        for t in range(3):
            loss = sum(
                (p.float() * gradient(p, t, i).float()).sum() for i, p in enumerate(run.params)
            )
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs.append(run)
    assert_same(*runs)


NET = model()
REFUSED = {
    "a dtype that is missing": (
        {"precision": {BF16: "master"}},
        "parameter 2: .*nothing for a parameter of dtype torch.float32, only for bfloat16: add it",
    ),
    "a dtype that cannot": ({"precision": {FP32: "master"}}, "needs bfloat16, float16"),
    "no dtype": ({"precision": {}}, "has no dtype"),
    "both kinds": ({"precision": {BF16: "master", "*": "fp32"}}, "beside patterns of names"),
    "a number": ({"precision": {BF16: 3}}, "precision has 3 for torch.bfloat16"),
    "no names": ({"precision": {"*": "master"}}, r"pass model.named_parameters\(\)"),
    "no match": (
        {"precision": {"0.*": "master"}, "names": True},
        r"'1.weight' matches no pattern of precision \('0.\*'\): add '\*' as the last",
    ),
    "an unknown name": ({"precision": {"*": "mastr"}, "names": True}, "'mastr' is unknown"),
    "a function's": ({"precision": lambda name, p: None}, "precision=None is neither"),
    "a function's dtype": (
        {"precision": lambda name, p: "fp32"},
        "parameter 0: .*not available for a parameter of dtype torch.bfloat16",
    ),
    "a wrong canonical name": ({"precision": "bf16:master"}, "no dtype of torch in 'bf16:master'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        run_of(NET, **options)


def test_a_refused_part_leaves_no_group():
    opt = optim.AdamW(parameters(FP32, [(2,)]))
    params = [nn.Parameter(torch.ones(2, dtype=BF16)), nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="not available"):
        opt.add_param_group({"params": params, "precision": lambda name, p: "master"})
    assert len(opt.param_groups) == 1
    opt.state_dict()


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float64, r"model\.float\(\), or give .*torch\.optim"),
        (torch.float8_e5m2, "to float8_e4m3fn"),
    ],
    ids=str,
)
def test_dtypes_that_no_precision_has_name_the_way_out(dtype, message):
    for precision in ("auto", "fp32", "collage-plus", MIXED):
        p = nn.Parameter(torch.ones(2).to(dtype))
        with pytest.raises(ValueError, match="nothing for|" + message):
            optim.AdamW([p], precision=precision)


def test_patterns_are_of_names_without_wrappers():
    """Those that DistributedDataParallel and torch.compile put before a model's own."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).bfloat16()
    precision = {"0.*": "master", "*": "nearest"}
    plain = optim.AdamW(net.named_parameters(), precision=precision)
    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        named = [(prefix + name, p) for name, p in net.named_parameters()]
        found = optim.AdamW(named, precision=precision)
        assert [(g["precision"], g["params"]) for g in found.param_groups] == [
            (g["precision"], g["params"]) for g in plain.param_groups
        ]
        # As they are they count too.
        whole = optim.AdamW(named, precision={f"{prefix}0.*": "master", "*": "nearest"})
        assert [g["precision"] for g in whole.param_groups] == ["master", "nearest"]


def test_a_module_called_module_is_no_wrapper():
    """Its name is a part of the model's own, as long as others have none such."""
    net = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    named = list(net.bfloat16().named_parameters())
    precision = {"weight": "master", "module.*": "kahan", "*": "nearest"}
    groups = optim.AdamW(named, precision=precision).param_groups
    assert [(g["precision"], len(g["params"])) for g in groups] == [("kahan", 2), ("nearest", 2)]


def test_names_that_would_draw_the_same_bits_are_refused():
    first, second = (torch.nn.Parameter(torch.ones(2).bfloat16()) for _ in range(2))
    message = "'fc.weight' and 'module.fc.weight' are one name without what"
    with pytest.raises(ValueError, match=message):
        optim.AdamW([("fc.weight", first), ("module.fc.weight", second)])
    optimizer = optim.AdamW([("fc.weight", first)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("module.fc.weight", second)]})
    assert len(optimizer.param_groups) == 1

"""``capturable=True``: a step that a graph holds counts, decays and draws anew at every replay."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subulp import diagnostics, optim
from subulp.ops import capture
from subulp.optim import capturable
from subulp.optim.parameters import buckets_of
from tests.ops.support import environment, interpreted

from .graphs import Graph
from .support import BF16, E4M3, FP16, FP32, assert_same, gradient, parameters, patterns, same_bits
from .test_state_dict import through_file

pytest.importorskip("triton", reason="Triton is not installed")

SHAPES = ((1030,), (3, 5), ())
RATES = (0.01, 0.02, 0.005, 1 / 3, 0.0, 1e-3, 0.03)


@dataclass(frozen=True)
class Case:
    """An optimizer over parameters of one dtype in one precision."""

    kind: Any
    dtype: torch.dtype
    precision: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = "".join(f"-{name}" for name in self.options)
        return f"{self.kind.__name__}-{str(self.dtype)[6:]}-{self.precision}{given}"

    def make(self, params: Any, **changes: Any) -> Any:
        given = {"lr": RATES[0], "precision": self.precision, "seed": 3, **self.options, **changes}
        return self.kind(params, **given)


MOMENTUM, NESTEROV = {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}
CASES = (
    Case(optim.AdamW, BF16, "collage-plus"),
    Case(optim.AdamW, BF16, "stochastic"),
    Case(optim.AdamW, BF16, "kahan", {"betas": (0.5, 0.0), "weight_decay": 0.0}),
    Case(optim.AdamW, BF16, "extra-bits-8-stochastic"),
    Case(optim.AdamW, E4M3, "collage-plus"),
    Case(optim.AdamW, FP32, "fp32", {"maximize": True}),
    Case(optim.Adam, E4M3, "stochastic", {"weight_decay": 0.1}),
    Case(optim.Adam, FP16, "master"),
    Case(optim.SGD, BF16, "stochastic"),
    Case(optim.SGD, BF16, "collage-plus", MOMENTUM),
    Case(optim.SGD, BF16, "kahan", NESTEROV | {"weight_decay": 0.1}),
    Case(optim.SGD, BF16, "extra-bits-8-stochastic", NESTEROV),
    Case(optim.SGD, E4M3, "stochastic", MOMENTUM),
)
SOME = (CASES[0], CASES[4], CASES[11])
every_case = pytest.mark.parametrize("case", CASES, ids=str)
some_cases = pytest.mark.parametrize("case", SOME, ids=str)


def give_gradients(params: list[nn.Parameter], t: int) -> None:
    """In place, as a graph's own backward pass would."""
    for i, p in enumerate(params):
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(gradient(p, t, i))


def triton() -> Any:
    return environment(SUBULP_BACKEND="triton")


def bits(params: list[nn.Parameter], optimizer: Any) -> dict[str, Tensor]:
    """Clones of the parameters and of every state, by name."""
    found = {}
    for i, p in enumerate(params):
        states = {"parameter": p.detach(), **optimizer.state.get(p, {})}
        found |= {f"{name} {i}": value.clone() for name, value in states.items()}
    return found


def ordinary(case: Case, steps: int) -> tuple[list[nn.Parameter], Any]:
    """As many steps of the C++ kernels, each with a rate of its own."""
    params = parameters(case.dtype, SHAPES)
    optimizer = case.make(params)
    go_on(params, optimizer, range(steps))
    return params, optimizer


def go_on(params: list[nn.Parameter], optimizer: Any, steps: Any) -> None:
    for t in steps:
        give_gradients(params, t)
        lr = optimizer.param_groups[0]["lr"]
        if isinstance(lr, Tensor):
            lr.fill_(RATES[t])
        else:
            optimizer.param_groups[0]["lr"] = RATES[t]
        optimizer.step()


def capturing(case: Case, warm: int = 1, **changes: Any) -> tuple[list[nn.Parameter], Any, Graph]:
    """Some steps, and a graph of one that comes after them."""
    params = parameters(case.dtype, SHAPES)
    changes = {"lr": torch.tensor(0.0, dtype=torch.float64), **changes}
    optimizer, graph = case.make(params, capturable=True, **changes), Graph()
    with triton():
        go_on(params, optimizer, range(warm))
        before = bits(params, optimizer)
        with graph.captured():
            optimizer.step()
    assert_same(bits(params, optimizer), before)
    return params, optimizer, graph


@interpreted
@every_case
def test_replays_are_steps(case):
    expected = ordinary(case, 5)
    params, optimizer, graph = capturing(case, 2)
    scaled = case.dtype == E4M3 and (case.kind is not optim.SGD or "momentum" in case.options)
    step = "sgd_step_kernel" if case.kind is optim.SGD else "adam_step_kernel"
    assert graph.kernels == ["counts_kernel", *["scales_kernel"] * scaled, step]
    for t in range(2, 5):
        give_gradients(params, t)
        optimizer.param_groups[0]["lr"].fill_(RATES[t])
        graph.replay()
    assert_same(bits(params, optimizer), bits(*expected))

    # Saved and resumed without a graph, by other kernels: the same steps.
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["capturable"] = False
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = case.make(twins)
    resumed.load_state_dict(saved)
    go_on(twins, resumed, (5, 6))
    go_on(*expected, (5, 6))
    assert_same(bits(twins, resumed), bits(*expected))


@interpreted
@some_cases
def test_steps_outside_of_a_graph(case):
    for lr in (RATES[0], torch.tensor(0.0, dtype=torch.float64)):
        params = parameters(case.dtype, SHAPES)
        optimizer = case.make(params, lr=lr, capturable=True)
        with triton():
            go_on(params, optimizer, range(3))
        assert_same(bits(params, optimizer), bits(*ordinary(case, 3)))


@interpreted
def test_a_rate_in_fp32_is_what_it_holds():
    case = CASES[0]
    params, _, graph = capturing(case, lr=torch.tensor(0.0))
    give_gradients(params, 1)
    graph.replay()
    twins = parameters(case.dtype, SHAPES)
    other = case.make(twins, lr=torch.tensor(0.0))
    go_on(twins, other, (0,))
    # The graph's rate stayed that of the last step before it.
    give_gradients(twins, 1)
    other.step()
    assert all(map(same_bits, [p.detach() for p in params], [p.detach() for p in twins]))


@interpreted
@some_cases
def test_a_float_rate_stays_as_it_was_captured(case):
    params, optimizer, graph = capturing(case, lr=RATES[0])
    optimizer.param_groups[0]["lr"] = 100.0
    give_gradients(params, 1)
    graph.replay()
    twins = parameters(case.dtype, SHAPES)
    other = case.make(twins)
    for t in range(2):
        give_gradients(twins, t)
        other.step()
    assert_same(bits(params, optimizer), bits(twins, other))


@interpreted
def test_graphs_keep_what_they_read():
    """Tables that were given up elsewhere, a rate that was replaced, gradients of their own."""
    case = CASES[1]
    params = parameters(case.dtype, SHAPES)
    rate = torch.tensor(RATES[0], dtype=torch.float64)
    optimizer, graph = case.make(params, capturable=True, lr=rate), Graph()
    with triton():
        go_on(params, optimizer, range(1))
        own = [torch.empty_like(p) for p in params]
        for p, grad in zip(params, own, strict=True):
            p.grad = grad
        with graph.captured():
            optimizer.step()
        held = len(optimizer._graphs._captured)
        # Of the step, of the counters, of the corrections; the rate; two copies that a graph makes.
        assert held >= 4
        optimizer.param_groups[0]["lr"] = 0.5
        for t in range(1, 3):
            give_gradients(params, t)
            rate.fill_(RATES[t])
            graph.replay()
        # Steps beside the graph go on with it.
        for p in params:
            p.grad = None
        go_on(params, optimizer, (3,))
        assert len(optimizer._graphs._captured) == held
    assert_same(bits(params, optimizer), bits(*ordinary(case, 4)))


@interpreted
def test_tables_that_no_graph_reads_are_given_up(monkeypatch):
    monkeypatch.setattr(capture, "_RECENT", 3)
    params, optimizer, _ = capturing(CASES[0])
    kept = []
    with triton():
        for t in range(1, 8):
            for p in params:
                kept.append(p.grad)
                p.grad = None
            go_on(params, optimizer, (1,))
            assert len(optimizer._graphs._recent) == 3, t


# ------------------------------------------------------------------------- counters and buffers


@interpreted
def test_buffers_that_join_late():
    def late(changes, backend):
        params = parameters(BF16, SHAPES)
        optimizer = optim.SGD(params, lr=0.01, precision="stochastic", seed=3, **changes)
        with environment(SUBULP_BACKEND=backend):
            for t in range(4):
                optimizer.param_groups[0]["momentum"] = 0.9 if t >= 2 else 0.0
                give_gradients(params, t)
                optimizer.step()
        return bits(params, optimizer)

    assert_same(late({"capturable": True}, "triton"), late({}, "cpu"))


@interpreted
@some_cases
def test_parameters_have_counts_of_their_own(case):
    def uneven(changes, backend):
        params = parameters(case.dtype, SHAPES)
        optimizer = case.make(params, **changes)
        with environment(SUBULP_BACKEND=backend):
            for t in range(4):
                give_gradients(params, t)
                if t % 2:
                    params[1].grad = None
                optimizer.step()
        assert [int(optimizer.state[p]["step"]) for p in params] == [4, 2, 4]
        return bits(params, optimizer)

    assert_same(uneven({"capturable": True}, "triton"), uneven({}, "cpu"))


@interpreted
def test_the_option_may_be_switched():
    case = CASES[0]
    params = parameters(case.dtype, SHAPES)
    optimizer = case.make(params)
    with triton():
        for t in range(4):
            optimizer.param_groups[0]["capturable"] = t % 2 == 1
            go_on(params, optimizer, (t,))
    assert_same(bits(params, optimizer), bits(*ordinary(case, 4)))


def test_counters_lie_where_their_group_counts():
    """On the CPU; else on the device of the parameter."""
    p = nn.Parameter(torch.zeros(2, device="meta"))
    step = torch.zeros((), device="meta")
    state = {p: {"step": torch.ones(())}}
    p.grad = torch.zeros_like(p)
    group = optim.AdamW([torch.zeros(2)], capturable=True).param_groups[0] | {"params": [p]}
    (bucket,) = buckets_of([group])
    assert capturable.counters(bucket, state, [state[p]["step"]])[0].is_meta
    assert state[p]["step"].is_meta
    assert capturable.counters(bucket, state, [step])[0] is step
    group["capturable"] = False
    state[p]["step"] = torch.ones(())
    assert capturable.counters(bucket, state, [state[p]["step"]])[0] is state[p]["step"]


def test_states_that_are_laid_out_anew_are_put_back(monkeypatch):
    """Their copies would go into the graph, and the states with them."""
    monkeypatch.setattr(capture, "is_under_way", lambda device: True)
    p, before = torch.zeros(2), torch.ones(2)
    state = {p: {"exp_avg": before}}
    with capturable.nothing_new(state, p.device):
        state[torch.zeros(3)] = {}
    put_back = pytest.raises(RuntimeError, match=r"another device or layout.*before the capture")
    with put_back, capturable.nothing_new(state, p.device):
        state[p]["exp_avg"] = before.clone()
    assert state[p]["exp_avg"] is before


@interpreted
def test_counters_of_another_kind_are_refused():
    params, optimizer, _ = capturing(CASES[0])
    optimizer.state[params[0]]["step"] = torch.tensor(1, dtype=torch.int64)
    with triton(), pytest.raises(ValueError, match=r"a step counter is torch.int64 .* float32"):
        optimizer.step()


# ------------------------------------------------------------------------------- state dicts


@interpreted
@some_cases
def test_state_dicts_carry_the_option(case):
    params, optimizer, graph = capturing(case)
    give_gradients(params, 1)
    optimizer.param_groups[0]["lr"].fill_(RATES[1])
    graph.replay()
    expected = ordinary(case, 4)
    for way in (
        lambda o, ps: loaded(case.make(ps), o.state_dict()),
        lambda o, ps: loaded(case.make(ps), through_file(o.state_dict())),
        lambda o, ps: imported(case.make(ps), o.state_dict()),
    ):
        twins = [nn.Parameter(p.detach().clone()) for p in params]
        other = way(optimizer, twins)
        assert other.param_groups[0]["capturable"] is True
        with triton():
            go_on(twins, other, (2, 3))
        assert_same(bits(twins, other), bits(*expected))
    both = copy.deepcopy((params, optimizer))
    assert both[1].param_groups[0]["capturable"] is True
    with triton():
        go_on(*both, (2, 3))
    assert_same(bits(*both), bits(*expected))


def loaded(optimizer: Any, state_dict: dict[str, Any]) -> Any:
    optimizer.load_state_dict(state_dict)
    return optimizer


def imported(optimizer: Any, state_dict: dict[str, Any]) -> Any:
    optimizer.import_state_dict(state_dict)
    return optimizer


@pytest.mark.parametrize("way", [loaded, imported])
def test_state_dicts_without_the_option_are_those_of_steps_that_are_not_captured(way):
    case = CASES[0]
    params, optimizer = ordinary(case, 2)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["capturable"]
    text = str(saved)
    other = way(case.make(parameters(case.dtype, SHAPES), capturable=True), saved)
    assert other.param_groups[0]["capturable"] is False
    assert str(saved) == text
    assert all(map(same_bits, bits(params, optimizer).values(), bits(params, optimizer).values()))


def test_pickles_without_the_option():
    _, optimizer = ordinary(CASES[0], 1)
    state = optimizer.__getstate__()
    del state["defaults"]["capturable"], state["param_groups"][0]["capturable"]
    other = optim.AdamW.__new__(optim.AdamW)
    other.__setstate__(state)
    assert other.param_groups[0]["capturable"] is False
    other.state_dict()


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.SGD])
def test_torchs_state_dicts(kind):
    """Torch's SGD has no such option; the others get it, and what we load keeps ours."""
    params = parameters(FP32, SHAPES)
    optimizer = kind(params, precision="fp32", seed=3, capturable=True)
    with environment(SUBULP_BACKEND="triton"):
        optimizer._create_states()
    exported = optimizer.export_state_dict()
    has = kind is not optim.SGD
    assert exported["param_groups"][0].get("capturable") is (True if has else None)
    theirs = getattr(torch.optim, kind.__name__)(params)
    theirs.load_state_dict(exported)
    assert theirs.param_groups[0].get("capturable") is (True if has else None)
    for own in (False, True):
        other = kind(params, precision="fp32", seed=3, capturable=own)
        other.import_state_dict(theirs.state_dict())
        assert other.param_groups[0]["capturable"] is own


# ---------------------------------------------------------------------------- what is refused

REFUSED = {
    "nonfinite": ({"nonfinite": "raise"}, "nonfinite='raise' is not available with capturable"),
    "skip": ({"nonfinite": "skip"}, "nonfinite='skip' is not available with capturable=True"),
    "strict": (
        {"arithmetic": "strict", "precision": "nearest", "eps": 1e-6},
        "arithmetic='strict' is not available with capturable=True",
    ),
    "betas": ({"betas": (0.9, 0.999999)}, "beta2=0.999999 is not available with capturable=True"),
    "tensor betas": ({"betas": (torch.tensor(0.9), 0.9)}, "betas=.* has a tensor.*plain numbers"),
    "tensor eps": ({"eps": torch.tensor(0.1)}, "eps=.* has a tensor.*plain numbers"),
    "dtype of lr": ({"lr": torch.tensor(1)}, "lr is a tensor of torch.int64.* in float32"),
    "no flag": ({"capturable": "yes"}, "capturable='yes' is unknown: use True or False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_need_the_host(name):
    options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        optim.AdamW(parameters(BF16, SHAPES), **({"capturable": True} | options))
    if "capturable" in options:
        return
    params = parameters(BF16, SHAPES)
    optimizer = optim.AdamW(params, **options)
    give_gradients(params, 0)
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match=words):
        optimizer.step()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_other_kernels_than_tritons(backend):
    params = parameters(BF16, SHAPES)
    optimizer = optim.AdamW(params, capturable=True)
    give_gradients(params, 0)
    words = "capturable=True is for parameters that Triton's kernels update.* move the model"
    with environment(SUBULP_BACKEND=backend), pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert not any(optimizer.state.values())


def test_a_rate_that_lies_elsewhere():
    params = parameters(BF16, SHAPES)
    optimizer = optim.AdamW(params, lr=torch.tensor(0.1, device="meta"), capturable=True)
    optimizer.state[params[0]] = {}
    give_gradients(params, 0)
    with triton(), pytest.raises(ValueError, match=r"lr is a tensor on meta, .* reads it on cpu"):
        optimizer._take_step()


def test_shards():
    params = parameters(BF16, SHAPES)
    give_gradients(params, 0)
    (bucket,) = buckets_of(optim.AdamW(params, capturable=True).param_groups)
    bucket.sharded = True
    with pytest.raises(ValueError, match=r"capturable=True is not available for .* DTensors"):
        capturable.check_bucket(bucket, fused=False)


def test_fused_backward_passes():
    model = nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters(), capturable=True)
    with pytest.raises(ValueError, match="capturable=True, which is not available with fuse_back"):
        optim.fuse_backward(model, optimizer)
    optimizer.param_groups[0]["capturable"] = False
    with optim.fuse_backward(model, optimizer):
        optimizer.param_groups[0]["capturable"] = True
        with pytest.raises(RuntimeError, match="capturable=True while the step is fused"):
            model(torch.ones(1, 4)).sum().backward()


def refused(optimizer: Any, words: str) -> None:
    """A capture is refused, and leaves everything as it was."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before, graph = bits(params, optimizer), Graph()
    ids = [id(v) for p in params for v in optimizer.state.get(p, {}).values()]
    with triton(), pytest.raises(RuntimeError, match=words), graph.captured():
        optimizer.step()
    assert graph.kernels == []
    assert_same(bits(params, optimizer), before)
    assert ids == [id(v) for p in params for v in optimizer.state.get(p, {}).values()]


@interpreted
def test_captures_that_are_refused():
    params, optimizer = ordinary(CASES[0], 1)
    refused(optimizer, "a CUDA graph is being captured, .* capturable=True")
    fresh = optim.AdamW(params, capturable=True)
    refused(fresh, "the parameters have no states yet.*take a step before the capture")

    params, optimizer, _ = capturing(CASES[0])
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    refused(optimizer, "the bias corrections are not on cpu yet.*take a step before the capture")
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.add_param_group({"params": parameters(BF16, ((4,),)), "capturable": False})
    refused(optimizer, "make the optimizer with capturable=True")
    optimizer.param_groups[1]["capturable"] = True
    give_gradients(optimizer.param_groups[1]["params"], 0)
    refused(optimizer, "a parameter has no states yet.*take a step before the capture")
    with triton():
        optimizer.step()
    with diagnostics.watch(optimizer):
        refused(optimizer, "what observes the steps")
    optimizer.grad_scale = optimizer.found_inf = None
    refused(optimizer, "a gradient scaler has the host decide")
    # The scaler, whose step has failed, does not take them away.
    assert not hasattr(optimizer, "grad_scale")
    graph = Graph()
    with triton(), graph.captured():
        optimizer.step()
    assert graph.kernels == ["counts_kernel", "adam_step_kernel"] * 2


@interpreted
def test_precisions_are_not_changed_by_a_capture():
    _, optimizer, _ = capturing(CASES[0])
    optimizer.param_groups[0]["precision"] = "master"
    refused(optimizer, "the precision of a group was changed.*take a step before the capture")


# -------------------------------------------------------------------------------- beside it


@interpreted
@some_cases
def test_what_is_watched_is_the_same(case):
    found = []
    for changes, backend in (({}, "cpu"), ({"capturable": True}, "triton")):
        params = parameters(case.dtype, SHAPES)
        optimizer = case.make(params, **changes)
        with environment(SUBULP_BACKEND=backend), diagnostics.watch(optimizer, every=2) as watched:
            go_on(params, optimizer, range(4))
        found.append((watched.history, bits(params, optimizer)))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


@interpreted
def test_scaled_steps_outside_of_a_graph():
    found = []
    for changes, backend in (({}, "cpu"), ({"capturable": True}, "triton")):
        params = parameters(FP16, SHAPES)
        optimizer = optim.AdamW(params, seed=3, **changes)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with environment(SUBULP_BACKEND=backend):
            for t in range(3):
                give_gradients(params, t)
                for p in params:
                    p.grad *= torch.inf if t == 1 else 8.0
                scaler.scale(torch.ones(()))
                scaler.step(optimizer)
                scaler.update()
        assert optimizer.skipped_steps == 1
        found.append(bits(params, optimizer))
    assert int(found[1]["step 0"]) == 2
    assert_same(found[1], found[0])


def test_patterns_tell_bits_apart():
    assert not torch.equal(patterns(torch.tensor(0.0)), patterns(torch.tensor(-0.0)))

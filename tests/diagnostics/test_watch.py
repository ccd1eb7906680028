"""Descent quality and lost updates, against their definitions written out."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch

from subulp import diagnostics, optim
from subulp.ops.strategy import all_names, parse_strategy
from subulp.optim.backward import handle as handle_module

PRECISIONS = [name for name in all_names(8) if torch.bfloat16 in parse_strategy(name).dtypes]


def model_and_gradients(steps: int) -> tuple[list[torch.nn.Parameter], list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(30, 20), (20,), ()]
    params = [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(torch.bfloat16)) for s in shapes
    ]
    gradients = [
        [torch.randn(s, generator=generator).to(torch.bfloat16) for s in shapes]
        for _ in range(steps)
    ]
    return params, gradients


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD])
def test_watching_changes_no_bit(make: type, precision: str) -> None:
    params, gradients = model_and_gradients(4)
    results = []
    for watched in (False, True):
        mine = copy.deepcopy(params)
        optimizer = make(mine, lr=1e-3, precision=precision, seed=3)
        with diagnostics.watch(optimizer, every=1 if watched else 100) as w:
            for of_step in gradients:
                for p, g in zip(mine, of_step, strict=True):
                    p.grad = g.clone()
                optimizer.step()
        assert len(w.history) == (4 if watched else 1)
        results.append((mine, optimizer.state_dict()["state"]))
    for p, q in zip(*(r[0] for r in results), strict=True):
        assert torch.equal(p, q)
    for key, state in results[0][1].items():
        for name, value in state.items():
            assert torch.equal(value, results[1][1][key][name]), name


@pytest.mark.parametrize("load", [False, True])
def test_moments_made_in_inference_mode_go_on(load: bool) -> None:
    """Three groups: a step that fails in the middle would leave some of them behind."""
    params, gradients = model_and_gradients(6)
    results = []
    for watched in (False, True):
        mine = copy.deepcopy(params)
        optimizer = optim.AdamW([{"params": [p]} for p in mine], precision="collage-light")
        watch = diagnostics.watch(optimizer, every=3) if watched else contextlib.nullcontext()
        with watch as w:
            for t, of_step in enumerate(gradients):
                for p, g in zip(mine, of_step, strict=True):
                    p.grad = g.clone()
                with torch.inference_mode(t in (0, 3)):
                    optimizer.step()
                    if watched and load and t == 3:
                        w.load_state_dict(w.state_dict())
        results.append(mine)
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)


def test_equation_3_and_definition_3_2() -> None:
    """SGD with lr 1: the update is the gradient, and BF16 loses what is below half an ulp."""
    p = torch.nn.Parameter(torch.tensor([1.0, 200.0, 0.0, 4.0], dtype=torch.bfloat16))
    p.grad = torch.tensor([-0.25, -0.1, -0.5, 0.0], dtype=torch.bfloat16)
    optimizer = optim.SGD([p], lr=1.0, precision="nearest")
    with diagnostics.watch(optimizer) as w:
        optimizer.step()
    assert w.total is not None
    lost = float(torch.tensor(-0.1, dtype=torch.bfloat16))
    update = math.sqrt(0.25**2 + lost**2 + 0.5**2)
    assert p.tolist() == [1.25, 200.0, 0.5, 4.0]
    assert w.total.update_norm == pytest.approx(update, rel=1e-12)
    assert w.total.effective_update_norm == pytest.approx(math.sqrt(0.25**2 + 0.5**2), rel=1e-12)
    assert w.effective_descent_quality == pytest.approx((0.25**2 + 0.5**2) / update, rel=1e-12)
    assert w.lost_arithmetic == pytest.approx(1 / 3)
    assert w.total.parameter_norm == pytest.approx(math.sqrt(1 + 200**2 + 16), rel=1e-12)


def test_the_whole_expansion_counts() -> None:
    """The same lost update moves the second component, so nothing of it is lost."""
    p = torch.nn.Parameter(torch.full((100,), 200.0, dtype=torch.bfloat16))
    p.grad = torch.full((100,), -0.1, dtype=torch.bfloat16)
    optimizer = optim.SGD([p], lr=1.0, precision="collage-light")
    with diagnostics.watch(optimizer) as w:
        optimizer.step()
    assert torch.all(p == 200.0)
    assert w.lost_arithmetic == 0.0
    assert w.total is not None
    # 200 + 0.1 rounds once to FP32, whose ulp is 2**-16 there.
    assert w.effective_descent_quality == pytest.approx(w.total.update_norm, rel=2**-12)


@pytest.mark.parametrize("precision", ["kahan", "collage-light"])
@pytest.mark.parametrize("arithmetic", ["wide", "strict"])
def test_what_is_beyond_fp32_counts(precision: str, arithmetic: str) -> None:
    """A second component holds updates of 2**-27 beside 1, whose sum FP32 has not."""
    p = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = optim.SGD([p], lr=1.0, precision=precision, arithmetic=arithmetic)

    def exact() -> torch.Tensor:
        names = ("compensation", "parameter_low")
        return p.detach().double() + sum(
            optimizer.state[p][n].double() for n in names if n in optimizer.state[p]
        )

    with diagnostics.watch(optimizer) as w:
        for _ in range(3):
            before = exact()
            p.grad = torch.full((64,), 2.0**-27, dtype=torch.bfloat16)
            optimizer.step()
            moved = exact() - before
            assert w.lost_arithmetic == float((moved == 0).double().mean())
            assert w.total is not None
            assert w.total.effective_update_norm == pytest.approx(float(moved.norm()), rel=1e-12)
    if (precision, arithmetic) != ("collage-light", "wide"):
        assert w.lost_arithmetic == 0.0


def test_groups_add_up() -> None:
    params, gradients = model_and_gradients(1)
    groups = [{"params": params[:1], "precision": "nearest"}, {"params": params[1:], "lr": 1e-2}]
    optimizer = optim.AdamW(groups, lr=1e-3)
    for p, g in zip(params, gradients[0], strict=True):
        p.grad = g
    with diagnostics.watch(optimizer) as w:
        optimizer.step()
    assert w.total is not None
    assert len(w.groups) == 2
    for name in ("parameter_norm", "update_norm", "effective_update_norm"):
        parts = math.hypot(*(getattr(group, name) for group in w.groups))
        assert getattr(w.total, name) == pytest.approx(parts, rel=1e-12)
    assert w.history[0]["groups"][1]["update_norm"] == w.groups[1].update_norm


def test_closures_are_measured() -> None:
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = optim.AdamW([p], precision="collage-plus")

    def closure() -> float:
        p.grad = torch.ones_like(p)
        return 1.5

    with diagnostics.watch(optimizer) as w:
        assert optimizer.step(closure) == 1.5
    assert w.total is not None
    assert w.total.update_norm > 0


def test_every_counts_from_the_first_step() -> None:
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = optim.AdamW([p], precision="nearest")
    with diagnostics.watch(optimizer, every=3) as w:
        for _ in range(7):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert [entry["step"] for entry in w.history] == [1, 4, 7]
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert len(w.history) == 3


def test_a_skipped_step_is_not_measured() -> None:
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, torch.nan)
    optimizer = optim.AdamW([p], precision="nearest", nonfinite="skip")
    with diagnostics.watch(optimizer) as w:
        optimizer.step()
    assert w.history == []
    assert math.isnan(w.effective_descent_quality)
    assert math.isnan(w.lost_arithmetic)


def small_model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    # Autograd completes gradients from the last parameter to the first.
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]).to(dtype)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("precision", ["nearest", "stochastic", "collage-plus"])
def test_steps_inside_the_backward_pass(precision: str, options: dict) -> None:
    """The same numbers, to the last bit, as after it; and watching changes no bit."""
    generator = torch.Generator().manual_seed(0)
    passes = options.get("accumulate", 1)
    batches = torch.randn(5 * passes, 4, 8, generator=generator).to(torch.bfloat16)
    histories, weights = [], []
    for fused, watched in ((False, True), (True, True), (True, False)):
        model = small_model(torch.bfloat16)
        groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 1e-4}]
        optimizer = optim.AdamW(groups, lr=1e-2, precision=precision, seed=1)
        handle = optim.fuse_backward(model, optimizer, **options) if fused else None
        with diagnostics.watch(optimizer, every=2 if watched else 100) as w:
            for i, x in enumerate(batches):
                loss = model(x).float().square().mean()
                if handle is None:
                    loss.backward()
                else:
                    handle.backward(loss)
                if (i + 1) % passes == 0:
                    # A fused step has been taken then: step() and zero_grad() do nothing.
                    if handle is None and "max_norm" in options:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
                    optimizer.step()
                    optimizer.zero_grad()
        histories.append(w.history)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert [entry["step"] for entry in histories[0]] == [1, 3, 5]
    assert histories[1] == histories[0]
    for others in weights[1:]:
        assert all(torch.equal(p, q) for p, q in zip(weights[0], others, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_a_gradient_scaler(fused: bool) -> None:
    """What is intended is that of the unscaled gradient; a step left out counts, unmeasured."""
    model = small_model(torch.float16)
    optimizer = optim.SGD(model.parameters(), lr=1.0, precision="collage-plus")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    handle = optim.fuse_backward(model, optimizer, scaler=scaler) if fused else None
    x, norms = torch.ones(2, 8, dtype=torch.float16), []
    with diagnostics.watch(optimizer) as w:
        for factor in (1.0, float("inf"), 1.0):
            grads = torch.autograd.grad(model(x).float().square().mean(), model.parameters())
            norms.append(torch.cat([g.double().flatten() for g in grads]).norm().item())
            loss = scaler.scale(model(x).float().square().mean() * factor)
            if handle is not None:
                handle.backward(loss)
            else:
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [entry["step"] for entry in w.history] == [1, 3]
    for entry, norm in zip(w.history, norms[::2], strict=True):
        assert entry["update_norm"] == pytest.approx(norm, rel=1e-2)


def test_a_pass_that_failed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had updated by then does not count with the next step."""
    monkeypatch.setattr(handle_module, "WAITING_BYTES", 0)
    model = small_model(torch.float32)
    optimizer = optim.SGD(model.parameters(), lr=1.0)

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("a hook of the user's")

    x = torch.ones(1, 8)
    with diagnostics.watch(optimizer) as w, optim.fuse_backward(model, optimizer) as handle:
        h = model[0](x)
        h.register_hook(fail)
        with pytest.raises(KeyError):
            handle.backward(model[1:](h).sum())
        assert len(optimizer.state) == 4
        assert w.history == []
        handle.backward(model[0](x).sum())
    # All ones: eight of the bias, and a row of eight for each.
    assert w.history[0]["update_norm"] == pytest.approx((8 + 64) ** 0.5)
    assert w.history[0]["step"] == 2


def test_two_watches() -> None:
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = optim.AdamW([p], precision="nearest")
    # Shadow moments would begin at different steps.
    with diagnostics.watch(optimizer, shadow=False) as outer:
        for _ in range(2):
            with diagnostics.watch(optimizer, shadow=False) as inner:
                p.grad = torch.ones_like(p)
                optimizer.step()
    assert len(outer.history) == 2
    assert inner.total == outer.total
    assert inner.history[0]["step"] == 1


def drifting(precision: str, shadow: bool) -> diagnostics.watch:
    """800 steps of gradients that shrink slowly: a BF16 second moment lags behind them."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.ones(128, dtype=torch.bfloat16))
    optimizer = optim.AdamW([p], lr=1e-3, weight_decay=0.0, precision=precision, seed=0)
    with diagnostics.watch(optimizer, every=100, shadow=shadow) as w:
        for t in range(801):
            noise = 1 + torch.randn(128, generator=generator)
            p.grad = (0.998**t * noise).to(torch.bfloat16)
            optimizer.step()
    return w


def test_shadow_moments_see_what_stored_moments_lost() -> None:
    """Collage, Figure 3 (right): the quality tells light from plus, which stored moments hide."""
    share = {}
    for precision in ("collage-light", "collage-plus"):
        for shadow in (False, True):
            last = drifting(precision, shadow).total
            share[precision, shadow] = last.effective_descent_quality / last.update_norm
    assert share["collage-light", False] == pytest.approx(1.0, abs=0.01)
    assert share["collage-plus", False] == pytest.approx(1.0, abs=0.01)
    assert share["collage-plus", True] == pytest.approx(1.0, abs=0.01)
    # A second moment that does not fall with the gradients, and so too short a step.
    assert share["collage-light", True] < 0.95


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adam, optim.SGD])
def test_shadow_moments_are_those_of_fp32(make: type) -> None:
    """The intended update is the one of FP32 moments on the same gradients and weights."""
    generator = torch.Generator().manual_seed(0)
    options = {"momentum": 0.9, "dampening": 0.2} if make is optim.SGD else {"weight_decay": 0.1}
    narrow = torch.nn.Parameter(torch.randn(64, generator=generator).to(torch.bfloat16))
    wide = torch.nn.Parameter(narrow.detach().float())
    optimizer = make([narrow], lr=0.01, precision="nearest", **options)
    exact = make([wide], lr=0.01, **options)
    with diagnostics.watch(optimizer) as w:
        for _ in range(5):
            with torch.no_grad():
                wide.copy_(narrow)
            narrow.grad = torch.randn(64, generator=generator).to(torch.bfloat16)
            wide.grad = narrow.grad.float()
            before = wide.detach().clone()
            optimizer.step()
            exact.step()
            moved = (wide.detach() - before).norm().item()
            assert w.total.update_norm == pytest.approx(moved, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (optim.AdamW, {"weight_decay": 0.1}),
        (optim.Adam, {"weight_decay": 0.1, "maximize": True}),
        (optim.SGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
        (optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (optim.SGD, {}),
    ],
)
@pytest.mark.parametrize("precision", ["nearest", "collage-plus", "extra-bits-4", "master"])
def test_how_often_is_measured_changes_no_measurement(
    make: type, options: dict[str, object], precision: str
) -> None:
    """Between measured steps the shadows move, coupled weight decay included, without an update."""
    histories = []
    for every in (1, 3):
        params, gradients = model_and_gradients(7)
        optimizer = make(params, lr=0.01, precision=precision, seed=0, **options)
        with diagnostics.watch(optimizer, every) as w:
            for of_step in gradients:
                for p, g in zip(params, of_step, strict=True):
                    p.grad = g
                optimizer.step()
        histories.append(w.history)
    assert histories[0][::3] == histories[1]


def test_shadow_moments_are_saved() -> None:
    """A watch that is saved and loaded measures what one that went on measures."""
    runs = []
    for interrupted in (False, True):
        params, gradients = model_and_gradients(4)
        optimizer = optim.AdamW(params, precision="collage-light")
        w = diagnostics.watch(optimizer)
        for t, of_step in enumerate(gradients):
            if interrupted and t == 2:
                saved = copy.deepcopy(w.state_dict())
                w = diagnostics.watch(optimizer)
                w.load_state_dict(saved)
            for p, g in zip(params, of_step, strict=True):
                p.grad = g
            with w:
                optimizer.step()
        runs.append(w.history)
    assert runs[0] == runs[1]


def test_watching_is_not_counted_as_training() -> None:
    params, gradients = model_and_gradients(2)
    model = torch.nn.Module()
    model.p = params[0]
    optimizer = optim.AdamW([params[0]])
    peaks = []
    for watched in (False, True):
        with diagnostics.watch(optimizer) if watched else contextlib.nullcontext() as w:
            params[0].grad = gradients[0][0]
            optimizer.step()
            params[0].grad = gradients[1][0]
            with diagnostics.track_memory(model, optimizer) as memory:
                optimizer.step()
        peaks.append(memory.peak_bytes)
    assert peaks[0] == peaks[1]
    assert w.seconds > 0


def test_errors() -> None:
    p = torch.nn.Parameter(torch.ones(8))
    for every in (0, 2.5, float("nan"), True):
        with pytest.raises(ValueError, match=f"every={every}"):
            diagnostics.watch(optim.SGD([p]), every=every)
    optimizer = optim.SGD([p])
    with diagnostics.watch(optimizer) as w:
        with pytest.raises(RuntimeError, match="watching already"):
            w.__enter__()
        assert optimizer.observers == (w,)
    with pytest.raises(ValueError, match="optimizer is SGD"):
        diagnostics.watch(torch.optim.SGD([p]))

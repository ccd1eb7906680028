"""FP32 or BF16 activations: what each computes, how ``auto`` chooses, and who remembers it."""

import json
from typing import Any

import pytest
import torch
from rich.console import Console

import subulp.lab
from subulp.lab.compare import compare, resume
from subulp.lab.engine.config_file import Option, read_config
from subulp.lab.engine.config_json import config_of, plain_fields
from subulp.lab.engine.loop import run
from subulp.lab.engine.progress import Lines
from subulp.lab.engine.stopping import Interrupted
from subulp.lab.report.configuration import configuration
from subulp.lab.report.group import Group
from subulp.lab.report.run_reader import read_run
from subulp.lab.tasks.lm import activations
from subulp.lab.tasks.lm.activations import block_seconds
from subulp.lab.tasks.lm.models import GPT, Norm, Shape, use_bf16
from subulp.lab.tasks.lm.task import build, decide, load
from subulp.lab.tasks.lm.trained import _BUILT
from subulp.nn import LayerNorm, MoRLinear
from tests.lab.engine.resuming import numbers, stopped_after

CPU = torch.device("cpu")
SHAPE = Shape(vocabulary=11, context=8, width=16, layers=2, heads=2)


@pytest.fixture
def machine(monkeypatch):
    """Say how fast the machine is; ``None`` must not be measured. Returns the measurements."""

    def be(fp32=None, bf16=None):
        made = []

        def measured(shape, batch_size):
            assert fp32 is not None, "nothing is to be measured"
            made.append((shape.width, batch_size))
            return {"fp32": fp32, "bf16": bf16}

        monkeypatch.setattr(activations, "block_seconds", measured)
        # The tests' models are small.
        monkeypatch.setattr(activations, "_LEAST_WIDTH", 1)
        return made

    return be


def gpt(dtype, *, narrow_activations):
    torch.manual_seed(0)
    model = GPT(SHAPE).to(dtype)
    if narrow_activations:
        use_bf16(model)
    return model


# --------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
def test_every_layer_computes_in_the_dtype_and_the_loss_in_fp32(dtype, narrow):
    model, seen = gpt(dtype, narrow_activations=narrow), set()
    for name, module in model.named_modules():
        if name.startswith("blocks.") or name in ("norm", "head", "dropout"):
            module.register_forward_hook(lambda _, inputs, out: seen.update(map(_dtype, inputs)))
            module.register_forward_hook(lambda _, inputs, out: seen.add(_dtype(out)))
            module.register_full_backward_hook(lambda _, gin, gout: seen.update(map(_dtype, gout)))
    ids, targets = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    loss = model.loss(ids, targets)
    loss.backward()
    assert seen == {torch.bfloat16 if narrow else torch.float32}
    assert model(ids).dtype == loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {dtype}


def _dtype(tensor):
    return tensor.dtype


def test_bf16_activations_compute_almost_the_same():
    ids, targets = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    wide, narrow = (gpt(torch.bfloat16, narrow_activations=n) for n in (False, True))
    losses = [model.loss(ids, targets) for model in (wide, narrow)]
    assert losses[0] != losses[1], "nothing was rounded"
    # The output layer's rounding, 2**-9 of logits below 1.
    torch.testing.assert_close(losses[1], losses[0], rtol=2**-9, atol=0)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        error = (a.grad.float() - b.grad.float()).norm() / a.grad.float().norm()
        # Adding to the keys changes no attention: a part of this bias has no gradient.
        assert error < 2**-5 or name.endswith("in_.bias"), name


def test_fp32_activations_are_bit_for_bit_those_of_the_library_s_layers():
    model, plain = (gpt(torch.bfloat16, narrow_activations=False) for _ in range(2))
    for module in plain.modules():
        if isinstance(module, Norm):
            module.__class__ = LayerNorm
    ids, targets = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    losses = [each.loss(ids, targets) for each in (model, plain)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("linear", ["bf16", "e4m3", "mor-tensor", "mor-2way", "mor-3way"])
@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("fp32", {}),
        ("master", {"dropout": 0.2}),
        ("collage-plus", {"fuse_backward": True}),
        ("extra-bits-8-stochastic", {"tie_head": True}),
        ("collage-light", {"dtype": "e4m3"}),
    ],
)
def test_all_precisions_train_with_all_layers(small, linear, precision, changes):
    config = small(
        precision=(precision,), linear=(linear,), activations="bf16", lr=1e-2, steps=12, **changes
    )
    text = load(config)
    model = build(config, text, precision, 0, CPU).model
    assert model.activations == torch.bfloat16
    mixtures = [m for m in model.modules() if isinstance(m, MoRLinear)]
    assert len(mixtures) == (0 if linear == "bf16" else 4)
    summary = run(config, text, precision, 0)
    assert summary.settings["activations"] == "bf16"
    # A guess among the characters of the text costs 3.26 nats.
    assert summary.metrics["val_loss"] < 3.2


# ------------------------------------------------------------------------------------------- auto


@pytest.mark.parametrize(
    ("fp32", "bf16", "chosen"),
    [
        (1.0, 0.5, "bf16"),
        (1.1, 1.0, "bf16"),
        (1.09, 1.0, "fp32"),
        (1.0, 1.0, "fp32"),
        (1.0, 5.5, "fp32"),
    ],
)
def test_bf16_has_to_be_a_tenth_faster(small, machine, fp32, bf16, chosen):
    measured = machine(fp32, bf16)
    config = small(precision=("master", "nearest", "fp32"), linear=("bf16", "e4m3"))
    decided = decide(config, CPU)
    assert decided.config == small(**{**vars(config), "activations": chosen})
    assert measured == [(16, 2)], "one measurement is for all runs"
    assert decided.record == {
        "activations_reason": (
            f"{chosen}, because a block takes {1e3 * fp32:.3g} ms in FP32 and "
            f"{1e3 * bf16:.3g} ms in BF16"
        ),
        "block_ms_fp32": 1e3 * fp32,
        "block_ms_bf16": 1e3 * bf16,
    }
    assert decided.notes == (f"activations: {decided.record['activations_reason']}",)


@pytest.mark.parametrize("given", ["fp32", "bf16"])
def test_what_was_given_is_not_measured(small, machine, given):
    machine()
    decided = decide(small(activations=given), CPU)
    assert (decided.config.activations, decided.record, decided.notes) == (given, {}, ())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["master", "fp32"])
def test_fp16_parameters_have_fp32_activations(small, machine, device, precision):
    machine()
    decided = decide(small(dtype="fp16", precision=(precision,)), torch.device(device))
    assert decided.config.activations == "fp32"
    assert decided.record == {"activations_reason": "fp32, because of dtype=fp16"}


@pytest.mark.parametrize(("units", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_a_gpu_is_asked_whether_it_has_units(small, machine, monkeypatch, units, chosen):
    machine()

    def supported(*, including_emulation):
        assert not including_emulation
        return units

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    decided = decide(small(), torch.device("cuda"))
    assert decided.config.activations == chosen
    assert decided.record["activations_reason"].startswith(f"{chosen}, because the GPU has ")


def test_a_narrow_model_is_not_measured(small, machine, monkeypatch):
    machine()
    monkeypatch.setattr(activations, "_LEAST_WIDTH", 128)
    decided = decide(small(), torch.device("cpu"))
    assert decided.config.activations == "fp32"
    assert decided.record["activations_reason"] == (
        "fp32, because a model of width 16 is too narrow for BF16 units to matter"
    )
    assert "block_ms_fp32" not in decided.record


@pytest.mark.parametrize("width", [16, 96])
def test_a_block_is_measured_in_both_dtypes(width):
    found = block_seconds(Shape(1, 8, width, 1, 2), 2)
    assert set(found) == {"fp32", "bf16"}
    assert all(0 < seconds < 60 for seconds in found.values())


def test_undecided_activations_are_fp32(small, machine):
    """A run outside of a comparison: it is the same on every machine."""
    machine()
    config = small(precision=("nearest",))
    given = small(precision=("nearest",), activations="fp32")
    first, second = (run(c, load(c), "nearest", 0) for c in (config, given))
    assert first.settings == second.settings == {"activations": "fp32"}
    assert first.metrics == second.metrics


# ------------------------------------------------------------------------------- who remembers it


def test_a_comparison_decides_once_and_tells_everybody(small, tmp_path, machine):
    measured, notes = machine(2.0, 1.0), []

    def tell(plan):
        notes.extend(plan.notes)
        return Lines(plan, Console(quiet=True))

    state = torch.get_rng_state()
    found = compare(small(), out=tmp_path / "out", jobs=1, reporter=tell)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(measured) == 1
    reason = "bf16, because a block takes 2e+03 ms in FP32 and 1e+03 ms in BF16"
    assert notes == [f"activations: {reason}"]
    saved = json.loads((found.directory / "config.json").read_text())
    assert saved["activations"] == "bf16"
    assert saved["decided"]["activations_reason"] == reason
    runs = json.loads((found.directory / "summary.json").read_text())["runs"]
    assert [(r["precision"], r["activations"]) for r in runs] == [
        ("master", "bf16"),
        ("nearest", "bf16"),
    ]
    given = compare(small(activations="bf16"), out=tmp_path / "given", jobs=1)
    assert numbers(given) == numbers(found)
    saved = json.loads((given.directory / "config.json").read_text())
    assert saved["activations"] == "bf16"
    assert "decided" not in saved
    shown = configuration(Group.of("lm", [read_run(found.directory)]))
    assert ("activations reason", (reason,)) in shown.environment
    assert ("activations", ("bf16",), "auto") in [vars_of(s) for s in shown.changed]
    model = subulp.lab.load(found.directory, device="cpu").model
    assert model.activations == torch.bfloat16


def vars_of(setting):
    return setting.name, setting.values, setting.default


def test_a_decision_outlives_a_stop_and_a_faster_machine(small, tmp_path, monkeypatch, machine):
    config = small(steps=12, checkpoint_every=4)
    machine(2.0, 1.0)
    whole = compare(config, out=tmp_path / "whole", jobs=1)
    with monkeypatch.context() as patch:
        stopped_after(8, patch)
        with pytest.raises(Interrupted):
            compare(config, out=tmp_path / "stopped", jobs=1)
    machine()
    assert numbers(resume(tmp_path / "stopped", jobs=1)) == numbers(whole)


def test_another_dtype_of_activations_is_another_run(small, tmp_path, monkeypatch):
    stopped_after(8, monkeypatch)
    out = tmp_path / "out"
    config = small(steps=12, checkpoint_every=4, activations="bf16")
    with pytest.raises(Interrupted):
        compare(config, out=out, jobs=1)
    text = (out / "config.json").read_text()
    (out / "config.json").write_text(text.replace('"activations": "bf16"', '"activations": "fp32"'))
    with pytest.raises(
        ValueError, match=r"written with activations=bf16, and config\.json has activations=fp32"
    ):
        resume(out, jobs=1)


def test_files_of_earlier_versions_mean_fp32(small, tmp_path):
    fields = plain_fields(small())
    del fields["activations"]
    assert config_of("lm", fields) == small(activations="fp32")
    (tmp_path / "config.json").write_text(json.dumps({"task": "lm", **fields}))
    names = [Option((name,), Any) for name in (*fields, "activations")]
    assert read_config(tmp_path / "config.json", "lm", names)["activations"] == "fp32"
    built = build(small(), load(small()), "nearest", 0, CPU).build
    del built["activations"]
    built["shape"] = dict(built["shape"])
    assert _BUILT.validate_python(built).activations == "fp32"

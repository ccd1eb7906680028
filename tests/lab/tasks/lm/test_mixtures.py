"""A language model whose blocks multiply mixtures: same start, what is measured, what is left."""

import dataclasses
import json

import pytest
import torch

from subulp import diagnostics
from subulp.lab.compare import compare
from subulp.lab.engine.loop import run
from subulp.lab.tasks.lm.task import build, load
from subulp.nn import MoRLinear
from tests.lab.engine.test_loop import timeless

CPU = torch.device("cpu")
SHARES = ("fp8_share", "e4m3_share", "e5m2_share", "fp8_error")


@pytest.fixture
def config(small):
    return small(precision=("master",), linear=("bf16", "e4m3", "mor-tensor", "mor-3way"))


def test_all_start_from_the_same_weights_and_the_output_layer_stays(config):
    text = load(config)
    plain = build(config, text, "master", 0, CPU).model
    for name in config.variants[1:]:
        model = build(config, text, name, 0, CPU).model
        layers = {n for n, m in model.named_modules() if isinstance(m, MoRLinear)}
        assert layers == {
            f"blocks.0.{part}" for part in ("attention.in_", "attention.out", "mlp.up", "mlp.down")
        }
        for (n, a), (m, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert n == m
            assert torch.equal(a, b)


def test_a_run_directory_tells_what_was_decided(config, tmp_path):
    found = compare(config, out=tmp_path / "out", jobs=1)
    saved = json.loads((found.directory / "summary.json").read_text())["runs"]
    assert [(r["precision"], r["linear"]) for r in saved] == [
        ("master", name) for name in config.linear
    ]
    assert not set(SHARES) & set(saved[0])
    for each in saved[1:]:
        assert each["fp8_share"] == pytest.approx(each["e4m3_share"] + each["e5m2_share"])
        assert 0.9 < each["fp8_share"] <= 1
        assert 0.02 < each["fp8_error"] < 0.03
        assert each["partition"] == "block-128x128"
    assert saved[1]["fp8_share"] == 1
    names = {p.name for p in (found.directory / "mixes").iterdir()}
    assert names == {"master-e4m3.png", "master-mor-tensor.png", "master-mor-3way.png"}
    lines = map(json.loads, (found.directory / "metrics.jsonl").read_text().splitlines())
    mixes = [
        line["mix"] for line in lines if line.get("variant") == "master e4m3" and "mix" in line
    ]
    # Evaluations after steps 3 and 6, four layers, input, weight and output gradient.
    assert [len(mix) for mix in mixes] == [12, 12]
    fields = {field.name for field in dataclasses.fields(diagnostics.OperandMix)}
    assert set(mixes[0][0]) == fields
    assert (mixes[0][0]["layer"], mixes[0][0]["role"]) == ("blocks.0.attention.in_", "input")
    replaced = compare(
        dataclasses.replace(config, linear=("bf16",)),
        out=found.directory,
        overwrite=True,
        jobs=1,
    )
    assert not (replaced.directory / "mixes").exists()


def test_a_tensor_above_the_threshold_is_in_bf16(small):
    config = small(precision=("nearest",), linear=("mor-tensor",), mor_threshold=0.001)
    summary = run(config, load(config), "nearest", 0)
    assert [summary.metrics[name] for name in SHARES] == [0, 0, 0, 0]


def test_gradients_have_a_representation_of_their_own(small):
    config = small(precision=("nearest",), linear=("e4m3",), mor_gradients="e5m2")
    summary = run(config, load(config), "nearest", 0)
    # Of input, weight and output gradient of each layer.
    assert [summary.metrics[name] for name in SHARES[:3]] == pytest.approx([1, 2 / 3, 1 / 3])


def test_evaluations_do_not_count(small):
    config = small(precision=("nearest",), linear=("mor-2way",))
    often = dataclasses.replace(config, eval_every=1)
    first, second = (run(c, load(c), "nearest", 0) for c in (config, often))
    assert first.metrics == second.metrics


def test_fused_runs_are_the_same(small):
    config = small(precision=("collage-plus",), linear=("mor-3way",), partition=("subchannel-32",))
    fused = dataclasses.replace(config, fuse_backward=True)
    results = [timeless(run(c, load(c), "collage-plus", 0)) for c in (config, fused)]
    assert results[0].metrics == results[1].metrics
    assert results[0].train_loss == results[1].train_loss


@pytest.mark.parametrize("changes", [{"dtype": "e4m3"}, {"tie_head": True}, {"dropout": 0.2}])
def test_with_other_options(small, changes):
    config = small(precision=("nearest",), linear=("mor-3way",), partition=("channel",), **changes)
    assert run(config, load(config), "nearest", 0).metrics["fp8_share"] > 0.9


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"nonfinite": "raise"}])
def test_the_first_of_two_passes_is_not_counted(config, options):
    config = dataclasses.replace(
        config, precision=("stochastic",), linear=("mor-tensor",), nonfinite=None
    )
    text = load(config)
    found = [
        run(
            dataclasses.replace(config, fuse_backward=fused, **options), text, config.variants[0], 0
        )
        for fused in (False, True)
    ]
    for name in (*SHARES, "val_loss"):
        assert found[0].metrics[name] == found[1].metrics[name], name

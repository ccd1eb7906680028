"""The language model's run: initial weights, evaluation, loss scale."""

import dataclasses

import pytest
import torch

from subulp.lab.engine.loop import run
from subulp.lab.tasks.lm.task import (
    build_model,
    build_optimizer,
    evaluate,
    loss_scale,
    parameter_dtype,
)
from subulp.lab.tasks.lm.text import load_text
from tests.lab.engine.test_loop import timeless

CPU = torch.device("cpu")


def test_all_precisions_start_from_the_same_weights(small):
    config = small()
    starts = {}
    for precision in ("fp32", "master", "nearest", "collage-plus"):
        model, initial = build_model(config, 20, precision, 0, CPU)
        optimizer = build_optimizer(config, model, initial, precision, 0)
        starts[precision] = optimizer.full_precision_state_dict(model)
        expected = torch.float32 if precision == "fp32" else torch.bfloat16
        assert {p.dtype for p in model.parameters()} == {expected}
    for name, value in starts["fp32"].items():
        assert torch.equal(starts["master"][name], value)
        assert torch.equal(starts["nearest"][name], value.bfloat16().float())
        # Two BF16 components hold 16 significant bits or more.
        torch.testing.assert_close(starts["collage-plus"][name], value, rtol=2**-16, atol=1e-12)


def test_only_matrices_decay(small):
    config = small(weight_decay=0.25)
    model, initial = build_model(config, 20, "nearest", 0, CPU)
    optimizer = build_optimizer(config, model, initial, "nearest", 0)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for p in model.parameters():
        assert decay[id(p)] == (0.25 if p.dim() == 2 else 0.0)


def test_evaluation_weighs_every_token_the_same(small):
    model, _ = build_model(small(), 20, "fp32", 0, CPU)
    x, y = torch.randint(20, (5, 8)), torch.randint(20, (5, 8))
    ragged = [(x[:4], y[:4]), (x[4:], y[4:])]
    assert evaluate(model, ragged) == pytest.approx(evaluate(model, [(x, y)]), rel=1e-6)
    assert model.training


def test_a_strategy_that_the_dtype_cannot_have_is_refused():
    with pytest.raises(ValueError, match="precision='kahan' is not available"):
        parameter_dtype("kahan", "e4m3")
    with pytest.raises(ValueError, match="precision='bf17' is unknown: use one of fp32"):
        parameter_dtype("bf17", "bf16")
    assert parameter_dtype("fp32", "bf16") == torch.float32


def test_a_power_of_two_scales_the_loss_without_changing_the_training(small):
    text = load_text(small().data)
    results = [
        dataclasses.replace(
            timeless(run(small(loss_scale=scale), text, "master", 0)), effective_descent_quality=0.0
        )
        for scale in (None, 1024.0)
    ]
    assert results[0] == results[1]


def test_fp8_gradients_scale_the_loss_unless_told_otherwise(small):
    assert loss_scale(small(), "nearest") == 1
    assert loss_scale(small(dtype="fp16"), "nearest") == 1
    assert loss_scale(small(dtype="e4m3"), "nearest") == 1024
    assert loss_scale(small(dtype="e4m3"), "fp32") == 1
    assert loss_scale(small(dtype="e4m3", loss_scale=64.0), "nearest") == 64


def test_fp16_needs_no_loss_scale(small):
    """Its moments are BF16: as good as master weights, where unscaled FP16 ones blew it up."""
    names = ("master", "collage-plus")
    config = small(dtype="fp16", steps=60, lr=1e-2, precision=names)
    text = load_text(config.data)
    losses = [run(config, text, name, 0).metrics["val_loss"] for name in names]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_other_formats_train_too(small, dtype):
    config = small(dtype=dtype, steps=60, lr=1e-2, precision=("collage-light",))
    summary = run(config, load_text(config.data), "collage-light", 0)
    # A guess among the characters of the text costs 3.3 nats.
    assert summary.metrics["val_loss"] < 3

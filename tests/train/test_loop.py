"""One run: what is equal must be equal bit for bit."""

import dataclasses

import pytest
import torch

from subulp.train.data.text import load_text
from subulp.train.loop import (
    build,
    evaluate,
    learning_rate_factor,
    loss_scale,
    parameter_dtype,
    resolve_device,
    run,
)

CPU = torch.device("cpu")


def timeless(summary):
    return dataclasses.replace(summary, seconds_per_step=0.0)


@pytest.mark.parametrize("precision", ["fp32", "collage-plus", "stochastic"])
def test_the_same_arguments_give_the_same_numbers(small, precision):
    config = small(dropout=0.1)
    text = load_text(config.data)
    results = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        results.append(timeless(run(config, text, precision, 7)))
    assert results[0] == results[1]


def test_another_seed_gives_other_numbers(small):
    config = small()
    text = load_text(config.data)
    assert run(config, text, "nearest", 0).val_loss != run(config, text, "nearest", 1).val_loss


def test_torch_is_left_as_it_was(small):
    config = small(threads=1)
    text = load_text(config.data)
    torch.manual_seed(5)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    run(config, text, "nearest", 0)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_all_precisions_start_from_the_same_weights(small):
    config = small()
    starts = {}
    for precision in ("fp32", "master", "nearest", "collage-plus"):
        model, optimizer = build(config, 20, precision, 0, CPU)
        starts[precision] = optimizer.full_precision_state_dict(model)
        expected = torch.float32 if precision == "fp32" else torch.bfloat16
        assert {p.dtype for p in model.parameters()} == {expected}
    for name, value in starts["fp32"].items():
        assert torch.equal(starts["master"][name], value)
        assert torch.equal(starts["nearest"][name], value.bfloat16().float())
        # Two BF16 components hold 16 significant bits or more.
        torch.testing.assert_close(starts["collage-plus"][name], value, rtol=2**-16, atol=1e-12)


def test_only_matrices_decay(small):
    model, optimizer = build(small(weight_decay=0.25), 20, "nearest", 0, CPU)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for p in model.parameters():
        assert decay[id(p)] == (0.25 if p.dim() == 2 else 0.0)


def test_records_hold_what_each_step_measured(small):
    config = small(steps=8, eval_every=3, watch_every=4, log_every=2)
    records = []
    summary = run(config, load_text(config.data), "nearest", 0, records.append)
    assert [r.step for r in records if r.val_loss is not None] == [3, 6, 8]
    watched = [r for r in records if r.descent_share is not None]
    assert [r.step for r in watched] == [1, 5]
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6, 8]
    assert records[-1].val_loss == summary.val_loss
    for r in watched:
        assert r.descent_share == pytest.approx(r.effective_descent_quality / r.update_norm)
        assert 0 <= r.lost_arithmetic <= 1


def test_memory_and_bytes_come_from_the_live_tensors(small):
    config = small()
    text = load_text(config.data)
    by_precision = {p: run(config, text, p, 0) for p in ("nearest", "master", "fp32")}
    for name, total, state_bytes in (("nearest", 8, 4), ("master", 16, 12), ("fp32", 16, 8)):
        summary = by_precision[name]
        assert summary.bytes_per_parameter["total"] == total
        parameter = summary.bytes_per_parameter["parameter"]
        assert summary.peak_bytes["weights"] == parameter * summary.parameters
        # The rest are step counters, a few bytes a tensor.
        states = summary.peak_bytes["states"] - state_bytes * summary.parameters
        assert 0 <= states <= 8 * 20
        gradient = summary.bytes_per_parameter["gradient"]
        assert summary.category_peak_bytes["gradients"] == gradient * summary.parameters


def test_two_steps_are_enough(small):
    config = small(steps=2)
    summary = run(config, load_text(config.data), "master", 0)
    assert summary.steps == 2
    assert summary.peak_bytes["total"] > 0


def test_evaluation_weighs_every_token_the_same(small):
    model, _ = build(small(), 20, "fp32", 0, CPU)
    x, y = torch.randint(20, (5, 8)), torch.randint(20, (5, 8))
    ragged = [(x[:4], y[:4]), (x[4:], y[4:])]
    assert evaluate(model, ragged) == pytest.approx(evaluate(model, [(x, y)]), rel=1e-6)
    assert model.training


def test_the_learning_rate_rises_in_a_line_and_falls_in_a_cosine(small):
    config = small(steps=101, warmup=0.1, final_lr=0.2)
    factors = [learning_rate_factor(config, step) for step in range(101)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[10] == 1
    assert factors[55] == pytest.approx(0.6)
    assert factors[-1] == pytest.approx(0.2)
    all_warmup = small(steps=2, warmup=1.0)
    assert [learning_rate_factor(all_warmup, step) for step in (0, 1, 2)] == [0.5, 1, 1]


def test_a_strategy_that_the_dtype_cannot_have_is_refused():
    with pytest.raises(ValueError, match="precision='kahan' is not available"):
        parameter_dtype("kahan", "e4m3")
    with pytest.raises(ValueError, match="precision='bf17' is unknown: use one of fp32"):
        parameter_dtype("bf17", "bf16")
    assert parameter_dtype("fp32", "bf16") == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_an_error_only_when_asked_for():
    assert resolve_device("auto") == CPU
    with pytest.raises(ValueError, match="device=cuda is not available"):
        resolve_device("cuda")


def test_a_power_of_two_scales_the_loss_without_changing_the_training(small):
    text = load_text(small().data)
    results = [
        dataclasses.replace(
            timeless(run(small(loss_scale=scale), text, "master", 0)), effective_descent_quality=0.0
        )
        for scale in (None, 1024.0)
    ]
    assert results[0] == results[1]


def test_formats_with_few_exponents_scale_the_loss_unless_told_otherwise(small):
    assert loss_scale(small(), "nearest") == 1
    assert loss_scale(small(dtype="fp16"), "nearest") == 1024
    assert loss_scale(small(dtype="fp16"), "fp32") == 1
    assert loss_scale(small(dtype="e4m3", loss_scale=64.0), "nearest") == 64


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_other_formats_train_too(small, dtype):
    config = small(dtype=dtype, steps=60, lr=1e-2)
    summary = run(config, load_text(config.data), "collage-light", 0)
    # A guess among the characters of the text costs 3.3 nats.
    assert summary.val_loss < 3

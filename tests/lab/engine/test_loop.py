"""One run: what is equal must be equal bit for bit."""

import dataclasses

import pytest
import torch

from subulp.lab.engine.loop import resolve_device, run
from subulp.lab.tasks.lm.text import load_text

CPU = torch.device("cpu")


def timeless(summary):
    return dataclasses.replace(summary, seconds_per_step=0.0)


@pytest.mark.parametrize("precision", ["fp32", "collage-plus", "stochastic"])
def test_the_same_arguments_give_the_same_numbers(small, precision):
    config = small(dropout=0.1, precision=(precision,))
    text = load_text(config.data)
    results = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        results.append(timeless(run(config, text, precision, 7)))
    assert results[0] == results[1]


def test_another_seed_gives_other_numbers(small):
    config = small()
    text = load_text(config.data)
    assert run(config, text, "nearest", 0).metrics != run(config, text, "nearest", 1).metrics


def test_torch_is_left_as_it_was(small):
    config = small(threads=1)
    text = load_text(config.data)
    torch.manual_seed(5)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    run(config, text, "nearest", 0)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_records_hold_what_each_step_measured(small):
    config = small(steps=8, eval_every=3, watch_every=4, log_every=2)
    records = []
    summary = run(config, load_text(config.data), "nearest", 0, records.append)
    assert [r.step for r in records if r.metrics] == [3, 6, 8]
    watched = [r for r in records if r.descent_share is not None]
    assert [r.step for r in watched] == [1, 5]
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6, 8]
    assert records[-1].metrics == summary.metrics
    for r in watched:
        assert r.descent_share == pytest.approx(r.effective_descent_quality / r.update_norm)
        assert 0 <= r.lost_arithmetic <= 1


def test_memory_and_bytes_come_from_the_live_tensors(small):
    config = small(precision=("nearest", "master", "fp32"))
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_an_error_only_when_asked_for():
    assert resolve_device("auto") == CPU
    with pytest.raises(ValueError, match="device=cuda is not available"):
        resolve_device("cuda")

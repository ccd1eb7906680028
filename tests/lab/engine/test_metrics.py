import dataclasses
import json
import math

import pytest

from subulp.lab.engine.metrics import (
    Metric,
    Record,
    Spread,
    Summary,
    baseline_of,
    by_name,
    excess_over_baseline,
    to_json,
    with_drops,
)
from subulp.lab.tasks.lm.task import METRICS

LOSS, PERPLEXITY = METRICS


def summary(precision, seed=0, perplexity=8.0):
    return Summary(
        precision=precision,
        seed=seed,
        metrics={"val_loss": math.log(perplexity), "perplexity": perplexity},
        train_loss=2.0,
        bytes_per_parameter={"parameter": 2.0, "total": 12.0},
        peak_bytes={"weights": 1, "gradients": 2, "states": 3, "activations": 4, "total": 10},
        category_peak_bytes={
            "weights": 1,
            "gradients": 3,
            "states": 3,
            "activations": 4,
            "total": 10,
        },
        seconds_per_step=0.01,
        effective_descent_quality=0.5,
        descent_share=0.9,
        lost_arithmetic=0.1,
        steps=10,
        skipped_steps=0,
        parameters=1000,
    )


def test_master_weights_are_the_baseline_before_fp32():
    assert baseline_of(["nearest", "fp32", "master"]) == "master"
    assert baseline_of(["nearest", "fp32"]) == "fp32"
    assert baseline_of(["kahan mor-2way", "kahan", "kahan e4m3"]) == "kahan"
    assert baseline_of(["kahan", "kahan-2"]) is None
    assert baseline_of(["nearest", "kahan"]) is None


def test_excess_is_paired_by_seed():
    runs = [summary("master", 0, 8.0), summary("master", 1, 10.0), summary("nearest", 1, 10.1)]
    assert excess_over_baseline(PERPLEXITY, runs[2], runs) == pytest.approx(1.0)
    assert excess_over_baseline(PERPLEXITY, runs[0], runs) == 0
    assert excess_over_baseline(PERPLEXITY, runs[2], runs[2:]) is None


def test_a_drop_is_relative_to_the_baseline_of_the_seed():
    drop = Metric("drop", "drop", "{:.2f}", "Drop", "%", drop_of="perplexity")
    runs = [summary("fp32", 0, 8.0), summary("int8", 0, 7.0), summary("int8", 1, 7.0)]
    drops = [run.metrics["drop"] for run in with_drops([LOSS, drop], runs)]
    assert drops[:2] == [0.0, 12.5]
    assert math.isnan(drops[2])


def test_variants_of_a_precision_are_told_apart():
    cached = dataclasses.replace(
        summary("int8"), variant="int8 lfu", settings={"cache_fraction": 0.05, "policy": None}
    )
    assert (summary("int8").name, cached.name) == ("int8", "int8 lfu")
    assert list(by_name([summary("int8"), cached])) == ["int8", "int8 lfu"]
    saved = json.loads(to_json(cached))
    assert (saved["precision"], saved["variant"]) == ("int8", "int8 lfu")
    assert (saved["cache_fraction"], saved["policy"]) == (0.05, None)
    assert "variant" not in json.loads(to_json(summary("int8")))


def test_spread_is_the_sample_deviation():
    assert Spread.of([1.0, 3.0]) == Spread(2.0, math.sqrt(2))
    assert Spread.of([1.0]) == Spread(1.0, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_spread_of_a_seed_that_diverged_is_not_a_number(bad):
    spread = Spread.of([1.0, bad])
    assert math.isnan(spread.mean)
    assert spread.deviation is None


def test_a_difference_that_rounds_to_zero_has_no_minus():
    assert [PERPLEXITY.excess_text(v) for v in (-0.001, 0.0, 0.426, -0.5)] == [
        "+0.00 %",
        "+0.00 %",
        "+0.43 %",
        "-0.50 %",
    ]


def test_json_is_strict_and_leaves_out_what_a_step_did_not_measure():
    record = Record("master", 0, 10, math.nan, 1e-3, 0.5)
    assert json.loads(to_json(record)) == {
        "precision": "master",
        "seed": 0,
        "step": 10,
        "loss": None,
        "lr": 1e-3,
        "seconds": 0.5,
    }
    saved = json.loads(to_json({"runs": [summary("kahan")]}))["runs"][0]
    assert saved["precision"] == "kahan"
    assert saved["perplexity"] == 8.0
    assert "metrics" not in saved


def test_a_difference_is_in_the_units_of_the_metric():
    accuracy = Metric("accuracy", "", "{:.2f}", "", "%", factor=100, versus="difference")
    assert accuracy.excess(0.97, 0.98) == pytest.approx(-1.0)
    assert accuracy.excess_text(-1.0) == "-1.00"

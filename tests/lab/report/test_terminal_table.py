import dataclasses
import math

from rich.console import Console

from subulp.lab.engine.metrics import Metric
from subulp.lab.report.terminal_table import print_comparison
from subulp.lab.tasks.lm.task import METRICS
from tests.lab.engine.test_metrics import summary


def render(summaries, width=200, metrics=METRICS):
    console = Console(width=width)
    with console.capture() as capture:
        print_comparison(console, metrics, summaries)
    return capture.get()


def test_every_quantity_is_there():
    text = render([summary("master", perplexity=8.0), summary("nearest", perplexity=8.08)])
    row = next(line for line in text.splitlines() if "nearest" in line)
    for cell in ("12", "2.0894", "8.080", "+1.00 %", "10.0", "90.0 %", "10.0 %"):
        assert cell in row
    assert "1,000 parameters, 10 steps" in text


def test_the_dtype_of_activations_is_told():
    run = dataclasses.replace(summary("master"), settings={"activations": "bf16"})
    assert "1,000 parameters, 10 steps, BF16 activations" in render([run])


def test_several_seeds_are_mean_and_deviation():
    runs = [
        summary(p, seed, ppl) for p, ppl in (("master", 8.0), ("kahan", 8.2)) for seed in (0, 1)
    ]
    text = render(runs)
    assert "2 seeds" in text
    assert "8.200 ± 0.000" in text


def test_without_a_baseline_nothing_is_compared():
    assert "vs" not in render([summary("kahan"), summary("nearest")])


def test_a_drop_below_a_baseline_that_is_not_there_is_no_divergence():
    drop = Metric("accuracy_drop", "drop", "{:.2f}", "Drop", "%", drop_of="accuracy")
    run = dataclasses.replace(summary("int8"), metrics={"accuracy_drop": math.nan})
    assert "diverged" not in render([run], metrics=(drop,))


def test_a_measure_that_the_test_part_does_not_have_is_no_divergence():
    """No AUC of examples of one class."""
    area = Metric("AUC", "AUC", "{:.2f}", "AUC", "")
    run = dataclasses.replace(summary("int8"), metrics={"AUC": math.nan, "log_loss": 0.5})
    assert "diverged" not in render([run], metrics=(area,))
    run.metrics["log_loss"] = math.nan
    assert "diverged" in render([run], metrics=(area,))


def test_a_diverged_run_says_so():
    assert "diverged" in render([summary("master"), summary("nearest", perplexity=math.inf)])


def test_steps_that_were_left_out_and_rollbacks_are_told():
    assert "left out" not in render([summary("nearest")])
    changes = ({"skipped_steps": 1200}, {"skipped_steps": 34, "rollbacks": 2}, {})
    names = ("nearest", "nearest", "kahan")
    runs = [
        dataclasses.replace(summary(name, seed), **change)
        for seed, (name, change) in enumerate(zip(names, changes, strict=True))
    ]
    text = " ".join(render(runs).split())
    assert "Steps skipped because a gradient was not finite: nearest 1,234." in text
    assert "Rollbacks to a checkpoint, with smaller steps afterwards: nearest 2." in text


def test_a_narrow_console_gets_whole_numbers_in_two_parts():
    runs = [summary("master"), summary("extra-bits-12-stochastic", perplexity=8.08)]
    wide, narrow = render(runs), render(runs, width=80)
    assert wide.count("extra-bits-12-stochastic") == 1
    assert narrow.count("extra-bits-12-stochastic") == 2
    assert "…" not in narrow
    assert set(wide.replace("─", "").split()) == set(narrow.replace("─", "").split())


def test_what_is_simulated_has_neither_memory_nor_time():
    row = next(
        line
        for line in render([dataclasses.replace(summary("e5m2+8"), simulated=True)]).splitlines()
        if "e5m2+8" in line
    )
    assert row.split()[-6:] == ["-"] * 6


def test_an_epoch_has_a_time_where_there_are_epochs():
    assert "epoch" not in render([summary("master")])
    runs = [
        dataclasses.replace(summary("fp32", seed), seconds_per_epoch=10.0 + seed) for seed in (0, 1)
    ]
    row = next(line for line in render(runs).splitlines() if "fp32" in line)
    assert row.split()[-1] == "10.5"


def test_the_training_loss_stands_where_no_other_loss_does():
    assert render([summary("master")]).count("loss") == 1
    metric = Metric("P@1", "P@1", "{:.2f}", "P@1", "%")
    run = dataclasses.replace(summary("fp8"), metrics={"P@1": 50.0}, train_loss=12.345)
    row = next(line for line in render([run], metrics=(metric,)).splitlines() if "fp8" in line)
    assert row.split()[:3] == ["fp8", "50.00", "12.35"]

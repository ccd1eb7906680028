"""A page begins with what was found; what coincides is told apart; a point is no chart."""

import math

import pytest

from subulp.lab.report import render
from subulp.lab.report.group import Group
from subulp.lab.report.page import section
from subulp.lab.report.run_reader import read_run
from tests.lab.report.support import LM, lm_records, lm_summary, write_run
from tests.lab.report.test_page import ctr_run


def shown(*folders):
    runs = [read_run(folder) for folder in folders]
    return section(Group.of(runs[0].task, runs))


def sentences(tmp_path, variants, seeds=(0, 1), change=None):
    summary = lm_summary(variants, seeds)
    for run in summary["runs"]:
        run.update((change or {}).get(run["precision"], {}))
    folder = write_run(tmp_path / "run", LM, lm_records(variants, seeds), summary)
    return shown(folder).conclusions


def test_what_was_lost_at_how_many_bytes_beside_what(tmp_path):
    (found,) = sentences(tmp_path, {"master": 0.0, "nearest": 0.05, "collage-plus": -0.01})
    assert found == (
        "Beside master (16 bytes a parameter), perplexity is 1.00 ± 0.00 % lower under "
        "collage-plus (16) and 5.13 ± 0.00 % higher under nearest (16)."
    )


def test_one_seed_has_no_deviation_and_no_difference_is_said(tmp_path):
    (found,) = sentences(tmp_path, {"master": 0.0, "kahan": 0.0}, seeds=(0,))
    assert found == "Beside master (16 bytes a parameter), perplexity is the same under kahan (16)."


def test_what_diverged_and_what_is_simulated(tmp_path):
    change = {"nearest": {"perplexity": None}, "kahan": {"simulated": True}}
    (found,) = sentences(tmp_path, {"master": 0.0, "nearest": 0.1, "kahan": 0.2}, (0,), change)
    assert "22.14 % higher under kahan (16, simulated) and not finite under nearest" in found


def test_many_variants_are_not_listed_all(tmp_path):
    variants = {"master": 0.0} | {f"extra-bits-{k}": k / 100 for k in range(1, 9)}
    smallest = {"extra-bits-8": {"bytes_per_parameter": {"total": 6.5}}}
    (found,) = sentences(tmp_path, variants, (0,), smallest)
    # The three best ones, and the one of the fewest bytes.
    for name in ("extra-bits-1 ", "extra-bits-2 ", "extra-bits-3 ", "extra-bits-8 (6.5)"):
        assert name in found
    assert "extra-bits-4" not in found
    assert found.endswith("; the table has 4 more.")


def test_without_a_baseline_and_alone(tmp_path):
    (found,) = sentences(tmp_path / "a", {"nearest": 0.1, "kahan": 0.2}, (0,))
    assert found.startswith("Perplexity is ")
    assert found.endswith("there is no baseline (master or fp32).")
    (found,) = sentences(tmp_path / "b", {"nearest": 0.1}, (0,))
    assert found.endswith("under nearest (16 bytes a parameter); there is nothing to compare with.")


def test_what_is_not_finished_has_no_conclusion(tmp_path):
    run = write_run(tmp_path / "run")
    assert shown(run).conclusions == ["No conclusion yet: the comparison is not finished."]
    empty = write_run(tmp_path / "empty", records=[])
    assert shown(empty).conclusions == ["Nothing has been measured yet."]


def test_several_runs_have_a_sentence_each_and_a_page_begins_with_it(tmp_path):
    runs = [write_run(tmp_path / name, summary=lm_summary()) for name in ("a", "b")]
    found = shown(*runs).conclusions
    assert [text.partition(":")[0] for text in found] == ["a", "b"]
    page = render(runs)
    assert page.index("Beside master") < page.index("<table") < page.index("<svg")


def test_the_unit_is_that_of_the_task(tmp_path):
    (found,) = shown(ctr_run(tmp_path / "ctr")).conclusions
    assert "bytes a number of the tables)" in found
    assert "normalised entropy is" in found


def test_curves_that_coincide_have_their_differences_below(tmp_path):
    near = {"master": 0.0, "kahan": 1e-5, "nearest": 0.4}
    folder = write_run(tmp_path / "near", LM, lm_records(near), lm_summary(near))
    chart = next(c for c in shown(folder).training if c.title == "Validation loss")
    assert chart.below is not None
    assert [line.name for line in chart.below.lines] == ["kahan", "nearest"]
    assert chart.below.title == "Above master"
    steps, values = chart.below.lines[0].series
    assert steps.tolist() == [100, 200, 300]
    assert values.mean(0) == pytest.approx([1e-5 * s / 300 for s in steps])
    assert "kahan, above master" in [name for name, _ in chart.numbers()[1]]
    assert "Above master" in render([folder])
    apart = {"master": 0.0, "nearest": 0.9}
    folder = write_run(tmp_path / "apart", LM, lm_records(apart), lm_summary(apart))
    chart = next(c for c in shown(folder).training if c.title == "Validation loss")
    assert chart.below is None


def test_without_a_baseline_nothing_is_below(tmp_path):
    near = {"kahan": 0.0, "nearest": 1e-5}
    folder = write_run(tmp_path / "run", LM, lm_records(near), lm_summary(near))
    assert all(chart.below is None for chart in shown(folder).training)


def test_a_single_evaluation_is_in_the_table_and_no_chart(tmp_path):
    records = lm_records(steps=(300,))
    folder = write_run(tmp_path / "run", LM, records, lm_summary())
    found = shown(folder)
    assert found.training == []
    assert found.lost == []
    assert found.headline == []
    assert found.quality.rows[0][2][0].text.startswith("2.0")
    assert "<svg" in render([folder])
    assert not math.isnan(read_run(folder).summaries[0].metrics["val_loss"])

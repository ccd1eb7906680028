import math

import pytest
from matplotlib.figure import Figure

from subulp.lab.engine.metrics import Record
from subulp.lab.report import plots
from subulp.lab.tasks.image import task as image
from subulp.lab.tasks.lm.task import METRICS


def quality(loss):
    return {"val_loss": loss, "perplexity": math.exp(loss), "accuracy": 1 / loss}


def records(precisions, seeds=(0, 1)):
    return [
        Record(
            p,
            seed,
            step,
            3.0,
            1e-3,
            0.1,
            quality(3 - step / 100 + seed / 50 + i / 90),
            0.5,
            0.6,
            0.9,
            0.1,
        )
        for i, p in enumerate(precisions)
        for seed in seeds
        for step in (10, 20, 30)
    ]


@pytest.fixture
def saved(monkeypatch):
    """The figures that are saved, to look into."""
    figures = []
    original = Figure.savefig

    def savefig(self, *args, **kwargs):
        figures.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_loss_is_shown_beside_its_excess_over_the_baseline(tmp_path, saved):
    plots.plot_quality(records(["master", "nearest"]), METRICS, tmp_path / "loss.png")
    loss, excess = saved[0].axes
    assert [line.get_label() for line in loss.get_lines()] == ["master", "nearest"]
    (nearest,) = [line for line in excess.get_lines() if line.get_label() == "nearest"]
    # The seeds are paired: what they have in common cancels.
    assert nearest.get_ydata() == pytest.approx([100 * math.expm1(1 / 90)] * 3)
    assert [text.get_text() for text in excess.texts] == ["nearest +1.12 %"]


def test_without_a_baseline_there_is_one_panel(tmp_path, saved):
    plots.plot_quality(records(["nearest"]), METRICS, tmp_path / "loss.png")
    assert len(saved[0].axes) == 1


def test_a_metric_that_differs_by_units_is_shown_as_it_is(tmp_path, saved):
    plots.plot_quality(records(["nearest"]), image.METRICS, tmp_path / "loss.png")
    accuracy = saved[0].axes[1]
    assert accuracy.get_ylabel() == "%"
    (line,) = accuracy.get_lines()
    expected = [50 * (1 / (3 - s / 100) + 1 / (3.02 - s / 100)) for s in (10, 20, 30)]
    assert line.get_ydata() == pytest.approx(expected)
    assert [text.get_text() for text in accuracy.texts] == [f"nearest {expected[-1]:.2f}"]


def test_runs_of_another_length_are_shown_where_all_seeds_have_values(tmp_path, saved):
    some = [r for r in records(["master", "nearest"]) if not (r.seed == 1 and r.step == 30)]
    plots.plot_quality(some, METRICS, tmp_path / "loss.png")
    assert list(saved[0].axes[0].get_lines()[0].get_xdata()) == [10, 20]


def test_lines_differ_without_colour(tmp_path, saved):
    many = ["fp32", "master", "nearest", "stochastic", "kahan", "collage-light", "collage-plus"]
    many += ["fp32-states", "extra-bits-4", "extra-bits-8", "extra-bits-12"]
    plots.plot_descent_quality(records(many), tmp_path / "descent_quality.png")
    lines = saved[0].axes[0].get_lines()
    assert len({line.get_marker() for line in lines}) == len(many)
    assert len({line.get_color() for line in lines}) >= len(many) - 1

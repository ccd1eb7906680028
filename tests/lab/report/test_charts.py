"""What figures show is where it belongs; whether they read well, eyes must tell."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from subulp import diagnostics
from subulp.lab.report import write_run_report
from subulp.lab.report.figure import apart, save_png, svg
from subulp.lab.report.group import Group
from subulp.lab.report.heat_map import plot_mix
from subulp.lab.report.line_chart import Line, LineChart
from subulp.lab.report.page import section
from subulp.lab.report.run_reader import read_run
from subulp.lab.report.styles import COLOURS, STYLES, line_styles
from subulp.nn import MoR, convert_to_mor
from tests.lab.report.support import lm_records, lm_summary, write_run

MANY = ["fp32", "master", "nearest", "stochastic", "kahan", "collage-light", "collage-plus"]
MANY += ["fp32-states", "extra-bits-4", "extra-bits-8", "extra-bits-12"]


def shown(folder, records=None, **config):
    """The figures and tables of a run directory."""
    config = {"task": "lm", "seeds": [0, 1], **config}
    run = read_run(write_run(folder / "run", config, records))
    return section(Group.of(run.task, [run]))


def chart(*names, values=((1.0, 2.0),)):
    series = np.array([1, 10]), np.array(values)
    keys = map(chr, range(ord("A"), ord("Z")))
    lines = zip(names, keys, line_styles(names), strict=False)
    return LineChart("A title", "units", [Line(*line, series) for line in lines], "{:.2f}".format)


def texts(chart):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg(chart, ""))


def test_loss_is_shown_beside_its_excess_over_the_baseline(tmp_path):
    loss, excess = shown(tmp_path).headline
    assert [line.name for line in loss.lines] == ["master", "nearest", "collage-plus"]
    assert [line.name for line in excess.lines] == ["nearest", "collage-plus"]
    # The seeds are paired: what they have in common cancels.
    expected = [100 * math.expm1(0.05 * step / 300) for step in (100, 200, 300)]
    assert excess.lines[0].series[1] == pytest.approx(np.array([expected] * 2))
    assert "nearest +5.13 %" in texts(excess)


def test_without_a_baseline_there_is_one_panel(tmp_path):
    (loss,) = shown(tmp_path, lm_records({"nearest": 0.0})).headline
    assert loss.title == "Validation loss"


def test_a_metric_that_differs_by_units_is_shown_as_it_is(tmp_path):
    records = [{**record, "accuracy": 0.5} for record in lm_records({"nearest": 0.0})]
    _, accuracy = shown(tmp_path, records, task="image").headline
    assert (accuracy.quantity, accuracy.lines[0].series[1].mean()) == ("%", 50)
    assert "nearest 50.00" in texts(accuracy)


def test_runs_of_another_length_are_shown_where_all_seeds_have_values(tmp_path):
    records = lm_records(steps=(1, 80, 90, 100))
    some = [r for r in records if not (r["seed"] == 1 and r["step"] == 100)]
    assert shown(tmp_path, some).training[0].lines[0].series[0].tolist() == [80, 90]


def test_lines_differ_without_colour_and_strategies_keep_their_style():
    styles = line_styles(MANY)
    assert len({style.marker for style in styles}) == len(MANY)
    assert len({style.colour for style in styles}) >= len(MANY) - 1
    assert line_styles(["nearest"]) == [styles[2]]
    assert line_styles(["extra-bits-4", "nearest"])[0] not in styles[:8]
    # The same strategy of two run directories, and more names than styles.
    assert len(set(line_styles(["nearest"] * 2))) == 2
    assert set(line_styles(["master"] * 40)) == set(STYLES)


def test_names_stand_at_the_lines_or_in_a_legend():
    assert {"master 2.00", "nearest 2.00"} <= set(texts(chart("master", "nearest")))
    found = texts(chart(*MANY))
    assert {"A", "K", "A fp32", "K extra-bits-12"} <= {" ".join(t.split()) for t in found}


def test_lines_may_go_along_something_else_than_steps():
    def along(quantity, *places):
        style = line_styles(["master"])[0]
        series = np.array(places), np.ones((1, len(places)))
        line = Line("master", "A", style, series)
        return LineChart("A title", "", [line], "{:.2f}".format, along=quantity)

    below = along("binary exponent", -100, -50, 4)
    assert {"binary exponent", "-100", "0"} <= set(texts(below))
    assert below.description.startswith("A title against the binary exponent.")
    assert "<title>master, binary exponent -100: 1.00</title>" in svg(below, "")
    # Three decades; steps stay as they are.
    assert {"0.001", "0.1"} <= set(texts(along("share", 0.001, 0.5, 1.0)))
    assert along("share", 0.001, 0.5, 1.0).numbers()[0] == ["0.001", "0.5", "1"]
    assert "100" not in texts(along("step", 1, 10, 10_000))


def test_values_that_are_not_finite_are_gaps():
    nan = chart("master", values=((math.nan, math.inf),))
    assert "ends at not finite" in nan.description
    assert "master" not in "".join(texts(nan))
    half = chart("master", values=((1.0, math.nan), (1.0, 2.0)))
    assert "master not finite" in texts(half)


def test_colours_are_the_pages_and_the_text_is_text():
    figure = svg(chart("master", "nearest", values=((1, 2), (2, 3))), "f7-")
    assert not re.search(r"#[0-9a-f]{6}\b", figure)
    assert {"--" + name for name in COLOURS} >= set(re.findall(r"var\((.*?)\)", figure))
    for colour in ("black", "vermilion"):
        assert f"fill: var(--{colour})" in figure
    assert "font-family" not in figure
    assert set(re.findall(r' id="(f7-)?', figure)) == {"f7-"}
    assert "<title>nearest, step 10: 2.50</title>" in figure


def test_the_same_chart_gives_the_same_figure():
    assert len({svg(chart("master", "nearest"), "f0-") for _ in range(2)}) == 1
    light = [light for light, _ in COLOURS.values()]
    assert len(set(light)) == len(light)


@pytest.mark.parametrize("name", ["$a$ $b_c$", "<&>", "\x00\ud800", "\u6587\u5b57", "\U0001f600"])
def test_any_name_can_be_drawn(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg(chart(name, *MANY), "")
        save_png([chart(name), chart("master")], tmp_path / "a.png")


def test_a_run_directory_gets_its_figures(tmp_path):
    operand = {"layer": "up", "role": "input", "error": 0.02, "elements": {"e4m3": 1.0}}
    records = [{**record, "mix": [operand]} for record in lm_records()]
    folder = write_run(tmp_path / "run", records=records, summary=lm_summary())
    write_run_report(folder)
    pictures = {
        "loss.png",
        "descent_quality.png",
        *(f"mixes/{n}.png" for n in ("master", "nearest")),
    }
    for name in pictures:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert "Validation loss" in (folder / "report.html").read_text()


def test_labels_move_apart():
    places = [0.5, 0.1, 0.51, 0.52, 0.9]
    moved = apart(places, 0.05, 0, 1)
    assert np.diff(sorted(moved)).min() >= 0.05 - 1e-9
    assert np.argsort(moved).tolist() == np.argsort(places).tolist()
    assert (moved[0], moved[1], moved[4]) == (0.5, 0.1, 0.9)
    assert apart([0.99, 1.0], 0.05, 0, 1) == pytest.approx([0.95, 1.0])
    assert apart([], 0.05, 0, 1) == []


def test_the_heat_map_is_readable_without_colour(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    convert_to_mor(model, MoR("subtensor-3way", "channel"))
    model(torch.randn(32, 64)).square().mean().backward()
    mix = diagnostics.representation_mix(model)
    plot_mix(mix, tmp_path / "mix.png")
    image = imread(tmp_path / "mix.png")
    assert image.shape[0] > 300
    assert image.shape[1] > 1000
    # Nearly greys only: the three channels differ by the tint of the text alone.
    assert abs(image[..., 0] - image[..., 2]).max() < 0.1
    plot_mix(mix.operands[:1], tmp_path / "one.png")
    assert (tmp_path / "one.png").exists()
    with pytest.raises(ValueError, match="mix is empty"):
        plot_mix([], tmp_path / "none.png")

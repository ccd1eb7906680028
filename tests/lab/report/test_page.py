"""The page without a browser: what it says, that it is well-formed, and that it needs nothing."""

import copy
import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from subulp.lab.cli import main
from subulp.lab.engine.metrics import Metric
from subulp.lab.report import render, write_report
from subulp.lab.report.group import Result, Variant
from subulp.lab.report.styles import LineStyle
from tests.lab.report.support import LM, VARIANTS, lm_records, lm_summary, write_run

_VOID = {"meta", "link", "br", "rect", "circle", "path", "line", "polyline", "polygon"}


class Page(HTMLParser):
    """Checks that elements are closed in order; collects texts and what could reach a network."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.texts, self.tags, self.addresses, self.ids = [], [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "action", "data", "xlink:href"):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)
            assert not name.startswith("on")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def ended(tmp_path):
    return write_run(tmp_path / "run", summary=lm_summary())


@pytest.fixture(scope="module")
def ended_page(tmp_path_factory):
    return render([write_run(tmp_path_factory.mktemp("runs") / "run", summary=lm_summary())])


def cells(page, row):
    """The cells of the first table row that is named so."""
    found = re.search(rf"<tr><th[^>]*>(?:<span[^>]*>\w+</span> )?{row}</th>(.*?)</tr>", page)
    return re.findall(r"<td[^>]*>(.*?)</td>", found[1])


def test_elements_are_closed_and_figures_are_well_formed(ended_page):
    page = ended_page
    parsed = Page(page)
    assert len(parsed.ids) == len(set(parsed.ids))
    figures = re.findall(r"<svg viewBox.*?</svg>", page, re.DOTALL)
    assert len(figures) >= 8
    for figure in figures:
        root = ET.fromstring(figure)
        for element in root.iter():
            for value in element.attrib.values():
                assert "nan" not in value
                assert "inf" not in value
    described = [ET.fromstring(f) for f in figures if 'role="img"' in f]
    assert all(root.find("title").text and root.find("desc").text for root in described)


def test_nothing_is_loaded_from_anywhere(ended_page):
    page = ended_page
    parsed = Page(page)
    assert all(a.startswith(("#", "data:")) for a in parsed.addresses)
    assert not {"script", "img", "iframe", "object", "embed", "base"} & set(parsed.tags)
    assert "http" not in re.sub(r'http-equiv="', "", page)
    assert "@import" not in page
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)\)", page))
    assert "default-src 'none'" in page


def test_every_number_of_the_summary_is_there(ended_page):
    page = ended_page
    text = Page(page).text
    for run in lm_summary()["runs"]:
        row = cells(page, f"{run['precision']}, seed {run['seed']}")
        for name, value in run.items():
            if name in ("precision", "seed"):
                continue
            for number in value.values() if isinstance(value, dict) else [value]:
                shown = (
                    {True: "yes", False: "no"}[number]
                    if isinstance(number, bool)
                    else f"{number:,}"
                    if isinstance(number, int)
                    else f"{number:.6g}"
                )
                assert shown in row, name
    assert "1,000 parameters, 300 steps" in text
    assert "a text: 9,000 train" in text


def test_differences_are_paired_by_seed(ended_page):
    row = cells(ended_page, "nearest")
    losses = [2 + math.exp(-3) + 0.05 + seed / 100 for seed in (0, 1)]
    mean = f"{sum(losses) / 2:.4f} ± {0.01 / math.sqrt(2):.4f}"
    # The luck of the seeds, 0.01, is in the value and not in the difference.
    assert row[0].startswith(mean)
    assert "+0.0500 ± 0.0000" in row[0]
    assert f"+{100 * math.expm1(0.05):.2f} ± 0.00 %" in row[1]
    assert "<small" not in "".join(cells(ended_page, "master")[:2])


def test_memory_is_counted_and_measured(ended_page):
    counted, without, measured, *_ = cells(ended_page.split("<h3>Memory</h3>")[1], "master")
    assert counted.startswith("16<small")
    assert "2 parameter + 2 gradient + 4 exp avg + 4 exp avg sq + 4 master" in counted
    assert (without, measured) == ("14", "14")


def test_a_run_that_has_not_ended(tmp_path):
    records = [r for r in lm_records() if r["precision"] == "master" or r["step"] < 300]
    folder = write_run(tmp_path / "run", records=records)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"precision": "nearest", "se')
    page = render([folder])
    text = Page(page).text
    assert "The comparison is not finished" in text
    assert "The last line of metrics.jsonl is incomplete" in text
    assert "unfinished: the last logged step is 300" in text
    row = cells(page, "nearest")
    assert row[0] == "200"
    # Against the baseline at the same step.
    assert "+0.0333" in row[1]
    assert "<h3>Memory</h3>" not in page


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_run_that_has_just_begun(tmp_path, name):
    folder = write_run(tmp_path / "run", records=[])
    if name == "metrics.jsonl":
        (folder / name).unlink()
    assert "Nothing has been logged yet" in Page(render([folder])).text


def test_a_run_that_diverged(tmp_path):
    summary = lm_summary()
    for run in summary["runs"]:
        if run["precision"] == "nearest":
            run |= {"val_loss": None, "perplexity": None, "train_loss": None}
    records = lm_records()
    for record in records:
        if record["precision"] == "nearest" and record["step"] > 100:
            record |= {"loss": None, "val_loss": None, "perplexity": None}
    page = render([write_run(tmp_path / "run", records=records, summary=summary)])
    assert "nearest: not finite with seed 0, 1." in Page(page).text
    assert cells(page, "nearest")[0].startswith("not finite")


def test_a_run_that_watched_no_step(tmp_path):
    summary = lm_summary()
    for run in summary["runs"]:
        run.update(dict.fromkeys(("effective_descent_quality", "descent_share", "lost_arithmetic")))
    assert "not finite" not in render([write_run(tmp_path / "run", summary=summary)])


EVIL = "<script>alert(1)</script>\"'&amp; \x00 \ud800"


def test_steps_that_were_left_out_and_rollbacks_are_told(tmp_path):
    summary = lm_summary(seeds=(0,))
    summary["runs"][0] |= {"skipped_steps": 7, "rollbacks": 2}
    records = [{**record, "skipped_steps": 7} for record in lm_records(seeds=(0,))]
    text = Page(render([write_run(tmp_path / "run", LM, records, summary)])).text
    name = f"{summary['runs'][0]['precision']}, seed 0"
    assert f"{name}: 7 of 300 steps were skipped because a gradient was not finite." in text
    assert f"{name} rolled back to a checkpoint 2 times, with smaller steps afterwards." in text


def test_every_text_is_escaped(tmp_path):
    summary = lm_summary({EVIL: 0.0, "master": 0.0})
    summary["data"] = {"name": EVIL, EVIL: 1, "skipped_lines": 1, "first_skipped": EVIL}
    for run in summary["runs"]:
        run["bytes_per_parameter"][EVIL] = 1.0
        run[EVIL] = 1.0
    config = {**LM, "data": EVIL, "steps": [EVIL], EVIL: {EVIL: EVIL}}
    records = lm_records({EVIL: 0.0, "master": 0.0})
    folder = write_run(tmp_path / "<script>alert(2)<", config, records, summary)
    page = render([folder])
    parsed = Page(page)
    assert "script" not in parsed.tags
    assert "<script>alert(1)</script>" in parsed.text
    assert "<script>alert(2)<" in parsed.text
    page.encode()
    for figure in re.findall(r"<svg viewBox.*?</svg>", page, re.DOTALL):
        ET.fromstring(figure)


def test_runs_of_a_task_are_compared_and_tasks_are_told_apart(tmp_path, ended):
    other = write_run(tmp_path / "other", {**LM, "steps": 400}, summary=lm_summary())
    digits = {"task": "image", "precision": ["fp32"], "seeds": [0]}
    records = [{**r, "accuracy": 0.5} for r in lm_records({"fp32": 0.0}, (0,))]
    image = write_run(tmp_path / "image", digits, records)
    page = render([ended, other, image])
    parsed = Page(page)
    assert parsed.ids.count("lm") == parsed.ids.count("image") == 1
    for label in ("run", "other"):
        for variant in VARIANTS:
            assert cells(page, f"{label}: {variant}")
    assert cells(page, "steps") == ["300", "400", "2500"]
    assert len(set(parsed.ids)) == len(parsed.ids)


def test_equal_names_of_folders_are_told_apart(tmp_path):
    one = {"master": 0.0}
    runs = [
        write_run(tmp_path / name / "run", LM, lm_records(one, (0,)), lm_summary(one, (0,)))
        for name in ("a", "b")
    ]
    text = Page(render([*runs, runs[0]])).text
    assert "run (1): master" in text
    assert "a/run: master" in Page(render(runs)).text


def test_options_that_differ_from_their_defaults_come_first(tmp_path):
    config = {**LM, "steps": 300, "batch_size": 4, "lr": 0.001, "unheard_of": 5}
    page = render([write_run(tmp_path / "run", config)])
    first, rest = page.split("All other options")
    assert cells(first, "steps") == ["300", "2500"]
    assert cells(rest, "batch-size") == ["4"]
    assert cells(rest, "unheard-of") == ["5"]
    assert cells(rest, "memory") == ["16.0 GiB"]
    assert cells(rest, "torch") == ["2.13.0"]


def test_defaults_that_a_preset_decides_are_no_difference(tmp_path):
    config = {"task": "ctr", "preset": "criteo-kaggle", "data": "criteo:a", "dim": 128, "lr": 0.5}
    page = render([write_run(tmp_path / "run", config, records=[])])
    first, rest = page.split("All other options")
    assert cells(first, "lr") == ["0.5", "0.001"]
    assert cells(first, "preset") == ["criteo-kaggle", "none"]
    assert cells(rest, "dim") == ["128"]


def ctr_run(folder):
    records, runs = [], []
    config = {"task": "ctr", "rounding": ["nearest"], "cache_fraction": [0.0, 0.05]}
    config |= {"policy": ["lfu"], "ways": [32], "precision": ["fp32", "int4"]}
    for name, precision, size, hits in (
        ("fp32", "fp32", 1.0, 0.0),
        ("int4 nearest", "int4", 0.2, 0.0),
        ("int4 nearest lfu 5%", "int4", 0.3, 0.9),
    ):
        for record in lm_records({precision: 0.0}, (0, 1)):
            measured = {"log_loss": record["loss"], "normalised_entropy": record["loss"] / 2 + size}
            measured |= {"compression": size, "hit_rate": hits}
            records.append({**record, **measured, "variant": name})
            if record["step"] == 300:
                (run,) = lm_summary({precision: 0.0}, (record["seed"],))["runs"]
                settings = {"cache_fraction": 0.05 if hits else 0.0, "policy": None}
                runs.append({**run, **measured, **settings, "variant": name})
    return write_run(folder, config, records, {"task": "ctr", "data": {}, "runs": runs})


def test_caches_and_compression(tmp_path):
    page = render([ctr_run(tmp_path / "run")])
    hits = page.split("<b>Lookups that the caches served")[1].split("</figure>")[0]
    assert "int4 nearest lfu 5%" in hits
    assert "fp32" not in hits
    trade_off = page.split("against memory of the tables over FP32's")[1].split("</figure>")[0]
    assert "int4 nearest: 0.2" in trade_off
    # Settings are no metrics, and null ones no divergence.
    assert "not finite" not in page


def test_representations_are_a_table_that_needs_no_colour(tmp_path):
    operand = {"layer": "blocks.0.up", "role": "input", "count": 10, "error": 0.02}
    operand |= {"elements": {"e4m3": 0.5, "e5m2": 0.25, "bf16": 0.25}}
    records = [{**r, "mix": [operand]} for r in lm_records()]
    page = render([write_run(tmp_path / "run", records=records)])
    (cell,) = cells(page, "blocks.0.up")
    assert [t for t in re.split("<.*?>", cell) if t] == ["75.0 %", "E5M2 25.0 %", "error 2.00 %"]


def test_a_long_run_has_a_small_page(tmp_path):
    records = lm_records(steps=range(1, 3001))
    folder = write_run(tmp_path / "run", records=records)
    assert len(render([folder])) < 300_000


def test_the_command_writes_a_file(ended, tmp_path, capsys):
    assert main(["report", str(ended)]) == 0
    assert f"wrote {ended / 'report.html'}" in capsys.readouterr().err
    out = tmp_path / "page.html"
    assert main(["report", str(ended), str(ended), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 run directories and no out"),
        (["a", "b"], "2 run directories and no out"),
        (["--out", "x.html"], "there is no run to report"),
        (["nowhere"], "nowhere holds no run: expected a folder with config.json"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_failure_leaves_the_old_page(ended, tmp_path):
    out = tmp_path / "page.html"
    write_report([ended], out)
    before = out.read_text()
    summary = copy.deepcopy(lm_summary())
    summary["runs"][0]["steps"] = "many"
    (ended / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"summary.json: expected runs\[0\].steps to be a"):
        write_report([ended], out)
    assert out.read_text() == before


def test_seeds_whose_baseline_is_zero_are_compared_too(tmp_path):
    """A precision of 0 is a value; in percent of 0 alone nothing can be said."""
    metric = Metric("P@1", "P@1", "{:.2f}", "P@1", "%", versus="difference")
    ratio = Metric("loss", "loss", "{:.2f}", "loss", "", versus="ratio")
    pairs = [(5, 10), (10, 5), (0, 10), (10, 0), (5, 0), (0, 5)]
    results = tuple(
        Result(seed, 1, {"P@1": mine, "loss": mine}, {"P@1": its, "loss": its}, None)
        for seed, (mine, its) in enumerate(pairs)
    )
    style = LineStyle("black", "solid", "o")
    variant = Variant("renee", "r", style, 0, "renee", results, False)
    assert variant.excesses(metric) == [-5, 5, -10, 10, 5, -5]
    assert variant.excesses(ratio) == [-50, 100, -100, -100]

"""Running, stopping, going on, and what a folder refuses."""

import dataclasses
import json
import os

import pytest

from subulp.lab.engine.stopping import Interrupted
from subulp.lab.reproduce import measurement, run, training, versions
from subulp.lab.reproduce.check import Check
from subulp.lab.reproduce.claim import Claim, Experiment, Options, Watch
from subulp.lab.reproduce.figures import MOST_ROWS, charts
from subulp.lab.reproduce.found import Curve, Found, Observation
from subulp.lab.reproduce.measurement import Measurement
from subulp.lab.reproduce.pages import markdown, read_records, write_report
from subulp.lab.reproduce.record import read_record
from subulp.lab.reproduce.run import Stopped, record_file, reproduce
from subulp.lab.reproduce.training import Training

HERE = Watch(jobs=1)


def claim_of(parts, **changes):
    sizes = {"smallest": "six steps", "small": "twelve steps"}
    own = {
        "checks": (Check("less is lost", "lost arithmetic", "master", than="nearest", high=0.5),),
        "curves": ("training loss",),
    }
    experiment = Experiment("own", sizes, parts)
    return Claim("collage", "Table 99", "Something.", experiment, **(own | changes))


@pytest.fixture
def claim(small):
    def parts(options):
        seeds = options.seeds or (0, 1, 2)
        return tuple(
            Training(f"lr-{lr}", small(lr=lr, seeds=seeds), f"lr {lr},", ("training loss",))
            for lr in (0.001, 0.01)
        )

    checks = (
        Check("less is lost", "lost arithmetic", "lr 0.001, master", "lr 0.001, nearest", high=0.5),
    )
    return claim_of(parts, checks=checks)


def without_time(written):
    slow = ("seconds per step",)
    observations = [o for o in written.found.observations if o.quantity not in slow]
    return observations, written.found.curves


def test_a_record_holds_what_was_found(claim, tmp_path):
    written = reproduce(claim, Options("small"), tmp_path, HERE)
    read = read_record(record_file(tmp_path / "records", claim.name, "small"))
    assert read == written
    assert read.seeds == [0, 1, 2]
    assert read.command == "subulp reproduce collage-table99 --size small"
    cases = {o.case for o in read.found.observations}
    assert cases == {f"lr {lr}, {p}" for lr in (0.001, 0.01) for p in ("master", "nearest")}
    quantities = {o.quantity for o in read.found.observations}
    assert {"perplexity", "lost arithmetic", "bytes per parameter"} <= quantities
    assert {c.quantity for c in read.found.curves} == {"training loss"}
    assert all(c.steps[-1] == 6 for c in read.found.curves)


def test_what_is_complete_is_only_read(claim, tmp_path, monkeypatch):
    first = reproduce(claim, Options("small"), tmp_path, HERE)
    monkeypatch.setattr(training, "compare", lambda *_, **__: pytest.fail("it trains again"))
    again = reproduce(claim, Options("small"), tmp_path, HERE)
    assert again.found == first.found
    # Reading takes time too, which is added.
    assert first.wall_seconds < again.wall_seconds


def test_stopped_and_continued_is_uninterrupted(claim, tmp_path, monkeypatch):
    whole = reproduce(claim, Options("small"), tmp_path / "whole", HERE)
    compare = training.compare

    def stop_second(config, **options):
        if config.lr == 0.01:
            raise Interrupted(options["out"], 2)
        return compare(config, **options)

    monkeypatch.setattr(training, "compare", stop_second)
    with pytest.raises(Stopped) as stopped:
        reproduce(claim, Options("small"), tmp_path / "half", HERE)
    assert "subulp reproduce collage-table99 --size small --out" in stopped.value.hint
    assert not record_file(tmp_path / "half" / "records", claim.name, "small").exists()
    monkeypatch.setattr(training, "compare", compare)
    kept = sum(json.loads((tmp_path / "half" / "own-small" / "seconds.json").read_text()).values())
    again = reproduce(claim, Options("small"), tmp_path / "half", HERE)
    assert without_time(again) == without_time(whole)
    assert 0 < kept < again.wall_seconds


@pytest.mark.parametrize("options", [Options("small", seeds=(0, 1, 2, 3))])
def test_a_folder_of_another_experiment_is_refused(claim, tmp_path, options):
    reproduce(claim, Options("small"), tmp_path, HERE)
    with pytest.raises(ValueError, match="has runs of own-small with other options, seeds or data"):
        reproduce(claim, options, tmp_path, HERE)


def test_a_size_that_is_not_there_is_refused(claim, tmp_path):
    with pytest.raises(ValueError, match="size=paper is not there for collage-table99"):
        reproduce(claim, Options("paper"), tmp_path, HERE)


def test_a_claim_that_nothing_repeats_is_refused(tmp_path):
    claim = Claim("collage", "Table 98", "Something.", not_run="it needs a cluster")
    with pytest.raises(ValueError, match="collage-table98 is not run: it needs a cluster"):
        reproduce(claim, Options("small"), tmp_path)


def test_a_measurement_is_made_once(tmp_path):
    calls = []

    def measure(size):
        calls.append(size)
        curve = Curve("a", "q", (1, 2), (1.0, float("nan")))
        return Found((Observation("a", "q", float("nan")), Observation("b", "q", 2.0)), (curve,))

    part = Measurement("m", measure, {"size": 3})
    first, second = part.run(tmp_path / "m", Watch()), part.run(tmp_path / "m", Watch())
    assert calls == [3]
    assert str(first) == str(second)


def own_process(size):
    """Which process measures, where nothing else can tell."""
    process = Observation("process", "number", os.getpid())
    return Found((process, Observation("a", "q", size)), (Curve("a", "q", (1,), (size,)),))


def test_processes_that_repeat_a_measurement_count_as_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "PROCESSES", 3)
    part = measurement.in_processes("m", own_process, {"size": 2.0}, "small")
    found = part.run(tmp_path / "m", Watch())
    assert found.values("a", "q") == {0: 2.0, 1: 2.0, 2: 2.0}
    assert [curve.seed for curve in found.curves] == [0, 1, 2]
    numbers = set(found.values("process", "number").values())
    assert len(numbers) == 3
    assert os.getpid() not in numbers
    # Made once, and another number of them is another experiment.
    assert part.run(tmp_path / "m", Watch()).observations == found.observations
    assert part.settings["processes"] == 3
    smallest = measurement.in_processes("m", own_process, {"size": 2.0}, "smallest")
    assert smallest.settings["processes"] == 1


def test_the_smallest_size_decides_nothing(tmp_path):
    part = Measurement("m", lambda: Found((Observation("a", "q", 2.0),)))
    claim = claim_of(lambda _: (part,), checks=(Check("two", "q", "a", low=2, high=2),), curves=())
    assert reproduce(claim, Options("smallest"), tmp_path).verdict(claim) == "undecided"
    assert reproduce(claim, Options("small"), tmp_path).verdict(claim) == "holds"


def test_a_record_says_what_follows_from_it(claim, tmp_path):
    reproduce(claim, Options("small"), tmp_path, HERE)
    raw = json.loads(record_file(tmp_path / "records", claim.name, "small").read_text())
    assert raw["verdict"] in ("holds", "undecided", "does not hold")
    assert [check["says"] for check in raw["checks"]] == ["less is lost"]


def test_a_record_without_the_time_of_day_has_that_of_its_steps(claim, tmp_path):
    reproduce(claim, Options("small"), tmp_path, HERE)
    file = record_file(tmp_path / "records", claim.name, "small")
    raw = json.loads(file.read_text())
    assert raw["wall_seconds"] > raw["seconds"] > 0
    del raw["wall_seconds"]
    file.write_text(json.dumps(raw))
    assert "of steps, " in markdown(read_records(file.parent, [claim]))


def test_a_damaged_record_is_named(claim, tmp_path):
    file = record_file(tmp_path, claim.name, "small")
    file.write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="is not record of a reproduction"):
        read_record(file)


def test_pages_show_the_paper_beside_ours(claim, tmp_path):
    printed = (Observation("lr 0.001, master", "perplexity", 15.03),)
    claim = dataclasses.replace(claim, published=printed, shows=("perplexity", "lost arithmetic"))
    reproduce(claim, Options("small"), tmp_path, HERE)
    write_report(tmp_path / "records", [claim], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "15.03 in the paper" in page
    text = markdown(read_records(tmp_path / "records", [claim]))
    assert "less is lost" in text
    assert "`subulp reproduce collage-table99 --size small" in text


def test_a_report_says_why_claims_are_not_run(claim, tmp_path):
    reproduce(claim, Options("small"), tmp_path, HERE)
    never = Claim("collage", "Table 100", "Something.", not_run="it needs 16 GPUs")
    not_yet = dataclasses.replace(claim, place="Table 101")
    elsewhere = dataclasses.replace(never, paper="elmo", place="Table 102")
    claims = [claim, never, not_yet, elsewhere]
    write_report(tmp_path / "records", claims, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Not run: it needs 16 GPUs." in page
    assert "Table 100 <span" in page
    # What was not asked for is neither a claim of another paper nor one that could be run.
    assert "Table 101" not in page
    assert "Table 102" not in page
    assert "2 claims: " in page
    assert "not run 1" in page


def test_a_large_grid_is_several_charts(tmp_path):
    count = 2 * MOST_ROWS + 1
    cases = tuple(Observation(f"case {i}", "perplexity", float(i)) for i in range(count))
    claim = claim_of(
        lambda _: (Measurement("m", lambda: Found(cases)),),
        checks=(Check("one", "perplexity", "case 1", low=1, high=1),),
        curves=(),
    )
    shown = charts(claim, reproduce(claim, Options("small"), tmp_path))
    assert [len(chart.rows) for chart in shown] == [27, 27, 27]
    assert [row.name for chart in shown for row in chart.rows] == [case.case for case in cases]
    assert all(len(chart.rows) + len(chart.others) == count for chart in shown)
    assert shown[2].title.endswith(", part 3 of 3")


def test_a_record_names_what_computed_it(tmp_path, monkeypatch):
    """And not what reads it later, on another day or machine."""
    claim = claim_of(lambda _: (Measurement("one", lambda: Found(VALUES, (), 0.0)),))
    first = reproduce(claim, Options("small"), tmp_path, HERE)
    monkeypatch.setattr(run, "describe_machine", lambda: {"processor": "another"})
    again = reproduce(claim, Options("small"), tmp_path, HERE)
    assert (again.machine, again.date) == (first.machine, first.date)
    newer = {**versions.versions(), "torch": "9.9.9"}
    monkeypatch.setattr(run, "versions", lambda: newer)
    with pytest.raises(
        ValueError, match=r"has runs of own-small by torch .*, and this is torch 9.9"
    ):
        reproduce(claim, Options("small"), tmp_path, HERE)
    assert reproduce(claim, Options("small"), tmp_path / "new", HERE).versions == newer


VALUES = (
    Observation("master", "lost arithmetic", 0.0),
    Observation("nearest", "lost arithmetic", 1.0),
)

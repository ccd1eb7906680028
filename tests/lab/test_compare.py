"""The whole comparison: run directory, parallel workers, errors before any work."""

import dataclasses
import io
import json
import os
import re

import pytest
from rich.console import Console

from subulp.lab.compare import compare
from subulp.lab.engine import parallel
from subulp.lab.engine.progress import Lines
from subulp.lab.engine.run_directory import RunDirectory

FILES = {
    *("config.json", "metrics.jsonl", "summary.json", "report.html", "loss.png"),
    "descent_quality.png",
    "SHA256SUMS",
    "checkpoints",
    "models",
    ".lock",
}


def numbers(comparison):
    return (
        [dataclasses.replace(s, seconds_per_step=0.0) for s in comparison.summaries],
        [dataclasses.replace(r, seconds=0.0) for r in comparison.records],
    )


@pytest.fixture(scope="module")
def comparison(small, tmp_path_factory):
    config = small(seeds=(0, 1))
    return config, compare(config, out=tmp_path_factory.mktemp("run") / "out", jobs=1)


def test_the_run_directory_holds_everything(comparison):
    config, found = comparison
    assert {p.name for p in found.directory.iterdir()} == FILES
    saved = json.loads((found.directory / "config.json").read_text())
    assert saved["task"] == "lm"
    assert saved["precision"] == ["master", "nearest"]
    assert saved["steps"] == config.steps
    assert saved["device"] == "cpu"
    lines = (found.directory / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(found.records)
    first = json.loads(lines[0])
    assert {"precision", "seed", "step", "loss", "lr", "seconds"} <= set(first)
    summary = json.loads((found.directory / "summary.json").read_text())
    assert summary["data"] == found.data
    assert set(found.data) == {"name", "train", "validation", "vocabulary"}
    runs = summary["runs"]
    assert [(r["precision"], r["seed"]) for r in runs] == [
        ("master", 0),
        ("master", 1),
        ("nearest", 0),
        ("nearest", 1),
    ]
    for run in runs:
        assert set(run["peak_bytes"]) == {"weights", "gradients", "states", "activations", "total"}
    for plot in ("loss.png", "descent_quality.png"):
        assert (found.directory / plot).read_bytes().startswith(b"\x89PNG")


def test_workers_give_the_numbers_of_the_calling_process(comparison, tmp_path):
    config, sequential = comparison
    assert numbers(compare(config, out=tmp_path / "out", jobs=2)) == numbers(sequential)


def test_an_error_in_a_worker_reaches_the_caller(small, tmp_path):
    config = small(lr=1e30, steps=50, dtype="fp16", precision=("nearest", "master"))
    with pytest.raises(FloatingPointError, match=r"^precision=\w+, seed=0: .*NaN") as caught:
        compare(config, out=tmp_path / "out", jobs=2)
    assert "in a worker process" in caught.value.__notes__[0]


def test_a_run_that_diverged_is_still_reported(small, tmp_path):
    config = small(lr=1e30, nonfinite="propagate")
    found = compare(config, out=tmp_path / "out", jobs=1)
    saved = json.loads((found.directory / "summary.json").read_text())
    assert saved["runs"][0]["val_loss"] is None
    assert {p.name for p in found.directory.iterdir()} == FILES


def test_skipped_steps_are_counted(small, tmp_path):
    config = small(lr=1e30, nonfinite="skip")
    found = compare(config, out=tmp_path / "out", jobs=1)
    assert 0 < found.summaries[0].skipped_steps < config.steps


def test_a_dead_worker_is_reported(small, tmp_path, monkeypatch):
    config = small()
    monkeypatch.setattr(parallel, "_work", _die)
    with pytest.raises(ChildProcessError, match=r"trained precision=.*died with exit code 3"):
        compare(config, out=tmp_path / "out", jobs=2)


def _die(config, directory, pipe):
    pipe.recv()
    os._exit(3)


def test_one_job_per_core_and_no_more_than_runs():
    assert parallel.default_jobs(1) == 1
    assert 1 <= parallel.default_jobs(1000) <= os.cpu_count()


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"precision": ("nope",)}, {}, "precision='nope' is unknown"),
        ({"precision": ("kahan",), "dtype": "e4m3"}, {}, "precision='kahan' is not available"),
        ({"context": 5000}, {}, "too short for one context=5000"),
        ({}, {"jobs": 0}, "jobs=0 is out of range"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    small, tmp_path, changes, arguments, message
):
    with pytest.raises(ValueError, match=message):
        compare(small(**changes), out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(FileExistsError, match=r"out=.*file is a file: give a new folder"):
        RunDirectory.create("lm", path)


def test_a_folder_with_something_else_is_never_touched(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="is not empty and holds no run"):
            RunDirectory.create("lm", tmp_path, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").exists()


def test_an_earlier_run_is_replaced_only_on_request(comparison, small):
    _, found = comparison
    with pytest.raises(FileExistsError, match=r"holds an earlier run.*\(--overwrite\)"):
        RunDirectory.create("lm", found.directory)


def test_overwriting_leaves_what_the_run_did_not_write(small, tmp_path):
    with RunDirectory.create("lm", tmp_path / "out") as directory:
        directory.write_config(small(), device="cpu", jobs=1)
    (directory.path / "notes.txt").touch()
    RunDirectory.create("lm", tmp_path / "out", overwrite=True)
    assert {p.name for p in directory.path.iterdir()} == {".lock", "notes.txt"}


def test_overwriting_takes_links_to_folders_away(small, tmp_path):
    """Not what they lead to: it may be another disk."""
    with RunDirectory.create("lm", tmp_path / "out") as directory:
        directory.write_config(small(), device="cpu", jobs=1)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "step-5").touch()
    (directory.path / "checkpoints").symlink_to(tmp_path / "disk")
    RunDirectory.create("lm", tmp_path / "out", overwrite=True)
    assert {p.name for p in directory.path.iterdir()} == {".lock"}
    assert (tmp_path / "disk" / "step-5").exists()


def test_two_runs_in_the_same_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = RunDirectory.create("lm", None), RunDirectory.create("lm", None)
    assert a.path != b.path
    assert a.path.parent.name == "runs"


def test_what_it_will_take_is_told_before_it_begins_and_changes_nothing(
    small, tmp_path, monkeypatch, comparison
):
    config, found = comparison
    monkeypatch.setattr("subulp.lab.compare._WORTH_A_TRIAL", 1)
    plans = []

    def tell(plan):
        plans.append(plan)
        return Lines(plan, Console(file=io.StringIO()))

    again = compare(config, out=tmp_path / "out", jobs=1, reporter=tell)
    decided, note = plans[0].notes
    assert re.fullmatch(r"activations: fp32, because a model of width 16 is too .*", decided)
    assert re.fullmatch(
        r"expected: about [\d.]+ \w+, evaluations aside, and [\d.]+ \wiB of [\d.]+ \wiB for the "
        r"tensors of 1 run at a time",
        note,
    )
    assert numbers(again) == numbers(found)


def test_a_trial_that_diverges_is_no_error(small, tmp_path, monkeypatch):
    monkeypatch.setattr("subulp.lab.compare._WORTH_A_TRIAL", 1)
    with pytest.raises(FloatingPointError, match="precision=master, seed=0"):
        compare(
            small(lr=1e30, precision=("master",)),
            out=tmp_path / "out",
            jobs=1,
            reporter=lambda plan: Lines(plan, Console(file=io.StringIO())),
        )

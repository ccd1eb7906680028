"""TensorBoard's files hold what metrics.jsonl does, and nothing needs the package without --log."""

import dataclasses
import json
import math

import pytest

from subulp.lab.compare import compare, resume
from subulp.lab.engine import event_files
from subulp.lab.engine.event_files import EventFiles
from subulp.lab.engine.metrics import Record
from subulp.lab.engine.stopping import Interrupted
from tests.lab.engine.resuming import stopped_after

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder):
    """Of all files of a run together, by tag and step."""
    # TensorBoard would hide the first of two values of a step.
    events = accumulator.EventAccumulator(str(folder), {"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert len(set(steps)) == len(steps), f"{tag} has a step twice"
        found[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return found


def test_every_logged_step_is_there(small, tmp_path):
    found = compare(small(seeds=(0, 1)), out=tmp_path / "out", jobs=1, log="tensorboard")
    folders = sorted(path.name for path in (found.directory / "tensorboard").iterdir())
    assert folders == ["master-seed-0", "master-seed-1", "nearest-seed-0", "nearest-seed-1"]
    values = scalars(found.directory / "tensorboard" / "nearest-seed-1")
    own = [r for r in found.records if (r.name, r.seed) == ("nearest", 1)]
    assert values["training/loss"] == pytest.approx({r.step: r.loss for r in own})
    assert values["validation/perplexity"] == pytest.approx(
        {r.step: r.metrics["perplexity"] for r in own if r.metrics}
    )


def test_what_was_logged_before_replaces_what_is_there(tmp_path):
    record = Record("a/b", 0, 1, 2.0, 0.1, 0.1, {"val_loss": math.inf})
    first = EventFiles(tmp_path / "tensorboard", [record, dataclasses.replace(record, step=9)])
    first.close()
    second = EventFiles(tmp_path / "tensorboard", [record])
    second.add(dataclasses.replace(record, step=2, loss=math.nan))
    second.close()
    values = scalars(tmp_path / "tensorboard" / "a-b-seed-0")
    assert set(values["training/loss"]) == {1}
    assert set(values["training/lr"]) == {1, 2}
    assert not any(tag.startswith("validation") for tag in values)


def test_a_resumed_run_has_every_step_once(small, tmp_path, monkeypatch):
    """Stopped in the second of four runs."""
    config = small(seeds=(0, 1), steps=12, log_every=1, checkpoint_every=4)
    whole = compare(config, out=tmp_path / "whole", jobs=1, log="tensorboard")
    with monkeypatch.context() as patch:
        stopped_after(18, patch)
        with pytest.raises(Interrupted):
            compare(config, out=tmp_path / "out", jobs=1, log="tensorboard")
    before = scalars(tmp_path / "out" / "tensorboard" / "master-seed-1")
    assert set(before["training/loss"]) == set(range(1, 7))
    resume(tmp_path / "out", jobs=1)
    for folder in (whole.directory / "tensorboard").iterdir():
        expected, found = scalars(folder), scalars(tmp_path / "out" / "tensorboard" / folder.name)
        assert set(found["training/loss"]) == set(range(1, 13))
        for values in (expected, found):
            del values["training/seconds"]
        assert found == expected


def test_without_the_package_nothing_begins(small, tmp_path, monkeypatch):
    monkeypatch.setattr(event_files, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=r"needs the package .*: pip install tensorboard"):
        compare(small(), out=tmp_path / "out", log="tensorboard")
    assert not (tmp_path / "out").exists()


def test_without_the_option_there_are_no_files(small, tmp_path):
    found = compare(small(precision=("nearest",)), out=tmp_path / "out", jobs=1)
    assert not (found.directory / "tensorboard").exists()
    assert json.loads((found.directory / "config.json").read_text())["task"] == "lm"

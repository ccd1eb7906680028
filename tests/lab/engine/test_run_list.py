"""``subulp runs`` says of every run directory what it is and whether it can go on."""

import json

import pytest

from subulp.lab.cli import main
from subulp.lab.compare import compare
from subulp.lab.engine.lock import Lock
from subulp.lab.engine.run_list import list_runs
from subulp.lab.engine.stopping import Interrupted
from tests.lab.engine.resuming import stopped_after


@pytest.fixture
def folder(small, tmp_path, monkeypatch):
    compare(small(seeds=(0, 1)), out=tmp_path / "a", jobs=1)
    stopped_after(3, monkeypatch)
    with pytest.raises(Interrupted):
        compare(small(), out=tmp_path / "b", jobs=1)
    monkeypatch.undo()
    (tmp_path / "notes").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{")
    return tmp_path


def test_every_run_has_a_line(folder, capsys):
    assert main(["runs", str(folder), "--json"]) == 0
    whole, stopped, broken = json.loads(capsys.readouterr().out)["runs"]
    assert (whole["path"], whole["task"], whole["state"]) == ("a", "lm", "complete")
    runs = json.loads((folder / "a" / "summary.json").read_text())["runs"]
    mean = sum(r["val_loss"] for r in runs if r["precision"] == "nearest") / 2
    assert whole["metric"] == "val_loss"
    assert set(whole["quality"]) == {"master", "nearest"}
    assert whole["quality"]["nearest"] == pytest.approx(mean)
    assert (stopped["state"], stopped["step"]) == ("can be resumed", 3)
    assert (broken["path"], broken["state"]) == ("c", "damaged")
    assert main(["runs", str(folder)]) == 0
    text = capsys.readouterr().out
    for word in ("complete", "can be resumed, step 3", "damaged", "small.txt"):
        assert word in "".join(text.split("\n")) or word == "damaged"


def test_a_run_in_use_trains(folder):
    with Lock(folder / "b"):
        assert list_runs(folder)[1].state == "training"
    (one,) = list_runs(folder / "b")
    assert one.state == "can be resumed"


def test_a_changed_summary_is_damage(folder):
    path = folder / "a" / "summary.json"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 7'))
    assert list_runs(folder)[0].state == "damaged"
    assert "summary.json is damaged" in list_runs(folder)[0].problem


def test_an_empty_folder(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no runs\n"

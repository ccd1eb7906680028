"""Files that a user, or a foe, hands over: byte-order marks, loops, swapped and forged folders."""

import codecs
import gzip
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from subulp.lab.cli import main
from subulp.lab.compare import compare, resume
from subulp.lab.data.lines import TextLines, whole_lines
from subulp.lab.engine.checkpoint import MANIFEST, STATE
from subulp.lab.engine.sealed import fingerprint, sealed, sum_of
from subulp.lab.engine.stopping import Interrupted
from subulp.lab.engine.typed_files import parse_json, read_json
from subulp.lab.tasks.ctr.readers.dataset import ReadOptions
from subulp.lab.tasks.ctr.readers.load import load_data
from subulp.lab.tasks.lm.text import load_text
from subulp.lab.tasks.xmc.readers.load import read_xmc
from subulp.lab.tools.json_stream import JsonObjects
from tests.lab.engine.resuming import numbers, stopped_after
from tests.lab.tasks.ctr.readers.support import criteo_lines
from tests.lab.tasks.xmc.support import write_data

MARK = codecs.BOM_UTF8


def one_line(arguments, capsys, code=2):
    assert main([str(argument) for argument in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert "Errno" not in captured.err
    assert "Traceback" not in captured.err
    return captured.err


# --------------------------------------------------------------------------- byte-order marks


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("text", ["one\ntwo\n", "one", "", "größe\r\n\r\n", "\n"])
def test_lines_do_without_a_mark(tmp_path, name, text):
    found = []
    for mark in (b"", MARK):
        raw = mark + text.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        lines = TextLines(path)
        read = [lines.read([i])[0] for i in range(len(lines))]
        found.append((list(whole_lines(path)), list(lines), read, lines.digest))
    assert found[0] == found[1]


def test_a_text_with_a_mark(tmp_path):
    texts = []
    for mark in (b"", MARK):
        (tmp_path / "t.txt").write_bytes(mark + b"to be or not to be")
        texts.append(load_text(tmp_path / "t.txt"))
    assert texts[0].characters == texts[1].characters
    assert texts[0].train.tolist() == texts[1].train.tolist()
    # As bytes it is what it is.
    assert load_text(tmp_path / "t.txt", "byte").train[:3].tolist() == list(MARK)


def test_data_sets_with_marks(tmp_path):
    for folder, mark in ((tmp_path / "plain", b""), (tmp_path / "marked", MARK)):
        folder.mkdir()
        write_data(folder)
        (folder / "clicks").write_text("\n".join(criteo_lines(40)) + "\n")
        for path in folder.iterdir():
            path.write_bytes(mark + path.read_bytes())
    plain, marked = (read_xmc(tmp_path / name) for name in ("plain", "marked"))
    assert plain.train.source.digest == marked.train.source.digest
    assert np.array_equal(plain.test.labels.indices, marked.test.labels.indices)
    clicks = [
        load_data(f"criteo:{tmp_path / name / 'clicks'}", ReadOptions(), rows=(9,))
        for name in ("plain", "marked")
    ]
    assert clicks[0].digest == clicks[1].digest


def test_options_and_json_with_marks(tmp_path, capsys):
    (tmp_path / "run.toml").write_bytes(MARK + b"steps = 0\n")
    told = one_line(["train", "lm", "--config", tmp_path / "run.toml"], capsys)
    assert f"{tmp_path / 'run.toml'}:1: steps=0 is out of range" in told
    (tmp_path / "config.json").write_bytes(MARK + b'{"task": "lm"}')
    assert read_json(tmp_path / "config.json") == {"task": "lm"}
    assert parse_json(MARK + b"{}", tmp_path) == {}
    (tmp_path / "dblp.json").write_bytes(MARK + b'[{"id": 1}]')
    assert list(JsonObjects(tmp_path / "dblp.json")) == [{"id": 1}]


# ------------------------------------------------------------------- what the system says


def test_loops_long_names_and_folders_that_cannot_be_written(tmp_path, small, capsys):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    long = tmp_path / ("x" * 300)
    for path in (loop, long, tmp_path / ("y/" * 2500)):
        for arguments in (
            ["train", "lm", "--data", path],
            ["train", "xmc", "--data", path],
            ["train", "ctr", "--data", f"criteo:{path}"],
            ["train", "image", "--data", f"cifar10:{path}"],
            ["train", "lm", "--config", path],
            ["train", "--resume", path],
            ["report", path],
            ["runs", path],
            ["sample", path, "--prompt", "a"],
            ["evaluate", path],
            ["predict", path, path],
            ["data", "dblp", path, "--out", tmp_path / "out"],
        ):
            assert one_line(arguments, capsys).startswith("error: ")


def test_sentences_for_what_the_system_refuses(tmp_path, small, capsys, monkeypatch):
    run = compare(small(precision=("nearest",)), out=tmp_path / "run", jobs=1).directory

    def refuse(self, target):
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    told = one_line(["report", run], capsys)
    assert told == f"error: {run / 'report.html'}: permission denied\n"


@pytest.mark.parametrize("library", ["/etc/passwd", "/nowhere", "/tmp", "libm.so.6"])
def test_kernels_from_elsewhere_are_one_line(library, text_file, tmp_path):
    """In a process of its own: kernels are loaded once."""
    command = [sys.executable, "-m", "subulp", "train", "lm", "--data", str(text_file)]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "SUBULP_LIBRARY": library}
    run = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: SUBULP_LIBRARY={library}: The C++ kernels ")
    assert run.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------- reports never destroy a run


@pytest.fixture
def finished(small, tmp_path):
    return compare(small(precision=("nearest",)), out=tmp_path / "run", jobs=1).directory


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_report_replaces_reports_alone(finished, tmp_path, capsys):
    before = contents(finished)
    others = [p for p in before if p.name not in ("report.html", ".lock")]
    assert len(others) > 8
    for path in others:
        told = one_line(["report", finished, "--out", path], capsys)
        assert f"out={path} is a file of the run {finished}, which would be lost" in told
    assert contents(finished) == before
    mine = tmp_path / "thesis.txt"
    mine.write_text("mine")
    assert "exists and is no report" in one_line(["report", finished, "--out", mine], capsys)
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe" in one_line(["report", finished, "--out", tmp_path / "pipe"], capsys)
    assert "is a device" in one_line(["report", finished, "--out", "/dev/null"], capsys)
    assert "is a folder" in one_line(["report", finished, "--out", tmp_path], capsys)
    for path in (tmp_path / "new.html", tmp_path / "new.html", finished / "report.html"):
        assert main(["report", str(finished), "--out", str(path)]) == 0


def test_predictions_replace_no_file_of_a_run(finished, tmp_path, capsys):
    (tmp_path / "texts").write_text("a\n")
    told = one_line(
        ["predict", finished, tmp_path / "texts", "--out", finished / "config.json"], capsys
    )
    assert "which would be lost" in told


# ------------------------------------------------------------------- results that were changed


def test_a_changed_result_does_not_survive_a_resume(finished, capsys):
    path = finished / "checkpoints" / "nearest-seed-0" / "finished.json"
    whole = path.read_text()
    fields = json.loads(whole)
    fields["summary"]["metrics"]["val_loss"] = 0.5
    for text in (json.dumps(fields), whole.replace('"sha256"', '"sha257"')):
        path.write_text(text)
        told = one_line(["train", "--resume", finished], capsys)
        assert "finished.json is damaged" in told
        assert "remove it, and the run is resumed" in told


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "SHA256SUMS"])
def test_every_flipped_byte_of_what_a_run_found_is_noticed(finished, name, tmp_path, capsys):
    path = finished / name
    raw = path.read_bytes()
    for place in range(0, len(raw), max(1, len(raw) // 9)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        for arguments in (["train", "--resume", finished], ["report", finished]):
            assert "damaged" in one_line(arguments, capsys)
    path.write_bytes(raw)
    assert main(["report", str(finished)]) == 0


def test_the_sums_are_those_of_the_usual_tool(finished):
    import hashlib  # noqa: PLC0415

    lines = (finished / "SHA256SUMS").read_text().splitlines()
    for line in lines:
        total, name = line.split("  ")
        assert hashlib.sha256((finished / name).read_bytes()).hexdigest() == total
    assert len(lines) == 2


def test_results_of_another_run_are_refused(small, tmp_path, capsys):
    run = compare(small(), out=tmp_path / "run", jobs=1).directory
    first, second = (
        run / "checkpoints" / f"{n}-seed-0" / "finished.json" for n in ("master", "nearest")
    )
    shutil.copy(first, second)
    told = one_line(["train", "--resume", run], capsys)
    assert "has variant=master, and this run has variant=nearest: it belongs to another run" in told


# ------------------------------------------------------------- checkpoints, swapped and forged


@pytest.fixture
def stopped(small, tmp_path, monkeypatch):
    stopped_after(4, monkeypatch)
    config = small(precision=("nearest",), steps=8, checkpoint_every=2, log_every=1)
    with pytest.raises(Interrupted):
        compare(config, out=tmp_path / "run", jobs=1)
    monkeypatch.undo()
    folder = tmp_path / "run" / "checkpoints" / "nearest-seed-0"
    assert len(list(folder.iterdir())) >= 2
    return tmp_path / "run", sorted(folder.iterdir())


def test_swapped_folders_are_named_and_swapped_back_they_go_on(stopped, small, tmp_path, capsys):
    run, (*_, first, second) = stopped
    aside = first.with_name("aside")

    def swap():
        first.rename(aside)
        second.rename(first)
        aside.rename(second)

    swap()
    step = int(first.name.removeprefix("step-"))
    told = one_line(["train", "--resume", run], capsys)
    assert f"{second} holds the checkpoint of step {step}: it was renamed" in told
    swap()
    config = small(precision=("nearest",), steps=8, checkpoint_every=2, log_every=1)
    whole = compare(config, out=tmp_path / "whole", jobs=1)
    assert numbers(resume(run, jobs=1)) == numbers(whole)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "null", "NaN", '{"a": NaN}', "[" * 9000, '{"a":' * 9000, "", "\0", "1e999", '"x"'],
)
def test_forged_manifests_are_one_line(stopped, text, capsys):
    run, paths = stopped
    for path in paths:
        (path / MANIFEST).write_text(text)
    told = one_line(["train", "--resume", run], capsys)
    assert "no checkpoint in" in told
    assert "is damaged" in told


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": True},
        {"step": 10**30},
        {"seed": 1e3},
        {"config": {"a": [[[[]]]]}},
        {"files": []},
        {"files": {"state.json": {"size": -1, "sha256": ""}}},
        {"version": 10**9},
        {"task": None},
    ],
    ids=str,
)
def test_manifests_with_the_right_sum_and_wrong_contents(stopped, change, capsys):
    run, paths = stopped
    for path in paths:
        fields = {**json.loads((path / MANIFEST).read_text()), **change}
        del fields["sha256"]
        (path / MANIFEST).write_text(json.dumps({**fields, "sha256": sum_of(fields)}))
    assert one_line(["train", "--resume", run], capsys)


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        None,
        {"tally": {}},
        {"tally": {"records": [{}]}},
        {"tally": {"records": [{"precision": "nearest", "seed": 0, "step": "x", "loss": 1}]}},
        {"tally": {"records": []}},
        {"tally": {"records": []}, "model": {"$": ["tensor", "none"]}},
        {"tally": {"records": []}, "model": 1, "optimizer": 2},
    ],
    ids=str,
)
def test_states_with_the_right_sum_and_wrong_contents(stopped, state, capsys):
    run, paths = stopped
    for path in paths:
        (path / STATE).write_text(json.dumps(state))
        fields = json.loads((path / MANIFEST).read_text())
        del fields["sha256"]
        fields["files"][STATE] = fingerprint(path / STATE)
        (path / MANIFEST).write_text(sealed(fields))
    assert main(["train", "--resume", str(run), "--jobs=1"]) in (1, 2)
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("batch_size", -1), ("threads", 10**9), ("steps", 0), ("width", 10**12), ("seeds", [])),
        *(("precision", ["bf17"]), ("eval_every", 0), ("dropout", 2.0)),
    ],
)
def test_a_forged_configuration_is_one_line(stopped, name, value, capsys):
    run, _ = stopped
    path = run / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert one_line(["train", "--resume", run], capsys)


# ---------------------------------------------------------------- one file in two parts


def test_the_same_file_to_train_and_to_test(tmp_path, capsys):
    write_data(tmp_path)
    for name in ("X", "X_Y"):
        (tmp_path / f"tst_{name}.txt").unlink()
        (tmp_path / f"tst_{name}.txt").symlink_to(tmp_path / f"trn_{name}.txt")
    told = one_line(["train", "xmc", "--data", tmp_path, "--batch-size", "8"], capsys)
    assert "has the same instances in its training part and its test part" in told
    clicks, link, copy = (tmp_path / name for name in ("clicks", "link", "copy"))
    clicks.write_text("\n".join(criteo_lines(40)) + "\n")
    link.symlink_to(clicks)
    shutil.copy(clicks, copy)
    for other, message in ((link, "are the same file"), (copy, "the same examples in its")):
        command = ["train", "ctr", "--batch-size", "4", "--data"]
        assert message in one_line([*command, f"criteo:{clicks},{other}"], capsys)
        assert message in one_line([*command, f"criteo:{clicks}", "--test", other], capsys)

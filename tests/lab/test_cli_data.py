"""``subulp data``: what it prints where, and its exit codes."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from subulp.lab.cli import main
from subulp.lab.engine.progress import reading


@pytest.fixture
def papers(tmp_path):
    path = tmp_path / "dblp.json"
    records = [
        {
            "id": str(n),
            "title": f"Title {n}",
            "abstract": "About it.",
            "keywords": ["K", f"k{n % 3}"],
        }
        for n in range(40)
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]")
    return path


def test_dblp_writes_a_data_set(papers, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["data", "dblp", str(papers), "--out", str(out), "--test-share", "0.25"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("40 papers read: ")
    assert "4 labels, 2.00 labels a paper" in captured.out
    assert captured.err == f"dblp.json: 100 % read\nwrote {out}\n"
    assert sorted(p.name for p in out.iterdir()) == [
        *("Y.txt", "trn_X.txt", "trn_X_Y.txt", "tst_X.txt", "tst_X_Y.txt")
    ]
    assert (out / "Y.txt").read_text() == "k\nk0\nk1\nk2\n"


def test_options_reach_the_builder(papers, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--min-count", "8", "--keep-case"]
    assert main(["data", "dblp", str(papers), "--out", str(out), *options]) == 0
    assert (out / "Y.txt").read_text().split()[0] == "K"
    assert "min" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "--out", "out"], "error: missing.json is not a file: give the JSON file"),
        (["dblp.json", "--out", "."], "error: out=. exists: give another folder, or remove it"),
        (
            ["dblp.json", "--out", "out", "--test-share", "2"],
            "error: test_share=2.0 is out of range",
        ),
        (["dblp.json", "--out", "out", "--min-count", "99"], "none is left for the training part"),
        (
            ["broken.json", "--out", "out"],
            "error: broken.json:1: expected a JSON object, at byte 0",
        ),
        (["dblp.json"], "--out"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    papers, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("no JSON")
    assert main(["data", "dblp", *arguments]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert captured.out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.json", "dblp.json"]


def test_help_names_every_option_and_needs_no_torch():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "subulp", "data", "dblp", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for option in ("FILE", "--out", "--test-share", "--min-count", "--keep-case"):
        assert option in result.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert not {"torch", "numpy", "sqlite3"} & imported


def test_progress_on_a_terminal_is_a_bar(papers):
    console = Console(force_terminal=True, width=100, record=True)
    with reading(papers, console) as on_read:
        on_read(papers.stat().st_size)
    shown = console.export_text()
    assert "dblp.json" in shown
    assert "kB" in shown

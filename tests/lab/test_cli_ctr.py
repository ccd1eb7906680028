"""`subulp train ctr` through the real ``main``: output, and bad input as one line."""

import json

import pytest

from subulp.lab.cli import main
from tests.lab.tasks.ctr.readers.support import criteo_lines, write_lines

SMALL = [
    *("--rows=2000", "--dim=4", "--bottom=8", "--top=8", "--batch-size=32", "--device=cpu"),
    *("--evaluations=1", "--jobs=1"),
]


@pytest.fixture
def clicks(tmp_path):
    return write_lines(tmp_path / "clicks.txt", criteo_lines(200))


def test_json_has_a_run_for_every_combination(clicks, tmp_path, capsys):
    out = tmp_path / "out"
    grid = ["--precision", "fp32,int4", "--rounding", "nearest", "--cache-fraction", "0,0.05"]
    arguments = ["train", "ctr", f"--data=criteo:{clicks}", *SMALL, *grid, "--json"]
    assert main([*arguments, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert printed == json.loads((out / "summary.json").read_text())
    assert [(r["precision"], r["cache_fraction"]) for r in printed["runs"]] == [
        ("fp32", 0.0),
        ("int4", 0.0),
        ("int4", 0.05),
    ]
    assert "171 train, 29 test, 13 numbers, 26 tables, 52,000 rows" in captured.err
    assert "int4 nearest lfu 5%: step 5/5" in captured.err


def test_skipped_lines_are_counted_at_the_end(clicks, tmp_path, capsys):
    with clicks.open("a") as file:
        file.write("1\t2\n")
    arguments = ["train", "ctr", f"--data=criteo:{clicks}", *SMALL, "--precision=fp32"]
    arguments += ["--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"error: {clicks}:201: 2 fields: expected 40" in error
    assert "Traceback" not in error
    assert main([*arguments, "--on-bad-line", "skip"]) == 0
    captured = capsys.readouterr()
    assert f"skipped 1 unreadable line; the first: {clicks}:201: 2" in captured.err
    assert "normalised" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "fp32,int3"], "precision='int3' is unknown"),
        (["--cache-fraction", "0,x"], "cache_fraction=0,x is not a list of numbers"),
        (["--ways", "3"], "ways=3 is not a power of two"),
        (["--data", "criteo:nothing"], "nothing does not exist: give the path of a file"),
        (["--data", "csv:nothing"], "nothing does not exist"),
        (["--data", "kaggle"], "data=kaggle is unknown: give adult:DIR, criteo:FILE"),
        (["--data", "adult:nowhere"], "nowhere has neither adult.data"),
        (["--preset", "criteo-kaggle"], "preset=criteo-kaggle and data=adult contradict"),
        (["--rows", "10"], "rows=10 and data=adult contradict"),
        (["--columns", "a.toml"], "columns=a.toml and data=adult contradict"),
        (["--batch-size", "20000"], "batch_size=20000 is above half of the 32561 training"),
    ],
)
def test_bad_options_are_one_line(arguments, message, tmp_path, capsys):
    assert main(["train", "ctr", *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error

"""The real ``main``: exit codes, messages, and what goes to which stream."""

import contextlib
import json
import os
import shlex
import subprocess
import sys

import pytest

from subulp.lab import cli
from subulp.lab.cli import main

SMALL = [
    *("--steps=4", "--batch-size=2", "--context=8", "--width=16", "--layers=1", "--heads=2"),
    *("--eval-every=2", "--watch-every=2", "--device=cpu", "--jobs=1"),
]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "small.txt"
    path.write_text("to be, or not to be: that is the question\n" * 50)
    return path


def test_json_is_one_object_and_the_only_output(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--precision", "master,collage-plus", "--seeds", "0,1", "--json"]
    code = main(["train", "lm", *SMALL, *arguments, "--data", str(text_file), "--out", str(out)])
    captured = capsys.readouterr()
    assert code == 0
    printed = json.loads(captured.out)
    assert printed == json.loads((out / "summary.json").read_text())
    assert printed["task"] == "lm"
    assert len(printed["runs"]) == 4
    assert set(printed["runs"][0]) == {
        "precision",
        "activations",
        "seed",
        "val_loss",
        "perplexity",
        "train_loss",
        "bytes_per_parameter",
        "peak_bytes",
        "category_peak_bytes",
        "seconds_per_step",
        "effective_descent_quality",
        "descent_share",
        "lost_arithmetic",
        "steps",
        "skipped_steps",
        "rollbacks",
        "parameters",
        "simulated",
    }
    assert "master, seed 1: step 4/4" in captured.err
    assert f"wrote {out}" in captured.err


def test_without_json_a_table_is_printed(text_file, tmp_path, capsys):
    arguments = ["--precision", "nearest", "--data", str(text_file), "--out", str(tmp_path / "o")]
    assert main(["train", "lm", *SMALL, *arguments]) == 0
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "lm", "--precision", "bf17"], "error: precision='bf17' is unknown: use one of"),
        (["train", "lm", "--precision", "a,,b"], "error: precision is empty, or has an empty"),
        (["train", "lm", "--seeds", "1,x"], "seeds=1,x is not a list of integers"),
        (
            ["train", "lm", "--steps", "0"],
            "error: steps=0 is out of range: give from 2 to",
        ),
        (["train", "lm", "--steps", str(10**30)], "is out of range: give from 2 to 1000000000"),
        (["train", "lm", "--threads", "1000000000"], "threads=1000000000 is out of range: give"),
        (["train", "ctr", "--steps", "5", "--epochs", "2"], "steps=5 and epochs=2 contradict each"),
        (["train", "lm", "--steps", "many"], 'unable to convert "many" into int'),
        (["train", "lm", "--steps", "4.6"], '"4.6" for "--steps": it is no whole number'),
        (["train", "lm", "--steps", "1e999"], '"1e999" for "--steps": it is no whole number'),
        (["train", "lm", "--threads", "1.5"], '"1.5" for "--threads": it is no whole number'),
        (["train", "--resume", "x", "--jobs", "1.5"], '"1.5" for "--jobs": it is no whole'),
        (["predict", "a", "b", "--k", "2.7"], '"2.7" for "--k": it is no whole number'),
        (["sample", "a", "--length", "2.0"], '"2.0" for "--length": it is no whole number'),
        (["train", "lm", "--precision", "extra-bits-08"], "precision='extra-bits-08' is unknown"),
        (["train", "ctr", "--test-share", "0.3"], "test_share=0.3 has no effect on data=adult"),
        (
            ["train", "lm", "--lr", "1e39"],
            "lr=1e+39 is out of range: give at least 0, and a number",
        ),
        (["train", "lm", "--stepz", "1"], "Unknown option: --stepz"),
        (["train", "lm", "--dtype", "int4"], 'Choose from: "bf16", "fp16", "e4m3"'),
        (["train", "lm", "--data", "missing.txt"], "/missing.txt does not exist"),
        (["train", "--jobs", "3"], "jobs=3 and no task: name one, or give --resume RUN"),
        (["train", "--json"], "json=True and no task: name one, or give --resume RUN"),
        (["train", "cnn"], 'Unknown command "cnn"'),
        (["train", "lm", "extra"], "['extra']. These words belong to no option: give options as"),
        (["train", "--lr", "3"], "Unknown option: --lr"),
        (["train", "lm", "--overwrite"], "overwrite=True has no effect without out: name the run"),
        (["train", "--resume", "run", "--lr", "3"], "takes only --jobs, --ranks, --parallel"),
        (["train", "lm", "--resume", "run"], "subulp train --resume RUN, without a task"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert captured.out == ""


def test_brackets_and_colons_in_paths_are_printed_as_they_are(text_file, tmp_path, capsys):
    """Rich would take some for the markup of its own, and fail after the training."""
    # With the slash they are closing tags.
    out, data = tmp_path / "a[bold]b[" / "b] :smile:", tmp_path / "t[" / "x].txt"
    for path in (out, data):
        path.parent.mkdir()
    data.write_text(text_file.read_text())
    arguments = ["--precision", "nearest", "--data", str(data), "--out", str(out)]
    assert main(["train", "lm", *SMALL, *arguments]) == 0
    captured = capsys.readouterr()
    assert f"wrote {out}" in captured.err
    assert data.name in captured.err
    assert main(["train", "--resume", str(out)]) == 0
    assert f"{out} is complete" in capsys.readouterr().err
    assert main(["report", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().err
    assert main(["runs", str(out.parent)]) == 0
    assert out.name in "".join(capsys.readouterr().out.split("\n"))


def test_a_full_disk_is_a_failure_and_says_how_to_go_on(text_file, tmp_path):
    """Also where figures and summaries are written, after the last checkpoint."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "subulp", "train", "lm", *SMALL, "--precision", "nearest"]
    command += ["--data", str(text_file), "--out", str(out)]
    limited = f"ulimit -f 100; exec {shlex.join(command)}"
    found = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    (line,) = [each for each in found.stderr.splitlines() if each.startswith("error: ")]
    assert "cannot be written: File too large" in line
    assert f"make room there, and continue with subulp train --resume {out}" in line
    assert main(["train", "--resume", str(out)]) == 0


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "xmc", "--help"], ["--version"], ["reproduce"]]
)
def test_a_full_standard_output_is_a_failure(words, tmp_path):
    command = [sys.executable, "-m", "subulp", *words]
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
        )
    assert found.returncode == 1
    assert found.stderr == "error: no space left on device\n"


@pytest.mark.parametrize("into", ["2>/dev/full", "2> >(head -1)", "2>&-", ">&-", "| true"])
def test_a_training_that_nobody_reads_goes_on(into, text_file, tmp_path):
    """A log's disk may be full, a terminal closed, or the reader of a pipe gone."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "subulp", "train", "lm", *SMALL, "--precision", "nearest"]
    command += ["--data", str(text_file), "--out", str(out)]
    script = f"set -o pipefail; {shlex.join(command)} {into}"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    assert (out / "summary.json").exists()
    if into in (">&-", "| true"):
        assert f"wrote {out}" in found.stderr


def test_bars_move_in_a_terminal(text_file, tmp_path):
    """Rich redirects standard error to the console meanwhile, which writes to standard error."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "subulp", "train", "lm", *SMALL, "--precision", "nearest"]
    command += ["--data", str(text_file), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        # The last reader's error is how a terminal says that nobody writes any more.
        with contextlib.suppress(OSError):
            while more := os.read(ours, 1 << 16):
                shown += more
        assert process.wait(timeout=120) == 0
    os.close(ours)
    text = shown.decode()
    assert "\x1b[?25l" in text, "no cursor was hidden: these were lines"
    assert "loss" in text
    assert "wrote" in text


@pytest.mark.parametrize("into", ["| true", ">&-"])
def test_results_that_nobody_reads(into, text_file, tmp_path):
    out = tmp_path / "out"
    small = [*SMALL, "--precision", "nearest", "--data", str(text_file), "--out", str(out)]
    assert main(["train", "lm", *small]) == 0
    for words in (
        ["evaluate", str(out)],
        ["evaluate", str(out), "--json"],
        ["runs", str(tmp_path), "--json"],
        ["sample", str(out), "--prompt", "a"],
        ["doctor"],
        ["doctor", "--json"],
        ["--help"],
        ["train", "xmc", "--help"],
        ["--version"],
    ):
        command = shlex.join([sys.executable, "-m", "subulp", *words])
        script = f"set -o pipefail; {command} {into}"
        found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        assert (found.returncode, found.stderr) == (0, ""), words


def test_verbose_shows_the_traceback_before_the_same_line(capsys):
    assert main(["-v", "train", "lm", "--steps", "0"]) == 2
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert line.startswith("error: steps=0 is out of range")


def test_ctrl_c_is_exit_code_130(monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("subulp.lab.compare.compare", interrupted)
    assert main(["train", "lm"]) == cli.INTERRUPTED == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_diverged_run_is_an_error_without_a_traceback(text_file, tmp_path, capsys):
    arguments = ["--lr", "1e30", "--data", str(text_file), "--out", str(tmp_path / "out")]
    assert main(["train", "lm", *SMALL, "--precision", "master", *arguments]) == 1
    assert "NaN or infinite values" in capsys.readouterr().err


def test_help_names_every_option_and_needs_no_torch(tmp_path):
    # With -X importtime, every import would be listed on the standard error.
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "subulp", "train", "lm", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for option in (
        "--precision",
        "--seeds",
        "--beta2",
        "--out",
        "--json",
        "--jobs",
        "--watch-every",
    ):
        assert option in result.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert not {"torch", "matplotlib", "numpy"} & imported


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("task", ["lm", "xmc"])
def test_an_imported_pydantic_leaves_defaults_alone(task, capsys):
    import pydantic  # noqa: F401, PLC0415 - a dependency of a dependency, which others import

    assert main(["train", task, "--data", "missing"]) == 2
    assert "/missing " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["reproduce", "list"], ["doctor"]])
def test_a_terminal_that_knows_fewer_characters(words):
    """Greek letters become escapes, and no error."""
    found = subprocess.run(
        [sys.executable, "-m", "subulp", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.isascii()

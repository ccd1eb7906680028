"""What every command has: help that teaches, one line for wrong input, a traceback on request."""

import json
import os
import re
import subprocess
import sys

import pytest

from subulp.lab.cli import app, main

TRAIN = [("train", task) for task in ("lm", "image", "xmc", "ctr")]
USES = [("predict",), ("sample",), ("evaluate",)]
COMMANDS = [*TRAIN, ("data", "dblp"), *USES, ("report",), ("reproduce",), ("runs",), ("doctor",)]


def named(command):
    return " ".join(command)


def commands_of(group, path=()):
    """Every command that does something."""
    for name in group:
        if name.startswith("-"):
            continue
        below = list(commands_of(group[name], (*path, name)))
        yield from below or [(*path, name)]


def test_all_commands_are_here():
    assert sorted(commands_of(app)) == sorted(COMMANDS)


@pytest.fixture(scope="module")
def help_of():
    texts = {}

    def text(command):
        if command not in texts:
            arguments = [sys.executable, "-m", "subulp", *command, "--help"]
            # Wide enough that no text wraps.
            wide = {**os.environ, "COLUMNS": "400"}
            run = subprocess.run(arguments, capture_output=True, text=True, check=True, env=wide)
            assert run.stderr == ""
            texts[command] = run.stdout
        return texts[command]

    return text


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_help_explains_every_option(help_of, command):
    text = help_of(command)
    # A star marks what is required, capitals what needs no name.
    options = re.findall(r"^│ [* ]*((?:[A-Z]+ )?--.*?)│$", text, re.MULTILINE)
    assert options
    for option in options:
        assert re.search(r"[a-z]  +\S|[A-Z.]  +\S", option), f"{option} has no text"
    if command != ("doctor",):
        assert f"subulp {named(command)} " in text.split("\n", 1)[1], "an example"


@pytest.mark.parametrize("command", TRAIN, ids=named)
def test_options_are_in_groups_with_defaults(help_of, command):
    text = help_of(command)
    groups = ["Options from a file", "What is compared", "Model", "Optimizer", "Measurements"]
    groups += ["Checkpoints", "Machine", "Output"]
    places = [text.index(f"─ {group} ─") for group in groups]
    assert places == sorted(places)
    assert text.count("[default: ") > 10


def test_the_help_of_all_names_the_exit_codes(help_of):
    text = " ".join(help_of(()).split())
    for code in ("0, done", "1, a run diverged or a check failed", "2, wrong input", "130, Ctrl-C"):
        assert code in text


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_an_unknown_option_is_one_line(command, capsys):
    assert main([*command, "--no-such-option", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


WRONG = {
    ("train", "lm"): ["--data", "nowhere"],
    ("train", "image"): ["--data", "cifar10:nowhere"],
    ("train", "xmc"): ["--data", "nowhere"],
    ("train", "ctr"): ["--data", "criteo:nowhere"],
    ("data", "dblp"): ["nowhere", "--out", "out"],
    ("predict",): ["nowhere", "nothing"],
    ("sample",): ["nowhere", "--prompt", "a"],
    ("evaluate",): ["nowhere"],
    ("runs",): ["nowhere"],
    ("report",): ["nowhere"],
}


@pytest.mark.parametrize("command", WRONG, ids=named)
def test_a_missing_file_is_one_line_and_with_v_a_traceback(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [*command, *WRONG[command]]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nowhere" in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
    assert main(["-v", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):")
    assert told.endswith(f"\n{captured.err}")


def test_doctor_prints_json(capsys):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"versions", "processor", "gpu", "operations"}
    assert {operation["device"] for operation in found["operations"]} >= {"cpu"}
    checks = [operation["check"] for operation in found["operations"]]
    assert code == int(any(check["error"] for check in checks))


def test_a_data_set_is_counted_in_json(tmp_path, capsys):
    papers = [
        {"id": str(n), "title": f"T {n}", "abstract": "A.", "keywords": ["k"]} for n in range(20)
    ]
    (tmp_path / "dblp.json").write_text(json.dumps(papers))
    options = [str(tmp_path / "dblp.json"), "--out", str(tmp_path / "out"), "--json"]
    assert main(["data", "dblp", *options]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["read"] == counts["train"] + counts["test"] == 20
    assert counts["labels"] == 1

"""Options from TOML and from earlier runs: what wins, and what a wrong file is told."""

import json
from pathlib import Path
from typing import Literal, Optional

import pytest

from subulp.lab.cli import main
from subulp.lab.engine.config_file import Option, read_config
from subulp.lab.engine.run_directory import RunDirectory

OPTIONS = (
    Option(("seed", "seeds"), tuple[int, ...]),
    Option(("precision",), tuple[str, ...]),
    Option(("cache-fraction",), tuple[float, ...]),
    Option(("steps",), int),
    Option(("batch-size",), int),
    Option(("lr",), float),
    Option(("loss-scale",), float | None),
    Option(("tie-head",), bool),
    Option(("data",), Path | None),
    Option(("nonfinite",), Optional[Literal["raise", "skip"]]),  # noqa: UP045 - as cyclopts has it
)


def read(tmp_path, text, name="run.toml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config(path, "lm", OPTIONS)


def test_values_of_all_types(tmp_path):
    text = """
    seeds = [0, 1]
    precision = "master"
    cache_fraction = [0, 0.5]
    batch-size = 3  # A comment.
    lr = 1
    loss-scale = 2.5
    "tie_head" = true
    data = "a.txt"
    nonfinite = "skip"
    """
    assert read(tmp_path, text) == {
        "seed": [0, 1],
        "precision": "master",
        "cache-fraction": [0, 0.5],
        "batch-size": 3,
        "lr": 1,
        "loss-scale": 2.5,
        "tie-head": True,
        "data": "a.txt",
        "nonfinite": "skip",
    }


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("stepz = 1", 1, "unknown key stepz: did you mean steps?"),
        ("steps = 1\n\nbatch_sise = 1", 3, "unknown key batch_sise: did you mean batch-size?"),
        ("no-tie-head = true", 1, "unknown key no-tie-head: did you mean tie-head?"),
        ("wibble = 1", 1, "unknown key wibble: `subulp train lm --help` names all"),
        ("config = 'a'", 1, "unknown key config: "),
        ("\n[model]\nsteps = 1", 2, "unknown key model"),
        ("[steps]\nmany = 1", 1, 'expected steps to be a valid integer, got {"many": 1}'),
        ("steps.many = 1", 1, 'expected steps to be a valid integer, got {"many": 1}'),
        ("steps = 'many'", 1, 'expected steps to be a valid integer, got "many"'),
        ("steps = '1'", 1, 'expected steps to be a valid integer, got "1"'),
        ("steps = 1.5", 1, "expected steps to be a valid integer, got 1.5"),
        ("steps = true", 1, "expected steps to be a valid integer, got true"),
        ("steps = [1]", 1, "expected steps to be a valid integer, got [1]"),
        ("lr = true", 1, "expected lr to be a valid number, got true"),
        ("tie_head = 1", 1, "expected tie_head to be a valid boolean, got 1"),
        ("data = 1", 1, "expected data to be a valid string, got 1"),
        ("data = 1979-05-27", 1, "got the date 1979-05-27"),
        ("nonfinite = 'stop'", 1, "expected nonfinite to be 'raise' or 'skip', got"),
        ("seeds = []", 1, "expected seeds to have at least one value, got []"),
        ("seeds = [0, 'a']", 1, 'expected seeds[1] to be a valid integer, got "a"'),
        ("seed = 1\nseeds = 2", 2, "seeds sets seed a second time: give it once"),
        ("batch_size = 1\nbatch-size = 1", 2, "sets batch-size a second time"),
        ("steps = 1\nsteps = 2", 2, "expected TOML: Cannot overwrite a value"),
        ("steps = \n", 1, "expected TOML: Invalid value (at line 1, column 9)"),
        ("a = 1\nb = '", 2, "expected TOML: "),
        (b"\nsteps = '\xff'", 2, "expected TOML in UTF-8"),
        ("a = " + "[" * 100_000, 1, "expected TOML"),
        ("#" * (2**20 + 1), None, "above 1,048,576 bytes"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_wrong_files(tmp_path, text, line, message):
    with pytest.raises(ValueError, match="run") as caught:
        read(tmp_path, text)
    where = f"{tmp_path / 'run.toml'}:" + (f"{line}: " if line else "")
    assert str(caught.value).startswith(where)
    assert message in str(caught.value)


def test_there_is_no_such_file(tmp_path):
    with pytest.raises(ValueError, match=r"config=.*none\.toml is not a file: give a TOML file"):
        read_config(tmp_path / "none.toml", "lm", OPTIONS)


SMALL = {"precision": "nearest", "steps": 4, "batch_size": 2, "context": 8, "width": 16}
SMALL |= {"layers": 1, "heads": 2, "eval_every": 2, "watch_every": 2, "device": "cpu", "jobs": 1}


def toml(**values):
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "small.txt"
    path.write_text("to be, or not to be: that is the question\n" * 50)
    return path


def test_the_command_line_takes_precedence(tmp_path, text_file, capsys):
    file = tmp_path / "run.toml"
    file.write_text(toml(**SMALL, seeds=[3, 4], data=str(text_file), json=True))
    out = tmp_path / "out"
    options = ["--config", str(file), "--steps=3", "--seed=5", "--out", str(out)]
    assert main(["train", "lm", *options]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["precision"], run["seed"], run["steps"]) == ("nearest", 5, 3)
    assert json.loads((out / "config.json").read_text())["data"] == str(text_file)


def without_times(run):
    return {name: value for name, value in run.items() if "seconds" not in name}


def test_a_run_is_repeated_from_its_own_file(tmp_path, text_file, capsys):
    file = tmp_path / "run.toml"
    file.write_text(toml(**SMALL, data=str(text_file), lr=0.01))
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["train", "lm", "--config", str(file), "--out", str(first)]) == 0
    again = ["--config", str(first / "config.json"), "--out", str(second)]
    assert main(["train", "lm", *again]) == 0
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    # What the first one decided, the second one was given.
    decided = configs[0].pop("decided")
    assert decided["activations_reason"].startswith(configs[0]["activations"])
    assert configs[0] == configs[1]
    runs = [json.loads((folder / "summary.json").read_text())["runs"] for folder in (first, second)]
    assert [*map(without_times, runs[0])] == [*map(without_times, runs[1])]
    capsys.readouterr()
    assert main(["train", "image", *again]) == 2
    error = capsys.readouterr().err
    assert "config.json:2: expected a run of the task image, got 'lm'" in error


@pytest.mark.parametrize(
    "options",
    [
        ["ctr", "--precision=fp32"],
        ["ctr", "--data=criteo:a,b", "--preset=criteo-kaggle-16", "--dim=32"],
        ["xmc", "--linear=bf16,e4m3", "--warmup-steps=5"],
        ["xmc", "--preset=amazon-3m-fp8", "--encoder=bag", "--epochs=4"],
        ["image", "--nesterov", "--precision=fp32,e5m2+3"],
        ["lm", "--linear=bf16,mor-2way", "--loss-scale=2"],
    ],
    ids=" ".join,
)
def test_every_task_is_repeated_from_its_own_file(options, tmp_path, monkeypatch):
    """The configuration, not the training: ``compare`` is replaced."""
    made = []

    def compare(config, **_):
        made.append(config)
        raise ValueError("enough")

    monkeypatch.setattr("subulp.lab.compare.compare", compare)
    assert main(["train", *options]) == 2
    RunDirectory.create(options[0], tmp_path / "run").write_config(made[0], device="cpu", jobs=1)
    assert main(["train", options[0], "--config", str(tmp_path / "run/config.json")]) == 2
    first, second = made
    assert {**vars(second), "device": "auto"} == {**vars(first), "device": "auto"}


def test_a_value_that_only_its_option_refuses_has_its_line_too(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("steps = 9\nlr = -1.0\neval_every = 0\ndata = 'missing'\n")
    for options, message in (
        ([], f"{file}:3: eval_every=0 is out of range: give at least 1"),
        (["--eval-every=1"], f"{file}:2: lr=-1.0 is out of range: give at least 0"),
        (["--eval-every=1", "--lr", "-2"], "lr=-2.0 is out of range: give at least 0"),
        (["--eval-every=1", "--lr=1"], f"{file}:4: data={Path.cwd() / 'missing'} does not exist"),
    ):
        assert main(["train", "lm", f"--config={file}", *options]) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_wrong_file_is_one_line(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("\nprecison = 'fp32'")
    assert main(["train", "lm", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error == f"error: {file}:2: unknown key precison: did you mean precision?\n"

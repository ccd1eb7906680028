"""Trained models of every task are kept, compute what was measured, and are used."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import subulp.lab
from subulp.lab.cli import main
from subulp.lab.compare import compare
from subulp.lab.engine.saved_model import ModelName, choose_models, open_model, weights_of
from subulp.lab.engine.sealed import sealed
from subulp.lab.engine.task import task_of
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.image.config import ImageConfig
from subulp.lab.tasks.image.images import read_digits
from subulp.lab.tasks.xmc.config import XMCConfig
from tests.lab.saving import save
from tests.lab.tasks.ctr.readers.support import criteo_lines
from tests.lab.tasks.ctr.support import SMALL as SMALL_CTR
from tests.lab.tasks.ctr.support import write_clicks
from tests.lab.tasks.xmc.support import write_data

CPU = torch.device("cpu")
TASKS = ("lm", "lm-bytes", "lm-mixtures", "lm-activations", "image", "xmc", "ctr", "ctr-vocabulary")


@pytest.fixture(scope="module")
def runs(small, tmp_path_factory):
    """A run directory of each task, trained when it is asked for."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}

    def config(name):
        data = folder / f"{name}-data"
        data.mkdir()
        task, _, kind = name.partition("-")
        if task == "lm":
            kinds = {
                "": {"precision": ("master", "nearest", "collage-plus", "extra-bits-8")},
                "bytes": {"precision": ("kahan",), "level": "byte", "tie_head": True},
                "mixtures": {"precision": ("master",), "linear": ("bf16", "mor-2way")},
                "activations": {
                    "precision": ("fp32", "collage-plus"),
                    "linear": ("bf16", "mor-2way"),
                    "activations": "bf16",
                },
            }
            return small(**kinds[kind])
        if task == "image":
            precision = ("fp32", "amp", "extra-bits-8", "e5m2+8")
            return ImageConfig(precision=precision, steps=3, width=4, device="cpu", batch_size=8)
        if task == "xmc":
            write_data(data)
            return XMCConfig(
                data=data,
                precision=("fp32", "fp8", "renee"),
                width=16,
                steps=5,
                batch_size=8,
                head_fraction=0.3,
                device="cpu",
            )
        changes = {"min_count": 1, "precision": ("int4",)} if kind else {"precision": ("int8",)}
        options = {"policy": ("lfu", "lru"), "cache_fraction": (0.1,), "steps": 6, **changes}
        return CTRConfig(**{**SMALL_CTR, **options, "data": write_clicks(data)})

    def run(name):
        if name not in made:
            made[name] = compare(config(name), out=folder / name, jobs=1)
        return made[name]

    return run


@pytest.mark.parametrize("name", TASKS)
def test_a_model_measures_again_what_its_run_measured(runs, name, capsys):
    found = runs(name)
    assert main(["evaluate", str(found.directory), "--json"]) == 0
    printed = {r["precision"]: r for r in json.loads(capsys.readouterr().out)["runs"]}
    assert set(printed) == {s.name for s in found.summaries}
    for summary in found.summaries:
        measured = printed[summary.name]
        own = {n: v for n, v in summary.metrics.items() if n in measured}
        assert own
        assert {n: measured[n] for n in own} == own
        # Differences to a baseline, and what mixtures decided in training, are not measured again.
        rest = {n for n in summary.metrics if n not in own}
        assert rest <= {"accuracy_drop", "fp8_share", "e4m3_share", "e5m2_share", "fp8_error"}


@pytest.mark.parametrize("name", TASKS)
def test_full_precision_is_near_what_was_measured(runs, name, capsys):
    found = runs(name)
    variant = found.summaries[-1].name
    for weights in ("stored", "full"):
        options = ["--precision", variant, "--weights", weights]
        assert main(["evaluate", str(found.directory), *options]) == 0
        assert variant in capsys.readouterr().out
    model = subulp.lab.load(found.directory, variant, weights="full", device="cpu").model
    dense = [p for n, p in model.named_parameters() if ".table" not in n and "tables" not in n]
    if not name.startswith("xmc"):
        assert {p.dtype for p in dense} == {torch.float32}


@pytest.mark.parametrize("precision", ["collage-plus", "kahan", "extra-bits-8", "stochastic"])
def test_weights_are_those_that_the_optimizer_rebuilds(small, precision, tmp_path):
    config = small(precision=(precision,))
    task = task_of(config)
    work = task.build(config, task.load(config), precision, 0, CPU)
    for _ in range(3):
        work.loss(True).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
    expected = work.optimizer.full_precision_state_dict(work.model)
    whole, stored = weights_of(work)
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(stored[n], p) for n, p in work.model.named_parameters())
    name = save(tmp_path / "run", "lm", precision, 0, work)
    file = load_file(tmp_path / "run" / "models" / f"{precision}-seed-0.safetensors")
    assert all(torch.equal(file[n], tensor) for n, tensor in expected.items())
    saved = open_model(tmp_path / "run", name)
    assert {t.dtype for t in saved.tensors("full").values()} == {torch.float32}
    assert {t.dtype for t in saved.tensors("stored").values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"weights='half' is unknown: use one of stored, full"):
        saved.tensors("half")


def test_a_model_from_python(runs, text_file):
    model = subulp.lab.load(runs("lm").directory, "collage-plus", 0, device="cpu")
    with torch.no_grad():
        assert model.model(torch.zeros(1, 3, dtype=torch.int64)).shape[:2] == (1, 3)
    assert model.sample("12 green", 5, seed=1) == model.sample("12 green", 5, seed=1)
    pictures = read_digits()[1][0]
    classes = subulp.lab.load(str(runs("image").directory), "fp32").topk(pictures[:7], 3)
    assert classes[1].shape == (7, 3)
    with pytest.raises(ValueError, match=r"pictures has the shape \(7, 8, 8\): the model takes"):
        subulp.lab.load(runs("image").directory).topk(pictures[:7, 0])


# -------------------------------------------------------------------------------------- sample


@pytest.mark.parametrize("name", ["lm", "lm-bytes", "lm-activations"])
def test_a_text_is_continued(runs, name, capfdbinary):
    command = ["sample", str(runs(name).directory), "--prompt", "green", "--length", "30"]
    printed = []
    for options in ([], [], ["--sampling-seed", "7"], ["--temperature", "0"], ["--top", "1"]):
        assert main([*command, *options]) == 0
        printed.append(capfdbinary.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    # The most probable one of one is the most probable.
    assert printed[3] == printed[4]
    assert all(text.startswith(b"green") and len(text) >= 36 for text in printed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "prompt is empty: give at least one character"),
        (["--prompt", "größe"], "prompt has the character 'ö' (U+00F6), which the text that"),
        (["--prompt", "a", "--length", "-1"], "length=-1 is out of range"),
        (["--prompt", "a", "--temperature", "nan"], "temperature=nan is out of range"),
        (["--prompt", "a", "--top", "0"], "top=0 is out of range"),
        (["--prompt", "a", "--sampling-seed", str(2**32)], "sampling_seed=4294967296 is out of"),
        (["--prompt", "a", "--precision", "fp32"], "no trained model of this kind; choose with"),
    ],
)
def test_what_cannot_be_continued(runs, options, message, capsys):
    assert main(["sample", str(runs("lm").directory), *options]) == 2
    told = capsys.readouterr().err.splitlines()
    assert message in told[-1]


# ------------------------------------------------------------------------------------- predict


def predicted(run, path, capfdbinary, *options):
    assert main(["predict", str(run), str(path), *options]) == 0
    return capfdbinary.readouterr().out.decode().splitlines()


def test_pictures_are_classified(runs, tmp_path, capfdbinary):
    run = runs("image").directory
    pictures, labels = read_digits()[1]
    np.save(tmp_path / "digits.npy", pictures.numpy())
    lines = [",".join(map(str, p.flatten().tolist())) for p in pictures]
    (tmp_path / "digits.csv").write_text("\n".join(lines) + "\n")
    options = ["--precision", "fp32", "--k", "1"]
    found = predicted(run, tmp_path / "digits.npy", capfdbinary, *options)
    assert found == predicted(run, tmp_path / "digits.csv", capfdbinary, *options)
    best = [json.loads(line)["labels"][0]["label"] for line in found]
    right = sum(a == b for a, b in zip(best, labels.tolist(), strict=True))
    accuracy = next(s.metrics["accuracy"] for s in runs("image").summaries if s.name == "fp32")
    assert right / len(labels) == accuracy
    assert len(predicted(run, tmp_path / "digits.csv", capfdbinary, "--format", "tsv")) == 1796


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no picture"),
        (b"1,2,3\n", r"digits:1: 3 numbers: expected 64"),
        (b",".join([b"1"] * 63 + [b"256"]) + b"\n", "digits:1: expected a number from 0 to 255"),
        (b"\x93NUMPY\x01\x00garbage", "is not a whole NumPy array"),
    ],
)
def test_what_are_no_pictures(runs, content, message, tmp_path, capsys):
    (tmp_path / "digits").write_bytes(content)
    assert main(["predict", str(runs("image").directory), str(tmp_path / "digits")]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_arrays_of_other_shapes_and_dtypes(runs, tmp_path, capsys):
    path = tmp_path / "a.npy"
    for array, message in (
        (np.zeros((2, 64), np.uint8), "has the shape (2, 64): the model takes (count, 1, 8, 8)"),
        (np.zeros((2, 1, 8, 8), np.float32), "has the dtype float32: expected uint8"),
        (np.array([None]), "is not a whole NumPy array: Array can"),
    ):
        np.save(path, array)
        assert main(["predict", str(runs("image").directory), str(path)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ctr", "ctr-vocabulary"])
def test_clicks_are_predicted_with_and_without_the_label(runs, name, tmp_path, capfdbinary):
    run, lines = runs(name).directory, criteo_lines(9)
    (tmp_path / "with").write_text("\n".join(lines) + "\n")
    (tmp_path / "without").write_text("\n".join(x.partition("\t")[2] for x in lines) + "\n")
    # Nobody knows the label yet.
    blank = "\n" + "\n".join(x.partition("\t")[2] for x in lines) + "\n"
    (tmp_path / "blank first").write_text(blank)
    (tmp_path / "empty").write_text("\n".join("\t" + x.partition("\t")[2] for x in lines) + "\n")
    found = predicted(run, tmp_path / "with", capfdbinary)
    assert all(0 < json.loads(line)["probability"] < 1 for line in found)
    assert len(set(found)) > 1
    for other in ("without", "blank first", "empty"):
        assert predicted(run, tmp_path / other, capfdbinary) == found
    header, *rows = predicted(run, tmp_path / "with", capfdbinary, "--format", "tsv")
    assert header == "instance\tprobability"
    assert [float(row.split("\t")[1]) for row in rows] == [
        json.loads(line)["probability"] for line in found
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "has no examples"), (b"1\t2\n", "2 fields: expected 40"), (b"\xff\n", "not UTF-8")],
)
def test_what_are_no_clicks(runs, content, message, tmp_path, capsys):
    path, out = tmp_path / "clicks", tmp_path / "out"
    path.write_bytes(content)
    arguments = [str(runs("ctr").directory), str(path), "--out", str(out)]
    assert main(["predict", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "k", "message"),
    [
        ("ctr", "3", "k=3 has no effect on a click model, which has one label"),
        ("image", "11", "k=11 is out of range: give from 1 to 10"),
    ],
)
def test_more_labels_than_a_model_has(runs, name, k, message, tmp_path, capsys):
    (tmp_path / "file").write_text("1\n")
    assert main(["predict", str(runs(name).directory), str(tmp_path / "file"), "--k", k]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "use"), [("lm", "sample"), ("image", "predict")])
def test_a_task_names_the_command_that_uses_it(runs, name, use, tmp_path, capsys):
    (tmp_path / "file").write_text("a\n")
    run = str(runs(name).directory)
    command = ["predict", run, str(tmp_path / "file")] if use == "sample" else ["sample", run]
    assert main(command if use == "sample" else [*command, "--prompt", "a"]) == 2
    assert f"use `subulp {use}`" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ evaluate


def test_a_language_model_on_another_text(runs, tmp_path, capsys):
    path = tmp_path / "other.txt"
    path.write_text("12 green bottles " * 20)
    command = ["evaluate", str(runs("lm").directory), "--precision", "master", "--json", "--data"]
    assert main([*command, str(path)]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["perplexity"] == pytest.approx(math.exp(run["val_loss"]))
    path.write_text("")
    assert main([*command, str(path)]) == 2
    path.write_text("green")
    assert main([*command, str(path)]) == 2
    assert "has 5 tokens: too few for one context of 8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lm", "lm-bytes"])
def test_a_byte_order_mark_is_no_part_of_a_text(runs, name, tmp_path, capsys):
    path, found = tmp_path / "other.txt", []
    command = ["evaluate", str(runs(name).directory), "--json", "--data"]
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + b"12 green bottles " * 20)
        assert main([*command, str(path)]) == 0
        found.append(json.loads(capsys.readouterr().out)["runs"])
    assert (found[0] == found[1]) == (name == "lm")


def test_other_data_of_the_other_tasks(runs, tmp_path, capsys):
    write_data(tmp_path)
    clicks = write_clicks(tmp_path).removeprefix("criteo:")
    for name, data in (("xmc", tmp_path), ("ctr", clicks), ("ctr", f"criteo:{clicks}")):
        assert main(["evaluate", str(runs(name).directory), "--json", "--data", str(data)]) == 0
        printed = json.loads(capsys.readouterr().out)["runs"]
        assert all(math.isfinite(run["log_loss" if name == "ctr" else "P@1"]) for run in printed)
    assert main(["evaluate", str(runs("image").directory), "--data", "digits", "--json"]) == 0
    again = {r["precision"]: r["accuracy"] for r in json.loads(capsys.readouterr().out)["runs"]}
    assert again == {s.name: s.metrics["accuracy"] for s in runs("image").summaries}


def test_other_data_than_the_run_had_is_refused(runs, small, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, " * 40)
    run = compare(small(data=text, precision=("nearest",)), out=tmp_path / "run", jobs=1).directory
    text.write_text("to be or not to bee " * 40)
    assert main(["evaluate", str(run)]) == 2
    assert "was trained on other data than there is now: give" in capsys.readouterr().err
    text.unlink()
    assert main(["evaluate", str(run)]) == 2
    assert "give the data with --data, or change its path" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def original(small, tmp_path_factory):
    config = small(precision=("nearest", "kahan"))
    return compare(config, out=tmp_path_factory.mktemp("original") / "run", jobs=1).directory


@pytest.fixture
def copied(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_every_flipped_byte_is_damage(copied, capsys):
    models = copied / "models"
    for path in sorted(models.iterdir()):
        raw = path.read_bytes()
        for place in (0, len(raw) // 2, len(raw) - 2):
            path.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
            command = ["sample", str(copied), "--prompt", "1", "--length", "1"]
            assert main([*command, "--precision", path.name.partition("-")[0]]) == 2
            assert str(path.name) in capsys.readouterr().err
        path.write_bytes(raw)
    assert main(["sample", str(copied), "--prompt", "1", "--length", "1"]) == 0


def test_models_that_were_swapped(copied, capsys):
    models = copied / "models"
    for end in ("json", "safetensors"):
        first, second = models / f"nearest-seed-0.{end}", models / f"kahan-seed-0.{end}"
        first.rename(models / "aside")
        second.rename(first)
        (models / "aside").rename(second)
        assert main(["sample", str(copied), "--prompt", "1", "--precision", "nearest"]) == 2
        told = capsys.readouterr().err
        assert "it was renamed" in told if end == "json" else "is damaged" in told
        if end == "json":
            first.rename(models / "aside")
            second.rename(first)
            (models / "aside").rename(second)


@pytest.mark.parametrize(
    "change",
    [
        {"build": {}},
        {"build": []},
        {"files": {}},
        {"files": {"../../config.json": {"size": 1, "sha256": ""}}},
        {"files": {"/dev/zero": {"size": 1, "sha256": ""}}},
        {"files": {"nearest-seed-0.safetensors": None}},
        {"format": "subulp xmc model 2"},
        {"task": "cnn"},
        {"seed": "0"},
        {"rank": []},
        ("shape", "width", 10**12),
        ("shape", "layers", 10**9),
        ("shape", "heads", 0),
        ("shape", "vocabulary", -1),
        ("shape", "dropout", "x"),
    ],
    ids=str,
)
def test_a_forged_description_is_one_line(copied, change, capsys):
    path = copied / "models" / "nearest-seed-0.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    if isinstance(change, tuple):
        part, name, value = change
        fields["build"][part][name] = value
        change = {}
    path.write_text(sealed({**fields, **change}))
    assert main(["sample", str(copied), "--prompt", "1", "--precision", "nearest"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "nearest-seed-0.json" in told


def test_a_model_whose_measure_is_not_finite_is_the_last_choice(small, tmp_path):
    config = small(precision=("nearest", "kahan"))
    data = task_of(config).load(config)
    for variant, rank in (("nearest", math.nan), ("kahan", 2.0)):
        work = task_of(config).build(config, data, variant, 0, CPU)
        save(tmp_path / "run", "lm", variant, 0, dataclasses.replace(work))
        path = tmp_path / "run" / "models" / f"{variant}-seed-0.json"
        fields = json.loads(path.read_text())
        del fields["sha256"]
        path.write_text(sealed({**fields, "rank": None if math.isnan(rank) else rank}))
    assert choose_models(tmp_path / "run")[0] == ModelName("kahan", 0)

"""Trained models are saved, come back bit for bit, and predict labels of new texts."""

import dataclasses
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from subulp.lab.cli import main
from subulp.lab.compare import compare
from subulp.lab.engine.files import replacing
from subulp.lab.engine.loop import run
from subulp.lab.engine.predictions import Label, write_labels
from subulp.lab.engine.saved_model import ModelName, choose_models, model_names
from subulp.lab.engine.sealed import sealed
from subulp.lab.engine.trained import load_named
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.task import build, load
from subulp.numerics.logistic import sigmoid
from subulp.ops import bf16_product
from tests.lab.saving import save

from .support import WORDS, write_data

CPU = torch.device("cpu")
PRECISIONS = ("fp32", "renee", "sampled", "shortlist", "fp8", "e3m4+nearest", "int4")
TEXTS = ["a red round thing", "", "big\tblue", "größer", "unknown words only", "old new"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return XMCConfig(
        data=folder,
        precision=PRECISIONS,
        width=16,
        epochs=1,
        batch_size=8,
        chunks=3,
        head_fraction=0.3,
        device="cpu",
        watch_every=100,
    )


@pytest.fixture(scope="module")
def run_folder(config, tmp_path_factory):
    return compare(config, out=tmp_path_factory.mktemp("run") / "out", jobs=1).directory


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_saved_model_is_the_trained_one_bit_for_bit(config, precision, tmp_path):
    data = load(config)
    work = build(config, data, precision, 0, CPU)
    for _ in range(3):
        work.loss(False).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
    name = save(tmp_path / "run", "xmc", precision, 0, work)
    loaded = load_named(tmp_path / "run", name, "stored", "cpu")
    trained, found = work.model.state_dict(), loaded.model.state_dict()
    for name in (
        "momentum",
        "loss_scale",
        "finite_steps",
        "skipped_steps",
        "drawn_steps",
        "_extra_state",
    ):
        # What training alone needs.
        trained.pop(f"head.{name}", None)
        found.pop(f"head.{name}", None)
    assert trained.keys() == found.keys()
    for name, tensor in trained.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    work.model.eval()
    with torch.no_grad():
        x = work.model["encoder"](data.preprocessor.read(TEXTS))
        logits, labels = work.model["head"].topk(x, 4)
    probabilities, predicted = loaded.topk(TEXTS, 4)
    assert torch.equal(predicted, labels)
    assert torch.equal(probabilities, sigmoid(logits))


def test_every_run_of_a_comparison_is_saved_and_measured_again(config, run_folder):
    assert model_names(run_folder) == sorted(ModelName(p, 0) for p in PRECISIONS)
    shared = {p.name for p in (run_folder / "models").iterdir() if "-seed-" not in p.name}
    assert shared == {"encoder.json", "vocabulary.json", "labels.jsonl"}
    summary = {
        r["precision"]: r for r in json.loads((run_folder / "summary.json").read_text())["runs"]
    }
    test = load(config).data.test
    model = load_named(run_folder, ModelName("fp8", 0), "stored", "cpu")
    _, top = model.topk(test.source.read(range(len(test))), 1)
    rows, cols = test.pairs(range(len(test)))
    hits = sum(int(top[row, 0]) == col for row, col in zip(rows, cols, strict=True))
    assert summary["fp8"]["P@1"] == pytest.approx(100 * hits / len(test))


def test_other_labels_are_not_evaluated(config, run_folder, tmp_path, capsys):
    """As many of them, by other names or in another order, would give numbers too."""
    other = tmp_path / "other"
    shutil.copytree(config.data, other)
    for name, accepted in (("Y.txt", True), ("Y.txt", False)):
        (path,) = [p for p in other.iterdir() if p.name.startswith(name)]
        opening = gzip.open if path.suffix == ".gz" else open
        with opening(path, "rt", encoding="utf-8") as file:
            labels = file.read().splitlines()
        if not accepted:
            labels.reverse()
        with opening(path, "wt", encoding="utf-8") as file:
            file.write("\n".join(labels) + "\n")
        code = main(["evaluate", str(run_folder), "--data", str(other), "--precision", "fp32"])
        assert code == (0 if accepted else 2)
    assert "calls label 0" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["jsonl", "tsv"])
def test_scores_that_are_no_numbers_are_refused(form):
    found = [[Label(0, 0.5, None)], [Label(1, float("nan"), None)]]
    with pytest.raises(ValueError, match="scores are not finite: its training diverged"):
        write_labels(found, io.BytesIO(), form)


def test_json_lines(run_folder, text_file, tmp_path, capsys):
    out = tmp_path / "found.jsonl"
    arguments = ["--precision", "fp8", "--k", "3", "--batch-size", "4", "--out", str(out)]
    assert main(["predict", str(run_folder), str(text_file), *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"wrote {out}: 6 lines" in captured.err
    model = load_named(run_folder, ModelName("fp8", 0), "stored", "cpu")
    found = lines(out)
    for start, texts in ((0, TEXTS[:4]), (4, TEXTS[4:])):
        scores, labels = model.topk(texts, 3)
        for row, line in enumerate(found[start : start + len(texts)]):
            assert [entry["label"] for entry in line["labels"]] == labels[row].tolist()
            names = [(*WORDS, "never seen")[label] for label in labels[row]]
            assert [entry["name"] for entry in line["labels"]] == names
            written = torch.tensor([entry["score"] for entry in line["labels"]])
            assert torch.equal(written, scores[row])


def test_tsv_on_the_standard_output_and_compressed_input(run_folder, tmp_path, capfdbinary):
    path = tmp_path / "texts.txt.gz"
    path.write_bytes(gzip.compress("\n".join(TEXTS).encode()))
    arguments = ["--precision", "fp32", "--seed", "0", "--k=2", "--format", "tsv"]
    assert main(["predict", str(run_folder), str(path), *arguments]) == 0
    header, *rows = capfdbinary.readouterr().out.decode().splitlines()
    assert header.split("\t") == ["instance", "rank", "label", "score", "name"]
    assert [row.split("\t")[:2] for row in rows] == [
        [str(line), str(rank)] for line in range(1, 7) for rank in (1, 2)
    ]
    assert all(0 <= float(row.split("\t")[3]) <= 1 for row in rows)


def test_a_reader_that_has_seen_enough_is_no_error(run_folder, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("red thing\n" * 4_000)
    command = [sys.executable, "-m", "subulp", "predict", run_folder, path, "--precision", "fp8"]
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout.readline().startswith(b'{"labels"')
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_the_only_model_needs_no_name_and_labels_no_texts(config, text_file, tmp_path, capfdbinary):
    folder = tmp_path / "data"
    folder.mkdir()
    write_data(folder, names=())
    config = dataclasses.replace(config, precision=("fp8",), data=folder)
    out = compare(config, out=tmp_path / "run", jobs=1).directory
    assert main(["predict", str(out), str(text_file), "--k", "1"]) == 0
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [set(line["labels"][0]) for line in found] == [{"label", "score"}] * 6


def test_labels_may_hold_anything(config, text_file, tmp_path, capfdbinary):
    folder = tmp_path / "data"
    folder.mkdir()
    names = ["tab\there", '"quoted"', "größe", "\\", "", "\u2028", "x" * 1000, "7", "8"]
    write_data(folder, names=names)
    config = dataclasses.replace(config, precision=("fp32",), data=folder)
    out = compare(config, out=tmp_path / "run", jobs=1).directory
    assert main(["predict", str(out), str(text_file), "--k", "9"]) == 0
    found = json.loads(capfdbinary.readouterr().out.decode().split("\n")[0])["labels"]
    assert {entry["label"]: entry["name"] for entry in found} == dict(enumerate(names))
    assert main(["predict", str(out), str(text_file), "--k", "9", "--format", "tsv"]) == 0
    rows = capfdbinary.readouterr().out.decode().split("\n")
    assert {len(row.split("\t")) for row in rows[:-1]} == {5}


def test_the_best_of_several_models_is_taken_and_named(run_folder, text_file, capfd):
    runs = json.loads((run_folder / "summary.json").read_text())["runs"]
    first = max(runs, key=lambda run: run["P@1"])
    names = choose_models(run_folder)
    assert len(names) == len(PRECISIONS)
    by_name = {run["precision"]: run["P@1"] for run in runs}
    assert by_name[names[0].variant] == first["P@1"]
    assert main(["predict", str(run_folder), str(text_file), "--k", "1"]) == 0
    assert f"with {names[0]}, the best of {len(PRECISIONS)} models; choose another with --p" in (
        capfd.readouterr().err
    )
    with pytest.raises(ValueError, match=r"no trained model of this kind.*precision=fp8 seed=0"):
        choose_models(run_folder, "bf16", None)
    assert choose_models(run_folder, "fp8", None) == [ModelName("fp8", 0)]


def wrong(arguments, capsys):
    assert main(["predict", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_what_is_no_run(tmp_path, text_file, capsys):
    assert "is not a folder: give the run" in wrong([tmp_path / "none", text_file], capsys)
    assert "holds no run" in wrong([tmp_path, text_file], capsys)
    (tmp_path / "config.json").write_text('{"task": "xmc"}')
    assert "holds no trained model" in wrong([tmp_path, text_file], capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: give a text a line"),
        (b"fine\n\xff\n", "texts.txt:2: not UTF-8: byte 0xff"),
        (None, "is not a file: give a file"),
    ],
)
def test_a_file_that_cannot_be_read(run_folder, tmp_path, content, message, capsys):
    path, out = tmp_path / "texts.txt", tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    arguments = [run_folder, path, "--precision=fp8", "--out", out]
    assert message in wrong(arguments, capsys)
    assert not out.exists()


def test_options_out_of_range(run_folder, text_file, tmp_path, capsys):
    start = [run_folder, text_file, "--precision=fp8"]
    assert "k=10 is out of range: give from 1 to 9" in wrong([*start, "--k=10"], capsys)
    assert "batch=0 is out of range" in wrong([*start, "--batch-size=0"], capsys)
    assert "is the file that is read" in wrong([*start, "--out", text_file], capsys)
    missing = tmp_path / "nowhere" / "out"
    assert "is not a folder" in wrong([*start, "--out", missing], capsys)


@pytest.fixture
def one_run(config, tmp_path):
    config = dataclasses.replace(config, precision=("fp8",))
    return compare(config, out=tmp_path / "run", jobs=1).directory


def test_damaged_and_missing_files(one_run, text_file, capsys):
    models = one_run / "models"
    whole = (models / "fp8-seed-0.safetensors").read_bytes()
    flipped = bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]])
    for content in (whole[:-1], whole[:100], b"", b"\xff" * 50, flipped):
        (models / "fp8-seed-0.safetensors").write_bytes(content)
        assert "fp8-seed-0.safetensors is damaged" in wrong([one_run, text_file], capsys)
    (models / "fp8-seed-0.safetensors").unlink()
    assert "fp8-seed-0.safetensors is missing" in wrong([one_run, text_file], capsys)
    (models / "fp8-seed-0.safetensors").write_bytes(whole)
    for name in ("fp8-seed-0.json", "encoder.json", "labels.jsonl", "vocabulary.json"):
        content = (models / name).read_bytes()
        for damaged in (b"", b"{}", b"[]", b"\xff", content[:20]):
            (models / name).write_bytes(damaged)
            assert name in wrong([one_run, text_file], capsys)
        (models / name).write_bytes(content)
    assert main(["predict", str(one_run), str(text_file)]) == 0


def test_a_model_of_another_shape_is_refused(one_run, text_file, capsys):
    path = one_run / "models" / "fp8-seed-0.json"
    whole = path.read_text()
    path.write_text(whole.replace('"num_labels": 9', '"num_labels": 8'))
    assert "fp8-seed-0.json is damaged: its SHA-256 sum" in wrong([one_run, text_file], capsys)
    fields = json.loads(whole)
    del fields["sha256"]
    fields["build"]["head"]["num_labels"] = 8
    path.write_text(sealed(fields))
    assert "describes no model of xmc" in wrong([one_run, text_file], capsys)


def test_overwriting_a_run_removes_its_models(config, one_run):
    (one_run / "models" / "old-seed-7.json").write_text("{}")
    config = dataclasses.replace(config, precision=("fp32",))
    compare(config, out=one_run, jobs=1, overwrite=True)
    assert model_names(one_run) == [ModelName("fp32", 0)]


def test_a_run_without_a_folder_saves_nothing(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(config, precision=("fp8",))
    run(config, load(config), "fp8", 0)
    assert not list(tmp_path.iterdir())


def test_an_error_while_writing_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")

    def fail_half_way():
        with replacing(path) as unfinished:
            unfinished.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail_half_way()
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]


def test_killed_half_way_no_half_model_is_seen(one_run, text_file, capfdbinary):
    program = f"""
        import os, signal
        from pathlib import Path
        from subulp.lab.engine.files import replacing
        with replacing(Path({str(one_run / "models" / "fp8-seed-0.safetensors")!r})) as path:
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert model_names(one_run) == [ModelName("fp8", 0)]
    assert main(["predict", str(one_run), str(text_file)]) == 0
    assert capfdbinary.readouterr().out.count(b"\n") == 6


@pytest.mark.parametrize("products", ["fp32", "bf16", "fp8"])
def test_a_model_predicts_with_the_products_that_it_was_measured_with(config, tmp_path, products):
    config = dataclasses.replace(config, precision=("bf16", "fp8"), products=products)
    out = compare(config, out=tmp_path / "run", jobs=1).directory
    heads = {
        p: load_named(out, ModelName(p, 0), "stored", "cpu").model["head"] for p in config.precision
    }
    assert heads["fp8"].products == products
    # What its rows cannot have, the machine chooses.
    chosen = "bf16" if bf16_product.units_at(torch.device("cpu")) else "fp32"
    assert heads["bf16"].products == (chosen if products == "fp8" else products)


def test_narrow_products_need_narrow_rows(config):
    config = dataclasses.replace(config, precision=("fp32", "renee", "e4m3+nearest"))
    load(dataclasses.replace(config, products="fp8"))
    config = dataclasses.replace(config, precision=("fp32", "renee"), products="fp8")
    with pytest.raises(ValueError, match=r"products=fp8 .* and precision=fp32,renee has none"):
        load(config)
    config = dataclasses.replace(config, precision=("fp32", "renee", "int8"), products="bf16")
    with pytest.raises(ValueError, match=r"products=bf16 multiplies rows of BF16 numbers, and"):
        load(config)
    load(dataclasses.replace(config, precision=("renee", "bf16")))
    load(dataclasses.replace(config, precision=("renee",), products="auto", head_fraction=0.0))

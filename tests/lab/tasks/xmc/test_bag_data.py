"""Data sets of given features, the repository's bag-of-words form: they train and predict."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from subulp.lab.cli import main
from subulp.lab.compare import compare
from subulp.lab.engine.loop import run
from subulp.lab.engine.saved_model import ModelName, model_names
from subulp.lab.engine.trained import load_named
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.preprocessing import FeaturePreprocessor
from subulp.lab.tasks.xmc.readers.bags import Features, read_bag_file, read_feature_file
from subulp.lab.tasks.xmc.task import load
from subulp.lab.tasks.xmc.vocabulary import KnownFeatures
from tests.lab.saving import reseal

LABELS, FEATURES, NOISE = 12, 40, 4
CPU = torch.device("cpu")


def line(label, generator):
    """Three features that name the label, of large values, and noise of small ones."""
    own = [f"{3 * label + i}:{generator.uniform(2, 3):.4f}" for i in range(3)]
    noise = [f"{3 * LABELS + i}:{generator.uniform(0, 0.5):.4f}" for i in range(NOISE)]
    return " ".join(generator.permutation(own + noise))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve labels, and one that no instance has."""
    path = tmp_path_factory.mktemp("bags")
    generator = np.random.default_rng(0)
    for part, count in (("train", 96), ("test", 24)):
        lines = [f"{i % LABELS} {line(i % LABELS, generator)}" for i in range(count)]
        header = f"{count} {FEATURES + 1_000_000_000_000} {LABELS + 1}"
        (path / f"{part}.txt").write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def config(folder):
    return XMCConfig(
        data=folder,
        precision=("fp8",),
        width=16,
        epochs=30,
        batch_size=8,
        chunks=3,
        dropout=0.0,
        encoder_lr=1e-2,
        device="cpu",
        watch_every=100,
    )


@pytest.fixture(scope="module")
def run_folder(config, tmp_path_factory):
    return compare(config, out=tmp_path_factory.mktemp("run") / "out", jobs=1).directory


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_it_learns_the_features(config, precision):
    records = []
    config = dataclasses.replace(config, precision=(precision,))
    summary = run(config, load(config), precision, 0, records.append)
    assert records[-1].loss < 0.2 * records[0].loss
    # Chance is 1 in 12.
    assert summary.metrics["P@1"] > 90


def test_values_decide_and_not_only_features(folder, tmp_path, config):
    """All instances have the same two features: their proportion is the label."""
    generator = np.random.default_rng(0)
    for part in ("train", "test"):
        lines = []
        for i in range(64):
            small = generator.uniform(0.1, 0.2)
            first, second = (1.0, small) if i % 2 else (small, 1.0)
            lines.append(f"{i % 2} 0:{first:.3f} 1:{second:.3f}")
        (tmp_path / f"{part}.txt").write_text("\n".join(["64 2 2", *lines]) + "\n")
    config = dataclasses.replace(config, data=tmp_path, chunks=1, precision=("fp32",))
    assert run(config, load(config), "fp32", 0).metrics["P@1"] == 100


def test_a_saved_model_predicts_what_the_run_measured(config, run_folder, tmp_path, capfd):
    shared = {p.name for p in (run_folder / "models").iterdir() if "-seed-" not in p.name}
    assert shared == {"encoder.json", "features.json"}
    test = (config.data / "test.txt").read_text().splitlines()[1:]
    path = tmp_path / "new.txt"
    path.write_text("\n".join(row.partition(" ")[2] for row in test) + "\n")
    assert main(["predict", str(run_folder), str(path), "--k", "1", "--batch-size", "7"]) == 0
    found = [json.loads(row)["labels"][0]["label"] for row in capfd.readouterr().out.splitlines()]
    hits = sum(label == i % LABELS for i, label in enumerate(found))
    summary = json.loads((run_folder / "summary.json").read_text())["runs"][0]
    assert len(found) == len(test)
    assert summary["P@1"] == pytest.approx(100 * hits / len(test))


def test_lines_without_known_features_predict_too(run_folder, tmp_path, capfd):
    path = tmp_path / "new.txt"
    # Feature 1000 is within the header's bounds and never occurs in training.
    path.write_bytes(b"\r\n1000:3.5\r\n0:0\r\n0:1e30 1:1e30\r\n0:1e-30 1:1e-30")
    assert main(["predict", str(run_folder), str(path), "--k", "2"]) == 0
    rows = [json.loads(row)["labels"] for row in capfd.readouterr().out.splitlines()]
    assert len(rows) == 5
    assert rows[0] == rows[1] == rows[2] != rows[3]
    # The values' common factor is nothing; PyTorch's products may differ by row in the last bit.
    for large, small in zip(rows[3], rows[4], strict=True):
        assert large["label"] == small["label"]
        assert large["score"] == pytest.approx(small["score"], rel=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0:1\na red thing\n", "new.txt:2: expected feature:value, found 'a'"),
        ("3,5 0:1\n", "new.txt:1: expected feature:value, found '3,5'"),
        ("0:1 1000000000040:1\n", "new.txt:1: feature '1000000000040' is out of range"),
        ("0:nan\n", "new.txt:1: expected a number of FP32's range"),
        ("", "is empty: give a text a line"),
    ],
)
def test_lines_that_are_no_features_are_refused(run_folder, tmp_path, content, message, capsys):
    path, out = tmp_path / "new.txt", tmp_path / "out"
    path.write_text(content)
    assert main(["predict", str(run_folder), str(path), "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_damaged_lists_of_features(config, tmp_path, capsys):
    config = dataclasses.replace(config, epochs=1)
    out = compare(config, out=tmp_path / "run", jobs=1).directory
    path, new = out / "models" / "features.json", tmp_path / "new.txt"
    new.write_text("0:1\n")
    whole = path.read_text()
    fields = json.loads(whole)
    damaged = ["", "{}", "[]", whole[:40]]
    for numbers in ([], [3, 3], [-1, 2], ["a"], 4, [10**30]):
        damaged.append(json.dumps({**fields, "numbers": numbers}))
    for text in damaged:
        path.write_text(text)
        assert main(["predict", str(out), str(new)]) == 2
        assert "features.json is damaged" in capsys.readouterr().err
        for description in path.parent.glob("*-seed-*.json"):
            reseal(description)
        assert main(["predict", str(out), str(new)]) == 2
        assert "features.json is not a list of features" in capsys.readouterr().err
    path.write_text(whole)
    for description in path.parent.glob("*-seed-*.json"):
        reseal(description)
    assert main(["predict", str(out), str(new)]) == 0


def test_a_transformer_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match=r"is a bag of words, and encoder=.* reads texts: use --e"):
        load(XMCConfig(data=config.data, encoder=str(tmp_path), batch_size=8))


def test_there_are_no_label_texts(config):
    with pytest.raises(ValueError, match="has no label texts to train on"):
        load(dataclasses.replace(config, label_texts=True))


def test_features_that_occur_are_known_the_most_frequent_first(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("4 1000 2\n0 7:1 900:2\n1 900:1 5:0\n0\n1 3:-1 7:1 8:1\n")
    source, _ = read_bag_file(path)
    assert KnownFeatures.build(source, 100).numbers.tolist() == [3, 7, 8, 900]
    known = KnownFeatures.build(source, 3)
    assert known.numbers.tolist() == [3, 7, 900]
    ids, offsets, weights = known.encode(source.read([3, 2, 0]))
    assert ids.tolist() == [0, 1, 1, 2]
    assert offsets.tolist() == [0, 2, 2, 4]
    np.testing.assert_allclose(weights, [-(0.5**0.5), 0.5**0.5, 0.2**0.5, 0.8**0.5], rtol=1e-6)
    path.write_text("1 10 2\n0 7:0\n")
    with pytest.raises(ValueError, match="no training instance has a feature other than 0"):
        KnownFeatures.build(read_bag_file(path)[0], 10)


def test_many_features_are_merged_as_they_come(tmp_path, monkeypatch):
    rows = [f"0 {i % 7}:1 {i % 3 + 50}:1" for i in range(40)]
    path = tmp_path / "train.txt"
    path.write_text("\n".join(["40 100 1", *rows]) + "\n")
    source, _ = read_bag_file(path)
    whole = KnownFeatures.build(source, 4).numbers.tolist()
    monkeypatch.setattr("subulp.lab.tasks.xmc.vocabulary._READ_AT_ONCE", 3)
    monkeypatch.setattr("subulp.lab.data.counts._PENDING", 5)
    assert KnownFeatures.build(source, 4).numbers.tolist() == whole == [0, 50, 51, 52]


def test_known_features_and_their_settings_come_back(tmp_path):
    preprocessor = FeaturePreprocessor(KnownFeatures(np.array([2, 9]), 30), 8, 2, 0.25, "plain")
    preprocessor.save(tmp_path)
    again = FeaturePreprocessor.load(tmp_path, preprocessor.settings())
    features = Features(np.array([9, 3, 2]), np.array([0, 3]), np.float32([3, 1, 4]))
    for a, b in zip(preprocessor.read(features), again.read(features), strict=True):
        assert torch.equal(a, b)
    assert again.encoder(CPU).terms.weight.shape == (2, 8)
    sizes = {"width": 8, "layers": 2, "dropout": 0.25}
    assert again.settings() == {**sizes, "output_layer": "plain"}
    # Earlier versions had one output layer.
    assert FeaturePreprocessor.load(tmp_path, sizes).output_layer == "normalized"


def test_feature_lines_of_a_file_are_read_in_any_order(tmp_path):
    path = tmp_path / "new.txt"
    path.write_text("5:1.5\n\n0:2 3:-1\n")
    lines = read_feature_file(path, 6)
    assert len(lines) == 3
    found = lines.read([2, 0, 1])
    assert found.ids.tolist() == [0, 3, 5]
    assert found.offsets.tolist() == [0, 2, 3, 3]
    assert found.values.tolist() == [2, -1, 1.5]
    assert len(lines.read([]).ids) == 0


def test_workers_share_the_features_and_save(config, tmp_path):
    config = dataclasses.replace(config, precision=("fp32", "fp8"), epochs=1)
    out = compare(config, out=tmp_path / "run", jobs=2).directory
    assert model_names(out) == [ModelName("fp32", 0), ModelName("fp8", 0)]
    assert not list((out / "models").glob(".*"))
    for precision in config.precision:
        assert load_named(out, ModelName(precision, 0), "stored", "cpu").num_labels == LABELS + 1

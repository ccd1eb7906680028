"""What a comparison reports of its data and of each run: labels, measures, loss, memory, time."""

import dataclasses
import json

import pytest

from subulp.lab.cli import main
from subulp.lab.compare import compare
from subulp.lab.engine.loop import run
from subulp.lab.engine.saved_model import ModelName
from subulp.lab.engine.trained import load_named
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.metrics import BANDS, KS
from subulp.lab.tasks.xmc.task import describe, load

from .support import WORDS, write_data

TEST_PAIRS_OF_LAST_LABEL = 5


@pytest.fixture
def folder(tmp_path):
    """The label 8 has no training text, and five test texts have it."""
    path = tmp_path / "data"
    path.mkdir()
    write_data(path)
    rows = (path / "tst_X_Y.txt").read_text().splitlines()
    for i in range(1, 1 + TEST_PAIRS_OF_LAST_LABEL):
        rows[i] += " 8:1"
    (path / "tst_X_Y.txt").write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def config(folder):
    return XMCConfig(
        data=folder,
        precision=("fp8",),
        width=16,
        epochs=2,
        batch_size=8,
        device="cpu",
        watch_every=4,
        label_texts=False,
    )


OPTIONS = ("--width=16", "--epochs=1", "--batch-size=8", "--watch-every=100", "--device=cpu")


def test_labels_never_seen_are_counted_and_everything_is_in_the_summary(folder, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["--precision=fp8", "--no-label-texts", "--data", str(folder), "--out", str(out)]
    assert main(["train", "xmc", *OPTIONS, *arguments]) == 0
    captured = capsys.readouterr()
    assert "1 unseen labels, 5 unseen test pairs" in captured.err
    summary = json.loads((out / "summary.json").read_text())
    assert summary["data"] == {
        "name": str(folder),
        "train": 48,
        "train_pairs": 96,
        "test": 12,
        "test_pairs": 24 + TEST_PAIRS_OF_LAST_LABEL,
        "labels": 9,
        "unseen_labels": 1,
        "unseen_test_pairs": TEST_PAIRS_OF_LAST_LABEL,
    }
    (found,) = summary["runs"]
    for k in KS:
        measures = {f"{name}@{k}" for name in ("P", "nDCG", "PSP", "PSnDCG", "R", "C")}
        assert measures | {f"P@{k} {band}" for band in BANDS} <= set(found)
        bands = sum(found[f"P@{k} {band}"] for band in BANDS)
        assert bands == pytest.approx(found[f"P@{k}"])
    memory = {"weights", "gradients", "states", "activations", "total"}
    assert set(found["peak_bytes"]) == memory
    assert found["train_loss"] > 0
    assert found["seconds_per_epoch"] > 0
    heading = captured.out.replace("\n", " ")
    assert all(word in heading for word in ("epoch", "loss", "weights", "activ."))


def test_its_own_text_makes_a_label_seen(config, folder):
    (folder / "Y.txt").write_text("\n".join([*WORDS, "never seen"]) + "\n")
    assert describe(load(config))["unseen_labels"] == 1
    assert describe(load(dataclasses.replace(config, label_texts=True)))["unseen_labels"] == 0


def test_a_pair_that_is_filtered_is_not_seen(config, folder):
    rows = (folder / "trn_X_Y.txt").read_text().splitlines()[1:]
    pairs = [f"{i} 0" for i, row in enumerate(rows) if row.startswith("0:1")]
    (folder / "trn_filter_labels.txt").write_text("\n".join(pairs) + "\n")
    described = describe(load(config))
    assert described["unseen_labels"] == 2
    assert described["train_pairs"] == 96 - len(pairs)


def test_a_label_never_seen_is_kept_and_scored(config, tmp_path):
    out = compare(config, out=tmp_path / "run", jobs=1).directory
    model = load_named(out, ModelName("fp8", 0), "stored", "cpu")
    scores, labels = model.topk(["red green thing", "old"], 9)
    assert labels.sort(1).values.tolist() == [list(range(9))] * 2
    # It is a negative of every text.
    own = scores[labels == 8]
    assert ((own > 0) & (own < 0.1)).all()


def test_the_time_of_an_epoch_is_that_of_its_steps(config):
    records = []
    config = dataclasses.replace(config, log_every=1, watch_every=100, epochs=6)
    summary = run(config, load(config), "fp8", 0, records.append)
    plain = [r.seconds for r in records if r.step > 2]
    per_epoch = 48 // 8
    assert summary.steps == 6 * per_epoch
    assert summary.seconds_per_epoch == pytest.approx(per_epoch * sum(plain) / len(plain))
    # The last tenth of the steps: three.
    assert summary.train_loss == pytest.approx(sum(r.loss for r in records[-3:]) / 3)

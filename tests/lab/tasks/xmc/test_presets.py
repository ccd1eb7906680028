"""The presets are the rows of the paper's Table 9."""

import dataclasses
import json

import pytest

from subulp.lab.cli import main
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.metrics import PROPENSITIES
from subulp.lab.tasks.xmc.presets import PRESETS, describe, preset

from .support import write_data

# As printed: data set, encoder, batch size, sequence length, dropout, encoder LR, XMC LR, epochs,
# warm-up, weight decay of encoder and XMC.
TABLE_9 = """
Wiki-500K (BF16)|BERT-Base|128|128|0.65|0.00002|0.05|35|1000|(0.01, 0.0001)
Wiki-500K (FP8)|BERT-Base|128|128|0.65|0.00002|0.15|70|1000|(0.01, 0.0001)
AmazonTitles-670K (BF16)|BERT-Base|256|32|0.7|0.00005|0.05|100|1000|(0.01, 0.0001)
AmazonTitles-670K (FP8)|BERT-Base|256|32|0.75|0.00005|0.05|150|1000|(0.01, 0.0001)
Amazon-670K (BF16)|BERT-Base|64|128|0.75|0.00002|0.06|100|500|(0.01, 0.0001)
Amazon-670K (FP8)|BERT-Base|64|128|0.7|0.00002|0.05|150|1000|(0.01, 0.0001)
Amazon-3M (BF16)|BERT-Base|128|128|0.6|0.00005|0.05|90|10000|(0.001, 0.001)
Amazon-3M (FP8)|BERT-Base|128|128|0.65|0.00002|0.05|150|10000|(0.001, 0.001)
LF-AmazonTitles-131K (BF16)|Distil-BERT|512|32|0.84|0.00001|0.1|100|15000|(0, 0)
LF-AmazonTitles-131K (FP8)|Distil-BERT|512|32|0.85|0.00001|0.05|100|5000|(0.01, 0.0001)
LF-WikiSeeAlso-320K (BF16)|Distil-RoBERTa|128|256|0.75|0.00002|0.08|100|5000|(0.01, 0.0001)
LF-WikiSeeAlso-320K (FP8)|Distil-RoBERTa|128|256|0.75|0.00002|0.08|100|5000|(0.01, 0.0001)
LF-AmazonTitles-1.3M (BF16)|Distil-BERT|512|32|0.65|0.000005|0.05|100|5000|(0.0001, 0.0001)
LF-AmazonTitles-1.3M (FP8)|Distil-BERT|512|32|0.6|0.000005|0.2|150|15000|(0.01, 0.0001)
LF-Paper2Keywords-8.6M (BF16)|Distil-BERT|128|128|0.70|0.00002|0.05|12|5000|(0.01, 0.0001)
LF-Paper2Keywords-8.6M (FP8)|Distil-BERT|128|128|0.70|0.00002|0.05|12|5000|(0.01, 0.0001)
"""
ROWS = TABLE_9.strip().splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.partition("|")[0])
def test_every_row_is_a_preset(row):
    title, encoder, *numbers, decays = row.split("|")
    data_set, precision = title.removesuffix(")").split(" (")
    found = preset(f"{data_set}-{precision}".lower())
    assert (found.data_set, found.precision) == (data_set, precision.lower())
    assert found.encoder == encoder.lower()
    assert [
        *(found.batch_size, found.max_length, found.dropout, found.encoder_lr, found.head_lr),
        *(found.epochs, found.warmup_steps),
    ] == [float(number) for number in numbers]
    assert [found.encoder_weight_decay, found.head_weight_decay] == [
        float(decay) for decay in decays.strip("()").split(", ")
    ]
    assert found.label_texts == data_set.startswith("LF-")
    assert found.propensity in PROPENSITIES


def test_there_are_no_others():
    assert len(PRESETS) == len(ROWS) == 16


def test_a_description_names_every_setting():
    text = describe("amazon-3m-fp8")
    assert text.startswith("amazon-3m-fp8\n")
    settings = dict(line.split() for line in text.splitlines()[1:])
    assert settings == {
        "data-set": "Amazon-3M",
        "precision": "fp8",
        "encoder": "bert-base",
        "batch-size": "128",
        "max-length": "128",
        "dropout": "0.65",
        "encoder-lr": "2e-05",
        "head-lr": "0.05",
        "epochs": "150",
        "warmup-steps": "10000",
        "encoder-weight-decay": "0.001",
        "head-weight-decay": "0.001",
        "label-texts": "False",
        "propensity": "amazon",
        "linear": "torchao-fp8",
        "output-layer": "plain",
    }


def test_an_unknown_preset():
    with pytest.raises(ValueError, match=r"preset='amazon' is unknown: use one of amazon-3m-bf16,"):
        preset("amazon")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_to_its_row(name):
    config = XMCConfig(preset=name, encoder="some/folder")
    row = PRESETS[name]
    for field in dataclasses.fields(row):
        if field.name not in ("data_set", "encoder", "precision"):
            assert getattr(config, field.name) == getattr(row, field.name)
    assert config.precision == (row.precision,)
    assert config.linear == ("torchao-fp8" if row.precision == "fp8" else "bf16",)
    assert config.output_layer == "plain"
    assert (config.encoder_precision, config.head_fraction) == ("kahan", 0.0)
    assert config.encoder == "some/folder"
    assert config.warmup is None
    assert config.rising_steps(10**6) == row.warmup_steps
    # What no row sets has its own default.
    assert config.chunks == XMCConfig().chunks
    # Replacing a field keeps the others.
    again = dataclasses.replace(config, chunks=8)
    assert again == dataclasses.replace(again)
    assert again.epochs == row.epochs


def test_what_is_given_comes_before_the_preset():
    config = XMCConfig(
        preset="amazon-3m-fp8", encoder="bag", epochs=5, label_texts=True, precision=("fp8", "bf16")
    )
    assert (config.epochs, config.label_texts, config.precision) == (5, True, ("fp8", "bf16"))
    assert config.linear == ("bf16",)
    assert config.output_layer == "normalized"
    given = XMCConfig(
        preset="amazon-3m-fp8",
        encoder="some/folder",
        linear=("bf16", "e4m3"),
        output_layer="normalized",
    )
    assert given.output_layer == "normalized"
    assert given.linear == ("bf16", "e4m3")
    assert config.batch_size == 128


def test_warmup_as_a_share_and_as_steps():
    assert XMCConfig().rising_steps(1000) == int(XMCConfig().warmup * 1000)
    steps = XMCConfig(warmup_steps=7)
    assert (steps.warmup, steps.rising_steps(1000)) == (None, 7)
    share = XMCConfig(preset="amazon-3m-fp8", encoder="bag", warmup=0.25)
    assert (share.warmup_steps, share.rising_steps(1000)) == (None, 250)
    assert XMCConfig(warmup_steps=0).rising_steps(1000) == 0
    with pytest.raises(ValueError, match=r"warmup=0.1 and warmup_steps=3 contradict each other"):
        XMCConfig(warmup=0.1, warmup_steps=3)
    with pytest.raises(ValueError, match=r"warmup_steps=-1 is out of range"):
        XMCConfig(warmup_steps=-1)


def test_a_preset_without_its_transformer():
    with pytest.raises(ValueError, match=r"trains the transformer distil-bert, which is never do"):
        XMCConfig(preset="lf-amazontitles-131k-bf16")
    with pytest.raises(ValueError, match=r"preset='x' is unknown: use one of amazon-3m-bf16,"):
        XMCConfig(preset="x")


def test_the_command_prints_what_the_preset_sets_and_goes_on(tmp_path, capsys):
    write_data(tmp_path)
    arguments = ["--preset", "amazon-670k-fp8", "--encoder", "bag", "--out", str(tmp_path / "run")]
    small = ["--data", str(tmp_path), "--epochs=1", "--width=4", "--batch-size=8", "--warmup=0"]
    assert main(["train", "xmc", *arguments, *small]) == 0
    assert describe("amazon-670k-fp8") in capsys.readouterr().err
    used = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (used["preset"], used["epochs"], used["head_lr"]) == ("amazon-670k-fp8", 1, 0.05)
    assert (used["warmup"], used["warmup_steps"]) == (0.0, None)


def test_more_warmup_than_steps_is_refused(capsys):
    arguments = ["--preset", "amazon-3m-fp8", "--encoder", "bag", "--epochs", "1"]
    assert main(["train", "xmc", *arguments]) == 2
    assert "warmup_steps=10000 is above the" in capsys.readouterr().err

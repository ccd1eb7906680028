"""The presets are the rows of the paper's Table 9."""

import pytest

from subulp.train.xmc.metrics import PROPENSITIES
from subulp.train.xmc.presets import PRESETS, describe, preset

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
    }


def test_an_unknown_preset():
    with pytest.raises(ValueError, match=r"preset='amazon' is unknown: use one of amazon-3m-bf16,"):
        preset("amazon")

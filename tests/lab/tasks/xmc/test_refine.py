"""Refinement after the training, as ELMO's appendix D has it."""

import dataclasses

import pytest
import torch

from subulp.lab.compare import compare
from subulp.lab.engine.loop import run
from subulp.lab.engine.ranks import ALONE, Ranks
from subulp.lab.engine.saved_model import ModelName
from subulp.lab.engine.trained import load_named
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.task import build, check_ranks, load

CONFIG = XMCConfig(
    generated_labels=64,
    precision=("fp8",),
    width=16,
    epochs=2,
    batch_size=32,
    watch_every=50,
    device="cpu",
    refine_epochs=2,
)
CPU = torch.device("cpu")


def test_the_training_before_is_the_same():
    plain, refined = [], []
    for epochs, records in ((0, plain), (2, refined)):
        config = dataclasses.replace(CONFIG, refine_epochs=epochs)
        summary = run(config, load(config), "fp8", 0, records.append)
    assert [r.loss for r in plain] == [r.loss for r in refined]
    assert plain[-1].metrics == refined[-1].metrics
    assert summary.metrics["P@5"] > refined[-1].metrics["P@5"]


@pytest.mark.parametrize(("precision", "storage"), [("fp8", "bf16"), ("e3m2", "bf16")])
def test_rows_are_wider_afterwards(precision, storage):
    config = dataclasses.replace(CONFIG, precision=(precision,))
    work = build(config, load(config), precision, 0, CPU)
    work.loss(False)
    head, encoder = work.model["head"], work.model["encoder"]
    before = head.state_dict()["table.codes"].clone(), encoder.terms.weight.clone()
    work.finish()
    assert torch.equal(head.state_dict()["table.codes"], before[0])
    assert torch.equal(encoder.terms.weight, before[1])
    assert work.model["head"].table.storage.name == storage
    assert work.bytes_per_parameter()["total"] == 2
    assert work.model["head"].training


def test_rows_in_fp32_stay_there():
    config = dataclasses.replace(CONFIG, precision=("fp32",))
    work = build(config, load(config), "fp32", 0, CPU)
    work.finish()
    assert work.bytes_per_parameter()["total"] == 4


def test_the_saved_model_is_the_refined_one(tmp_path):
    done = compare(CONFIG, out=tmp_path / "run", jobs=1)
    trained = load_named(tmp_path / "run", ModelName("fp8", 0), "stored", CPU)
    found = trained.measure(CONFIG, None)
    assert found["P@1"] == done.summaries[0].metrics["P@1"]


def test_it_is_repeatable():
    first, second = (run(CONFIG, load(CONFIG), "fp8", 0).metrics for _ in range(2))
    assert first == second


def test_bad_input():
    with pytest.raises(ValueError, match="renee has FP32 weights already"):
        dataclasses.replace(CONFIG, precision=("fp8", "renee"))
    with pytest.raises(ValueError, match="refine_lr=-1 is out of range"):
        dataclasses.replace(CONFIG, refine_lr=-1)
    with pytest.raises(ValueError, match="refine_epochs=2 is for one process, and there are 2"):
        check_ranks(CONFIG, Ranks(0, 2))
    check_ranks(CONFIG, ALONE)

"""The extreme classifier goes on where it was stopped."""

import dataclasses

import pytest

from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.task import load
from tests.lab.engine.resuming import assert_resumes
from tests.lab.tasks.xmc.support import transformer_config, write_bert, write_data

SMALL = {"width": 16, "epochs": 2, "batch_size": 16, "watch_every": 3, "device": "cpu", "chunks": 3}
RUNS = [
    ("fp32", {}),
    ("renee", {"fuse_backward": True}),
    ("sampled", {"dropout": 0.5}),
    ("shortlist", {}),
    ("bf16", {"dropout": 0.5, "weight_dropout": 0.3}),
    ("fp16", {"label_texts": False}),
    ("fp8", {"head_fraction": 0.3, "scale": "table"}),
    ("fp8+nearest", {"fuse_backward": True}),
    ("e3m4", {}),
    ("int8", {"layers": 1, "linear": ("mor-2way",)}),
    ("int2", {"encoder_precision": "collage-plus"}),
    ("bf16", {"encoder_precision": "fp32"}),
    ("e4m3", {"refine_epochs": 1}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("xmc")
    write_data(path)
    return path


@pytest.mark.parametrize(("precision", "changes"), RUNS, ids=[name for name, _ in RUNS])
def test_a_resumed_run_is_the_run_that_never_stopped(folder, tmp_path, precision, changes):
    config = XMCConfig(**SMALL, data=folder, precision=(precision,), **changes)
    assert_resumes(tmp_path, config, load(config), precision)


def test_a_resumed_transformer_is_the_one_that_never_stopped(tmp_path):
    pytest.importorskip("transformers")
    bert = tmp_path / "bert"
    bert.mkdir()
    write_bert(bert)
    config = transformer_config(bert, tmp_path / "data", dropout=0.1, epochs=1)
    config = dataclasses.replace(config, batch_size=16)
    assert_resumes(tmp_path, config, load(config), "fp8")

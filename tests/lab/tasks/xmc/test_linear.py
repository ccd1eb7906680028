"""An encoder whose linear layers multiply mixtures: the bag's, a transformer's, a saved one."""

import dataclasses

import pytest
import torch

from subulp.lab.compare import compare
from subulp.lab.engine.loop import run
from subulp.lab.engine.trained import load_named
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.task import build, load
from subulp.nn import MoRLinear
from tests.lab.saving import save

from .support import LEARNING, transformer_config, write_bert, write_data

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path):
    write_data(tmp_path)
    return XMCConfig(
        data=tmp_path,
        precision=("fp32", "fp8"),
        linear=("bf16", "mor-tensor"),
        width=16,
        epochs=2,
        batch_size=8,
        chunks=2,
        dropout=0.0,
        device="cpu",
    )


def mixtures(encoder):
    return [n for n, m in encoder.named_modules() if isinstance(m, MoRLinear)]


def test_the_bags_layers(config):
    data = load(config)
    encoders = {v: build(config, data, v, 0, CPU).model["encoder"] for v in config.variants}
    assert {v: len(mixtures(e)) for v, e in encoders.items()} == {
        "fp32": 0,
        "fp8": 0,
        "fp8 mor-tensor": 2,
    }
    for a, b in zip(
        encoders["fp8"].parameters(), encoders["fp8 mor-tensor"].parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_the_bag_has_a_layer_where_linear_needs_one():
    narrow = ("bf16", "mor-tensor")
    assert (XMCConfig().layers, XMCConfig(linear=("bf16",)).layers) == (0, 0)
    assert XMCConfig(linear=narrow).layers == 1
    assert XMCConfig(linear=narrow, layers=3).layers == 3
    message = "layers=0 and linear=bf16,mor-tensor contradict each other: .* give --layers 1"
    with pytest.raises(ValueError, match=message):
        XMCConfig(linear=narrow, layers=0)
    with pytest.raises(ValueError, match="layers=-1"):
        XMCConfig(layers=-1)


def test_a_saved_model_predicts_with_the_same_products(config, tmp_path):
    data = load(config)
    found = compare(config, out=tmp_path / "run", jobs=1)
    shares = {s.name: s.metrics.get("fp8_share") for s in found.summaries}
    assert shares["fp8"] is None
    assert 0.5 < shares["fp8 mor-tensor"] <= 1
    work = build(config, data, "fp8 mor-tensor", 0, CPU)
    name = save(found.directory, "xmc", "fp8 mor-tensor", 7, work)
    loaded = load_named(found.directory, name, "stored", "cpu")
    assert len(mixtures(loaded.model["encoder"])) == 2
    texts = ["red thing", "", "unknown"]
    with torch.no_grad():
        own = work.model["encoder"].eval()(data.preprocessor.read(texts))
        assert torch.equal(loaded.model["encoder"](data.preprocessor.read(texts)), own)


def test_a_transformers_layers(tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    folder.mkdir()
    write_bert(folder)
    config = transformer_config(folder, tmp_path / "data", linear=("mor-3way",), **LEARNING)
    data = load(config)
    # Query, key, value and output, up and down, in two layers.
    assert len(mixtures(build(config, data, "fp8", 0, CPU).model["encoder"])) == 12
    summary = run(config, data, "fp8", 0)
    assert summary.metrics["P@1"] > 80
    assert summary.metrics["fp8_share"] > 0.9


def test_torchaos_layers_need_a_transformer(config):
    message = "linear=bf16,torchao-fp8 and encoder=bag contradict each other"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, linear=("bf16", "torchao-fp8"))

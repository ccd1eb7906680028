"""A transformer that multiplies in FP8 through torchao, emulated here."""

import dataclasses
import sys

import pytest
import torch

from subulp.lab.cli import main
from subulp.lab.compare import compare
from subulp.lab.engine.loop import run
from subulp.lab.engine.saved_model import ModelName
from subulp.lab.engine.trained import load_named
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.task import build, build_encoder, load
from tests.lab.saving import save

from .support import LEARNING, transformer_config, write_bert

transformers = pytest.importorskip("transformers")
pytest.importorskip("torchao")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    write_bert(folder)
    return folder


@pytest.fixture
def config(bert, tmp_path):
    return transformer_config(bert, tmp_path / "data", linear=("torchao-fp8",))


def fp8_layers(encoder):
    return [n for n, m in encoder.named_modules() if type(m).__name__ == "Float8Linear"]


@torch.no_grad()
def enlarge(encoder):
    """A fresh BERT's layers add next to nothing to their input: let them matter."""
    for parameter in encoder.transformer.encoder.parameters():
        if parameter.dim() == 2:
            parameter.mul_(16)


def vectors(encoder, data, texts):
    with torch.no_grad():
        return encoder.eval()(data.preprocessor.read(texts))


def test_linear_layers_multiply_in_fp8_and_nothing_else_changes(config):
    data = load(config)
    work = build(config, data, "fp8", 0, CPU)
    narrow, optimizer = work.model["encoder"], work.optimizer
    plain = build_encoder(config, data, "fp8", 0, CPU)
    # Query, key, value and output, up and down, in two layers.
    assert len(fp8_layers(narrow)) == 12
    assert narrow.training
    assert all(module.training for module in narrow.modules())
    assert fp8_layers(plain) == []
    for (name, a), (other, b) in zip(
        narrow.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)
        assert a.dtype == torch.bfloat16
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert own == {id(p) for p in narrow.parameters()}
    enlarge(narrow)
    enlarge(plain)
    texts = ["red things", "new", "old big small round thing", ""]
    x, y = vectors(narrow, data, texts), vectors(plain, data, texts)
    error = (x - y).norm() / y.norm()
    # Three mantissa bits, in a network of two layers.
    assert 1e-3 < error < 0.2


def test_its_gradient_is_near_that_of_bf16(config):
    data = load(config)
    gradients = {}
    for name in ("bf16", "torchao-fp8"):
        chosen = dataclasses.replace(config, linear=(name,))
        encoder = build(chosen, data, "fp8", 0, CPU).model["encoder"]
        enlarge(encoder)
        generator = torch.Generator().manual_seed(1)
        direction = torch.randn(encoder.dim, generator=generator)
        # Without the transformer's own dropout.
        batch = data.preprocessor.read(["red things", "new thing"])
        (encoder.eval()(batch) @ direction).sum().backward()
        gradients[name] = torch.cat([p.grad.float().flatten() for p in encoder.parameters()])
    cosine = torch.nn.functional.cosine_similarity(*gradients.values(), dim=0)
    assert 0.9 < cosine < 0.99999


def test_it_learns_the_words(config):
    config = dataclasses.replace(config, **LEARNING)
    assert run(config, load(config), "fp8", 0).metrics["P@1"] > 80


def test_baselines_keep_their_encoder(config):
    data = load(config)
    for precision in ("fp32", "renee"):
        chosen = dataclasses.replace(config, precision=("fp8", precision))
        encoder = build(chosen, data, precision, 0, CPU).model["encoder"]
        assert fp8_layers(encoder) == []
        assert {p.dtype for p in encoder.parameters()} == {torch.float32}


def test_a_saved_model_predicts_with_the_same_products(config, tmp_path):
    config = dataclasses.replace(config, precision=("fp8", "fp32"), epochs=1)
    data = load(config)
    out = compare(config, out=tmp_path / "run", jobs=1).directory
    models = {p: load_named(out, ModelName(p, 0), "stored", "cpu").model for p in config.precision}
    assert len(fp8_layers(models["fp8"]["encoder"])) == 12
    assert fp8_layers(models["fp32"]["encoder"]) == []
    work = build(config, data, "fp8", 0, CPU)
    again = load_named(out, save(out, "xmc", "fp8", 7, work), "stored", "cpu").model
    texts = ["red thing", "", "unknown"]
    assert torch.equal(
        vectors(again["encoder"], data, texts), vectors(work.model["encoder"], data, texts)
    )


def test_fused_runs_are_the_same(config):
    data = load(config)
    fused = dataclasses.replace(config, fuse_backward=True)
    assert run(config, data, "fp8", 0).metrics == run(fused, data, "fp8", 0).metrics


def test_from_the_command_line_and_without_the_package(config, bert, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    options = ["--data", str(config.data), "--encoder", str(bert), "--max-length=12", "--epochs=1"]
    small = ["--batch-size=8", "--precision=fp8", "--linear=torchao-fp8", "--out", str(out)]
    assert main(["train", "xmc", *options, *small]) == 0
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    text = tmp_path / "texts.txt"
    text.write_text("red thing\n")
    capsys.readouterr()
    assert main(["predict", str(out), str(text)]) == 2
    assert "needs the package torchao" in capsys.readouterr().err
    other = tmp_path / "other"
    assert main(["train", "xmc", *options, *small[:-1], str(other)]) == 2
    assert "pip install torchao" in capsys.readouterr().err
    assert not other.exists()


def test_the_bag_has_no_fp8_products():
    with pytest.raises(ValueError, match="linear=torchao-fp8 and encoder=bag contradict"):
        XMCConfig(linear=("torchao-fp8",))
    with pytest.raises(ValueError, match=r"linear='fp8' .* use torchao-fp8 .* or e4m3"):
        XMCConfig(linear=("fp8",), encoder="bert")


def test_layers_of_other_sizes_stay_and_some_must_fit(config, tmp_path):
    folder = tmp_path / "bert"
    folder.mkdir()
    write_bert(folder, 12)
    config = dataclasses.replace(config, encoder=str(folder))
    with pytest.raises(ValueError, match=r"finds no linear layer .* multiples of 16: use bf16"):
        build(config, load(config), "fp8", 0, CPU)


@pytest.mark.gpu
def test_gpu(config):
    config = dataclasses.replace(config, **LEARNING, device="cuda")
    assert run(config, load(config), "fp8", 0).metrics["P@1"] > 80

"""Transformers from local folders: a tiny random BERT, made here."""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from subulp import nn, optim
from subulp.integrations.transformers import convert_to_mor
from subulp.lab.cli import main
from subulp.lab.compare import compare
from subulp.lab.engine.loop import run
from subulp.lab.engine.saved_model import ModelName
from subulp.lab.engine.trained import load_named
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.encoder import CONSTANTS, OUTPUT_NORM
from subulp.lab.tasks.xmc.task import build, build_encoder, build_optimizer, digest, load
from subulp.lab.tasks.xmc.transformer import TransformerPreprocessor
from tests.lab.saving import save

from .support import LEARNING, transformer_config, write_bert

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
HIDDEN = 16
OPTIONS = {"max_length": 12, "pooling": "mean", "dropout": 0.0}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Folder of a BERT with random weights that knows eight words."""
    folder = tmp_path_factory.mktemp("bert")
    write_bert(folder, HIDDEN)
    return folder


@pytest.fixture
def config(bert, tmp_path):
    return transformer_config(bert, tmp_path / "data")


def pooled_by_hand(bert, text, pooling):
    """One text alone, without padding."""
    model = transformers.AutoModel.from_pretrained(bert).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    with torch.no_grad():
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return states[0] if pooling == "cls" else states.mean(0)


@pytest.mark.parametrize("file", ["vocab.txt", "config.json", "tokenizer_config.json", "weights"])
def test_what_reads_the_data_is_part_of_it(config, bert, tmp_path, file):
    """A run goes on with the tokenizer that it began with; it has weights of its own."""
    folder = shutil.copytree(bert, tmp_path / "bert")
    copied = dataclasses.replace(config, encoder=str(folder))
    before = digest(load(copied))
    assert before == digest(load(config))
    path = folder / file
    if file == "vocab.txt":
        words = path.read_text().split()
        path.write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n")
    elif file == "weights":
        (folder / "model.safetensors").unlink()
        (folder / "training_args.bin").touch()
    else:
        settings = json.loads(path.read_text()) if path.is_file() else {}
        change = {"hidden_act": "relu"} if file == "config.json" else {"do_lower_case": False}
        path.write_text(json.dumps(settings | change))
    assert (digest(load(copied)) == before) == (file == "weights")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_changes_nothing_and_the_output_is_the_bags(bert, pooling):
    preprocessor = TransformerPreprocessor.open(bert, **{**OPTIONS, "pooling": pooling})
    encoder = preprocessor.encoder(CPU).eval()
    texts = ["red things", "new", "old big small round thing", ""]
    with torch.no_grad():
        x = encoder(preprocessor.read(texts))
    assert x.shape == (4, HIDDEN + CONSTANTS)
    assert encoder.dim == HIDDEN + CONSTANTS
    assert torch.equal(x[:, HIDDEN:], torch.ones(4, CONSTANTS))
    for text, row in zip(texts, x, strict=True):
        by_hand = torch.nn.functional.layer_norm(pooled_by_hand(bert, text, pooling), (HIDDEN,))
        torch.testing.assert_close(
            row[:HIDDEN], by_hand * OUTPUT_NORM / HIDDEN**0.5, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_plain_output_is_the_pooled_vector(bert, pooling):
    options = {**OPTIONS, "pooling": pooling, "dropout": 0.5, "output_layer": "plain"}
    preprocessor = TransformerPreprocessor.open(bert, **options)
    encoder = preprocessor.encoder(CPU)
    texts = ["red things", "old big small round thing"]
    assert preprocessor.sizes()[0] == encoder.dim == HIDDEN
    assert preprocessor.settings()["output_layer"] == "plain"
    assert not any(name.startswith("output.") for name in encoder.state_dict())
    with torch.no_grad():
        encoder.transformer.eval()
        x = encoder.eval()(preprocessor.read(texts))
        encoder.output.train()
        dropped = encoder(preprocessor.read(texts))
    for text, row in zip(texts, x, strict=True):
        torch.testing.assert_close(row, pooled_by_hand(bert, text, pooling), rtol=1e-4, atol=1e-5)
    # What is dropped is zero, the rest grows as much.
    kept = dropped != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(dropped[kept], 2 * x[kept])


def test_long_texts_are_cut(bert):
    preprocessor = TransformerPreprocessor.open(bert, **OPTIONS)
    tokens = preprocessor.read(["red " * 100])
    assert tokens.ids.shape == (1, 12)


def test_it_trains_in_bf16_with_kahan_summation(config):
    config = dataclasses.replace(config, encoder_precision="kahan")
    data = load(config)
    encoder = build_encoder(config, data, "fp8", 0, CPU)
    optimizer = build_optimizer(config, encoder, "fp8", 0)
    assert {p.dtype for p in encoder.parameters()} == {torch.bfloat16}
    assert {g["precision"] for g in optimizer.param_groups} == {"kahan"}
    assert isinstance(optimizer, optim.AdamW)
    # Activations are wide where there are no BF16 units.
    assert encoder(data.preprocessor.read(["red"])).dtype == torch.float32
    wide = build_encoder(config, data, "fp32", 0, CPU)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    # Nothing that never gets a gradient is carried along.
    encoder(data.preprocessor.read(["red thing", "new"])).square()[:, :3].sum().backward()
    missing = [n for n, p in encoder.named_parameters() if p.grad is None]
    assert missing == []


def test_narrow_weights_give_what_they_are_worth(bert, config):
    """BF16 parameters, wide activations: the same as the FP32 model with rounded weights."""
    preprocessor = TransformerPreprocessor.open(bert, **OPTIONS)
    narrow, wide = preprocessor.encoder(CPU).eval(), preprocessor.encoder(CPU).eval()
    for a, b in zip(narrow.parameters(), wide.parameters(), strict=True):
        a.data = a.data.bfloat16()
        b.data = b.data.bfloat16().float()
    tokens = preprocessor.read(["red old thing", "new"])
    with torch.no_grad():
        torch.testing.assert_close(narrow(tokens), wide(tokens), rtol=1e-5, atol=1e-5)


def test_it_learns_the_words(config):
    config = dataclasses.replace(config, **LEARNING)
    assert run(config, load(config), "fp8", 0).metrics["P@1"] > 80


def test_the_same_seed_gives_the_same_numbers(config):
    data = load(config)
    results = [run(config, data, "fp8", seed) for seed in (3, 3, 4)]
    assert results[0].metrics == results[1].metrics
    assert results[0].train_loss == results[1].train_loss != results[2].train_loss


def test_dropout_is_on_while_training(config):
    work = build(config, load(config), "fp8", 0, CPU)
    assert all(module.training for module in work.model.modules())


@pytest.mark.parametrize("precision", ["fp8", "fp32"])
def test_a_saved_model_needs_the_folder_no_more(config, bert, precision, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(bert, moved)
    config = dataclasses.replace(config, encoder=str(moved), epochs=1, precision=(precision,))
    data = load(config)
    work = build(config, data, precision, 0, CPU)
    work.loss(False).backward()
    work.optimizer.step()
    name = save(tmp_path / "run", "xmc", precision, 0, work)
    texts = ["red thing", "", "unknown"]
    work.model.eval()
    with torch.no_grad():
        _, labels = work.model["head"].topk(work.model["encoder"](data.preprocessor.read(texts)), 3)
    shutil.rmtree(moved)
    loaded = load_named(tmp_path / "run", name, "stored", "cpu")
    assert torch.equal(loaded.topk(texts, 3)[1], labels)


def test_train_and_predict_from_the_command_line(config, bert, tmp_path, capfdbinary):
    out, texts = tmp_path / "run", tmp_path / "texts.txt"
    texts.write_text("red thing\n")
    options = ["--data", str(config.data), "--encoder", str(bert), "--max-length=12", "--epochs=1"]
    small = ["--batch-size=8", "--precision=bf16", "--out", str(out), "--pooling=cls"]
    assert main(["train", "xmc", *options, *small]) == 0
    assert json.loads((out / "config.json").read_text())["encoder_lr"] == 5e-5
    capfdbinary.readouterr()
    assert main(["predict", str(out), str(texts)]) == 0
    assert len(json.loads(capfdbinary.readouterr().out)["labels"]) == 5


def test_workers_share_the_transformer(config, tmp_path):
    config = dataclasses.replace(config, precision=("fp32", "fp8"), epochs=1)
    out = compare(config, out=tmp_path / "run", jobs=2).directory
    for precision in config.precision:
        load_named(out, ModelName(precision, 0), "stored", "cpu")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "is neither bag nor a folder"),
        (lambda f: (f / "config.json").unlink(), "holds no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "holds no config.json that transformers"),
        (lambda f: (f / "config.json").write_text("{}"), "holds no config.json that transformers"),
        (
            lambda f: (f / "vocab.txt").unlink(),
            "holds no tokenizer: expected one of tokenizer.json",
        ),
    ],
)
def test_folders_that_cannot_be_used(bert, config, tmp_path, spoil, message):
    folder = tmp_path / "bert"
    shutil.copytree(bert, folder)
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load(dataclasses.replace(config, encoder=str(folder)))


@pytest.mark.parametrize(("name", "value"), [("width", 256), ("layers", 0), ("max_terms", 500_000)])
def test_sizes_of_the_bag_contradict_a_transformer(bert, name, value, tmp_path, capsys):
    """Even its defaults, given by hand."""
    message = f"{name}={value} and encoder={bert} contradict each other"
    with pytest.raises(ValueError, match=re.escape(message)):
        XMCConfig(encoder=str(bert), **{name: value})
    option = f"--{name.replace('_', '-')}={value}"
    out = tmp_path / "run"
    assert main(["train", "xmc", "--encoder", str(bert), option, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
    assert getattr(XMCConfig(**{name: value}), name) == value


def test_sizes_of_the_bag_are_none_with_a_transformer(config):
    assert (config.width, config.layers, config.max_terms) == (None, None, None)
    again = dataclasses.replace(config, epochs=3)
    assert again.width is None
    # Back to the bag, they have their defaults.
    bag = dataclasses.replace(config, encoder="bag", max_length=None, pooling=None)
    assert (bag.width, bag.layers, bag.max_terms) == (256, 0, 500_000)


@pytest.mark.parametrize("option", [{"max_length": 12}, {"pooling": "cls"}], ids=str)
def test_options_of_a_transformer_contradict_the_bag(option):
    ((name, value),) = option.items()
    message = f"{name}={value} and encoder=bag .* other: {name} belongs to a transformer"
    with pytest.raises(ValueError, match=message):
        XMCConfig(**option)
    assert getattr(XMCConfig(), name) is None


def test_a_folder_without_weights(bert, config, tmp_path):
    folder = tmp_path / "bert"
    shutil.copytree(bert, folder)
    (folder / "model.safetensors").unlink()
    config = dataclasses.replace(config, encoder=str(folder))
    with pytest.raises(ValueError, match="holds no transformer that transformers can read"):
        build(config, load(config), "fp8", 0, CPU)


def test_texts_longer_than_the_transformer_reads(config):
    with pytest.raises(ValueError, match=r"max_length=25 is above the 24 tokens"):
        load(dataclasses.replace(config, max_length=25))


def test_without_the_package_the_extra_is_named(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs the package .*: pip install transformers$"):
        load(config)


@pytest.mark.skipif(
    "SUBULP_TEST_TRANSFORMER" not in os.environ,
    reason="SUBULP_TEST_TRANSFORMER names no folder of a transformer such as all-MiniLM-L6-v2",
)
def test_a_real_transformer(config):
    folder = Path(os.environ["SUBULP_TEST_TRANSFORMER"])
    config = dataclasses.replace(config, encoder=str(folder), epochs=10, encoder_lr=5e-5)
    preprocessor = TransformerPreprocessor.open(folder, **OPTIONS)
    with torch.no_grad():
        near, same, far = preprocessor.encoder(CPU).eval()(
            preprocessor.read(["a small cat", "a little kitten", "the tax law of 1923"])
        )
    assert torch.dot(near, same) > torch.dot(near, far)
    summary = run(config, load(config), "fp8", 0)
    assert summary.metrics["P@1"] > 50


def test_checkpoints_of_activations_change_no_bit(config):
    results = []
    for checkpointing in (False, True):
        given = {"dropout": 0.2, "epochs": 2, "gradient_checkpointing": checkpointing}
        changed = dataclasses.replace(config, precision=("fp8",), **given)
        data = load(changed)
        assert (
            build(changed, data, "fp8", 0, CPU)
            .model["encoder"]
            .transformer.is_gradient_checkpointing
            == checkpointing
        )
        results.append(run(changed, data, "fp8", 0).metrics)
    assert results[0] == results[1]


def test_checkpoints_of_activations_are_a_transformers():
    with pytest.raises(ValueError, match="gradient_checkpointing has no effect on encoder=bag"):
        XMCConfig(gradient_checkpointing=True)


def test_a_mixture_in_the_folder_is_kept(bert, tmp_path):
    """As subulp.integrations.transformers notes it in a model's configuration."""
    folder = tmp_path / "mixed"
    shutil.copytree(bert, folder)
    model = transformers.AutoModel.from_pretrained(bert)
    report = convert_to_mor(model, nn.MoR(partition=(8, 8)), quiet=True)
    model.save_pretrained(folder)
    config = transformer_config(folder, tmp_path / "data")
    for pretrained in (True, False):
        preprocessor = TransformerPreprocessor.open(folder, pretrained=pretrained, **OPTIONS)
        encoder = preprocessor.encoder(CPU)
        found = [n for n, m in encoder.transformer.named_modules() if isinstance(m, nn.MoRLinear)]
        assert found == [name for name in report.converted if not name.startswith("pooler")]
    compare(dataclasses.replace(config, precision=("fp8",), epochs=1), out=tmp_path / "run")
    loaded = load_named(tmp_path / "run", ModelName("fp8", 0), "stored", "cpu")
    assert loaded.topk(["red thing"], 2)[1].shape == (1, 2)

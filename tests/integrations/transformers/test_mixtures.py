"""Mixtures in the configuration of a saved model: converted again when it is loaded."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

from subulp import nn
from subulp.integrations.transformers import MoRConfig, convert_to_mor, optimizer_cls_and_kwargs

from .test_trainer import Examples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

IDS = torch.arange(8)[None]
MOR = nn.MoR("subtensor-2way", partition=(16, 16))


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, **sizes, **heads)
    # Not model.to(dtype), which casts the frequencies of the positions too: they are not saved.
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def gpt2(dtype=torch.float32):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def layers(model):
    return {name: module.mor for name, module in model.named_modules() if hasattr(module, "mor")}


@pytest.mark.parametrize("new", [llama, gpt2])
@pytest.mark.parametrize("options", [{}, {"heads": True, "first": 1}])
def test_saved_and_loaded(tmp_path, new, options):
    model = new(torch.bfloat16)
    report = convert_to_mor(model, MOR, quiet=True, **options)
    model.save_pretrained(tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert kept["quant_method"] == "subulp_mor"
    assert kept["layers"] == list(report.converted)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert layers(loaded) == layers(model)
    assert set(layers(loaded).values()) == {MOR}
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        drawn = [
            m.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
            for m in (model, loaded)
        ]
    assert torch.equal(*drawn)
    # And once more, from what was loaded.
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert layers(again) == layers(model)


def test_converted_while_it_is_loaded(tmp_path):
    plain = llama()
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MoRConfig(MOR))
    convert_to_mor(plain, MOR, quiet=True)
    assert layers(loaded) == layers(plain)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, plain(IDS).logits)
    # Its weights are ordinary ones.
    loaded.half().float()


def test_loaded_models_train(tmp_path):
    model = gpt2(torch.bfloat16)
    convert_to_mor(model, MOR, quiet=True)
    model.save_pretrained(tmp_path / "model")
    values = []
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "model")):
        args = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, report_to="none", use_cpu=True, disable_tqdm=True
        )
        chosen = optimizer_cls_and_kwargs(args, precision="collage-plus")
        Trainer(each, args, train_dataset=Examples(), optimizer_cls_and_kwargs=chosen).train()
        values.append([p.detach() for p in each.parameters()])
    assert all(map(torch.equal, *values))


def test_what_cannot_be_kept_is_refused(tmp_path):
    model = llama()
    convert_to_mor(model, MOR, quiet=True)
    with pytest.raises(ValueError, match="has a quantization_config already"):
        convert_to_mor(model, MOR, quiet=True)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["layers"][0] = "model.layers.9.mlp"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no layer 'model\.layers\.9\.mlp'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    config["quantization_config"]["mor"] = {"granularity": "fine"}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="recipe='fine' is unknown"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not 'subulp_mor'"):
        MoRConfig(MOR, quant_method="awq")

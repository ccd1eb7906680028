"""Conversion of whole models: what is reached, what is left and why, and the way back."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F

from subulp import diagnostics, nn
from subulp.nn import MoR, MoRLinear, convert_from_mor, convert_to_mor
from subulp.nn.mor_linear import MixtureLayer

MOR = MoR("subtensor-2way", "subchannel-32")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layers_of(model: torch.nn.Module) -> set[str]:
    """Names of the products that were quantised since the last look."""
    found = {name for name, m in model.named_modules() if isinstance(m, MixtureLayer) and m.mix}
    for module in model.modules():
        if isinstance(module, MixtureLayer):
            module.mix.clear()
    return found


def check_model(model, ids, products: set[str]) -> None:
    """It multiplies narrow operands in training and evaluation; copies do, and the inverse not."""
    before, plain = copy.deepcopy(model.state_dict()), model(ids).logits
    convert_to_mor(model, MOR, quiet=True)
    narrow = model(ids).logits
    error = (narrow - plain).abs().max() / plain.abs().max()
    assert 1e-5 < error < 0.2
    assert layers_of(model) == products
    model.train()
    model(ids, labels=ids).loss.backward()
    of_gradients = {o.layer for o in diagnostics.representation_mix(model).operands}
    assert of_gradients == products
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(ids).logits, narrow)
    for name, p in model.state_dict().items():
        assert name.endswith("_extra_state") or torch.equal(p, before[name])
    model.load_state_dict(before)
    convert_from_mor(model)
    assert torch.equal(model(ids).logits, plain)
    assert model.state_dict().keys() == before.keys()


def test_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 64, (2, 8))
    kinds = type(model.transformer.h[0].mlp.c_fc)
    parts = "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"
    products = {f"transformer.h.{i}.{part}" for i in range(2) for part in parts}
    again = copy.deepcopy(model)
    report = convert_to_mor(again, MOR, quiet=True)
    assert report.converted == dict.fromkeys(report.converted, "Conv1D")
    assert set(report.converted) == products
    assert report.left["lm_head"] == "an output head: heads=True converts it"
    assert isinstance(again.transformer.h[0].mlp.c_fc, kinds)
    check_model(model, ids, products)
    assert type(model.transformer.h[0].mlp.c_fc) is kinds


def test_llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    again = copy.deepcopy(model)
    report = convert_to_mor(again, MOR, first=1, last=1, quiet=True)
    assert all(name.startswith("model.layers.1.") for name in report.converted)
    assert len(report.converted) == 7
    assert report.left["lm_head"] == "an output head: heads=True converts it"
    assert report.left["model.layers.0.mlp.up_proj"] == "one of the first 1 blocks of model.layers"
    assert report.left["model.layers.2.mlp.up_proj"] == "one of the last 1 blocks of model.layers"
    assert "Embedding" in report.left["model.embed_tokens"]
    again = copy.deepcopy(model)
    assert "lm_head" in convert_to_mor(again, MOR, heads=True, quiet=True).converted
    parts = (
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
    products = {f"model.layers.{i}.{part}" for i in range(3) for part in parts}
    check_model(model, torch.randint(0, 64, (2, 8)), products)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_experts(kind):
    """Of matrices (out, in) in a linear layer, and (in, out) in a product."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, num_local_experts=3, num_experts_per_tok=2,
        head_dim=16,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    products = {f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"}
    experts = "model.layers.0.mlp.experts"
    products |= {f"{experts}.{p}_proj_product" for p in ("gate_up", "down")}
    report = convert_to_mor(copy.deepcopy(model), MOR, quiet=True)
    assert report.converted[experts] == f"{kind}Experts"
    ids = torch.randint(0, 64, (2, 12))
    check_model(model, ids, products)
    convert_to_mor(model, MOR, quiet=True)
    block = model.model.layers[0].mlp
    x = torch.randn(2, 12, 32)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(block, backend="aot_eager")(x), block(x))


class CopiedExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Parameter(torch.randn(3, 4, 4))

    def plain(self, x):
        return F.linear(x, self.up_proj[0].clone())

    # As Transformers chooses between definitions.
    @functools.wraps(plain)
    def forward(self, x):
        return self.plain(x)


def test_experts_that_go_another_way_are_refused():
    module = CopiedExperts()
    convert_to_mor(module, MOR, quiet=True)
    with pytest.raises(RuntimeError, match="takes its experts' matrices to clone"):
        module(torch.randn(2, 4))
    convert_from_mor(module)
    assert module(torch.randn(2, 4)).shape == (2, 4)


def attention(options, state=None) -> torch.nn.MultiheadAttention:
    module = torch.nn.MultiheadAttention(8, 2, **options)
    if state is None:
        for p in module.parameters():
            torch.nn.init.normal_(p, std=0.3)
    else:
        module.load_state_dict(state)
    return module


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 5}], ids=str)
def test_attention_is_torchs_but_for_its_operands(monkeypatch, batch_first, batched, sizes):
    """With plain products in their places, all arguments and results are those of torch."""
    monkeypatch.setattr(MixtureLayer, "multiply", lambda _, x, w, b, **_keep: F.linear(x, w, b))
    torch.manual_seed(0)
    queries, keys, batch = 4, 5, 3

    def drawn(length: int, size: int) -> torch.Tensor:
        shape = (batch, length) if batch_first else (length, batch)
        return torch.randn(*(shape if batched else (length,)), size)

    q = drawn(queries, 8)
    k, v = drawn(keys, sizes.get("kdim", 8)), drawn(keys, sizes.get("vdim", 8))
    ends = (torch.arange(keys) >= 3).expand(batch, keys)
    paddings = None, ends if batched else ends[0]
    of_heads = torch.randn((batch if batched else 1) * 2, queries, keys)
    masks = None, torch.ones(queries, keys).triu(2).bool(), torch.randn(queries, keys), of_heads
    for bias, bias_kv, zero in itertools.product([False, True], repeat=3):
        options = {
            "bias": bias, "add_bias_kv": bias_kv, "add_zero_attn": zero,
            "batch_first": batch_first, **sizes,
        }  # fmt: skip
        plain = attention(options)
        mine = attention(options, plain.state_dict())
        convert_to_mor(mine, MOR, quiet=True)
        for padding, mask, need, average in itertools.product(
            paddings, masks, [False, True], [False, True]
        ):
            arguments = {
                "key_padding_mask": padding, "attn_mask": mask, "need_weights": need,
                "average_attn_weights": average,
            }  # fmt: skip
            with warnings.catch_warnings():
                # Of masks of two types, which torch would rather not have.
                warnings.simplefilter("ignore")
                expected = plain(q, k, v, **arguments)
            torch.testing.assert_close(mine(q, k, v, **arguments), expected)
            causal = masks[1]
            torch.testing.assert_close(
                mine(q, k, v, attn_mask=causal, is_causal=True),
                plain(q, k, v, attn_mask=causal, is_causal=True),
            )


def test_attention_alone():
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(3, 10, 64, requires_grad=True)
    plain, _ = module(x, x, x)
    convert_to_mor(module, MOR, quiet=True)
    narrow, shares = module(x, x, x)
    assert 1e-4 < (narrow - plain).abs().max() < 0.1
    assert shares.shape == (3, 10, 10)
    assert layers_of(module) == {"q_proj", "k_proj", "v_proj", "out_proj"}
    narrow.sum().backward()
    with torch.no_grad():
        assert torch.equal(module(x, x, x)[0], narrow)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(2, 2\)"):
        module(x, x, x, attn_mask=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="key_padding_mask has shape"):
        module(x, x, x, key_padding_mask=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"attn_mask has dtype torch\.int64"):
        module(x, x, x, attn_mask=torch.zeros(10, 10).long())
    with pytest.raises(ValueError, match=r"query, key and value are .* one batch size"):
        module(x, x[:1], x[:1])
    with torch.autocast("cpu", torch.bfloat16):
        y, shares = module(x, x, x, attn_mask=torch.zeros(10, 10))
        assert y.dtype == shares.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="is_causal=True needs attn_mask"):
        module(x, x, x, is_causal=True)
    assert convert_from_mor(module) == [""]
    assert torch.equal(module(x, x, x)[0], plain)


PARTS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
    "linear1",
    "linear2",
)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(norm_first):
    """Also in eval(), where torch has a fused path past all layers, with and without padding."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        64, 4, 96, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    model = torch.nn.TransformerEncoder(layer, 2)
    x = torch.randn(3, 10, 64)
    padding = torch.arange(10).expand(3, 10) >= torch.tensor([10, 7, 4])[:, None]
    inputs = {}, {"src_key_padding_mask": padding}
    model.eval()
    with torch.no_grad():
        plain = [model(x, **kwargs) for kwargs in inputs]
    report = convert_to_mor(model, MOR, quiet=True)
    assert len(report.converted) == 6
    assert not report.left
    products = {f"layers.{i}.{part}" for i in range(2) for part in PARTS}
    for training in (True, False):
        model.train(training)
        for kwargs, expected in zip(inputs, plain, strict=True):
            for context in (torch.no_grad, torch.enable_grad):
                with context():
                    y = model(x, **kwargs)
                assert layers_of(model) == products
                assert 1e-3 < (y - expected)[:, :4].abs().max() < 0.5
    convert_from_mor(model)
    model.eval()
    with torch.no_grad():
        for kwargs, expected in zip(inputs, plain, strict=True):
            assert torch.equal(model(x, **kwargs), expected)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_part_of_a_transformer():
    """The fused path is given up wherever any of its layers is converted."""
    torch.manual_seed(0)
    model = torch.nn.Transformer(32, 2, 1, 1, 48, dropout=0.0, batch_first=True).eval()
    convert_to_mor(model, MOR, filter=lambda name, _: name.endswith("linear1"), quiet=True)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        model(x, x)
    assert layers_of(model) == {"encoder.layers.0.linear1", "decoder.layers.0.linear1"}
    convert_to_mor(model, MOR, filter=lambda name, _: not name.endswith("linear1"), quiet=True)
    with torch.no_grad():
        model(x, x)
    of_decoder = [part.replace("self_attn", "multihead_attn") for part in PARTS[:4]]
    assert layers_of(model) == {
        *(f"encoder.layers.0.{part}" for part in PARTS),
        *(f"decoder.layers.0.{part}" for part in (*PARTS, *of_decoder)),
    }


def test_compiled_attention_is_one_graph():
    torch.manual_seed(0)
    module = torch.nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True)
    convert_to_mor(module, MOR, quiet=True)
    x = torch.randn(2, 5, 32)
    torch._dynamo.reset()
    y = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(y, module(x))


class MyLinear(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_the_report(capsys):
    body = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(5, 8),
            "body": body,
            "mine": MyLinear(8, 8),
            "rnn": torch.nn.LSTM(8, 8),
            "classifier": torch.nn.Linear(8, 3),
            "norm": torch.nn.LayerNorm(8),
        }
    )
    report = convert_to_mor(model, MOR, filter=lambda name, _: name != "body.1")
    assert list(report.converted) == ["body.0", "body.2", "body.3"]
    assert report.left == {
        "embed": "Embedding: it looks up, and multiplies nothing",
        "mine": "MyLinear, a subclass of Linear: it may compute something else",
        "rnn": "LSTM: no linear layer",
        "classifier": "an output head: heads=True converts it",
        "body.1": "filter= leaves it out",
    }
    assert capsys.readouterr().out == f"{report}\n"
    assert "  Linear: body.0,2-3\n" in str(report)


def test_layers_that_are_no_plain_ones_say_why():
    model = torch.nn.ModuleDict({"lazy": torch.nn.LazyLinear(4), "normed": torch.nn.Linear(4, 4)})
    torch.nn.utils.parametrizations.weight_norm(model["normed"])
    with pytest.raises(ValueError, match="'normed' is ParametrizedLinear, whose weight is comp"):
        convert_to_mor(model, MOR)
    model["plain"] = torch.nn.Linear(4, 4)
    report = convert_to_mor(model, MOR, quiet=True)
    assert list(report.converted) == ["plain"]
    assert report.left["lazy"] == "LazyLinear, which has no sizes yet: run the model once before"


def test_bad_arguments_change_nothing():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    for arguments, message in (
        ({"first": -1}, "first=-1 is out of range"),
        ({"last": 1.0}, r"last=1\.0 is out of range"),
        ({"first": True}, "first=True is out of range"),
        ({"first": 2, "last": 1}, "leave nothing: the model has 3 blocks"),
        ({"filter": lambda *_: False}, "filter= leaves it out"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_to_mor(model, MOR, quiet=True, **arguments)
    with pytest.raises(ValueError, match="has no ModuleList or Sequential"):
        convert_to_mor(torch.nn.Linear(3, 3), MOR, first=1)
    with pytest.raises(ValueError, match="Sequential has no converted layer"):
        convert_from_mor(model)
    assert all(type(layer) is torch.nn.Linear for layer in model)


def test_layers_go_back_to_what_they_were():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), nn.Linear(3, 3), MoRLinear(3, 3))
    before = dict(vars(model[0]))
    convert_to_mor(model, MOR, filter=lambda name, _: name != "2", quiet=True)
    assert convert_from_mor(model) == ["0", "1", "2"]
    assert [type(layer) for layer in model] == [torch.nn.Linear, nn.Linear, nn.Linear]
    assert vars(model[0]).keys() == before.keys()

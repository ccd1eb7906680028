import pytest
import torch

from subulp.lab.tasks.lm.models import (
    BERT,
    GPT,
    IGNORED,
    Shape,
    build,
    rotated,
    token_loss,
    use_bf16,
)

SHAPE = Shape(vocabulary=11, context=8, width=16, layers=2, heads=2)


def model(shape=SHAPE, seed=0):
    torch.manual_seed(seed)
    return GPT(shape)


def test_a_position_sees_only_what_came_before():
    gpt = model().eval()
    ids = torch.randint(11, (2, 8))
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    a, b = gpt(ids), gpt(changed)
    assert a.shape == (2, 8, 11)
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=0, atol=0)
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_the_first_loss_is_that_of_a_guess():
    loss = model().loss(torch.randint(11, (4, 8)), torch.randint(11, (4, 8)))
    torch.testing.assert_close(loss.item(), torch.tensor(11.0).log().item(), rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_narrow_parameters_compute_like_their_decoded_values(dtype):
    narrow = model().to(dtype)
    wide = model()
    wide.load_state_dict({k: v.float() for k, v in narrow.state_dict().items()})
    ids, targets = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    a, b = narrow.loss(ids, targets), wide.loss(ids, targets)
    torch.testing.assert_close(a, b)
    a.backward()
    assert {p.grad.dtype for p in narrow.parameters()} == {dtype}


def test_a_tied_head_shares_the_table():
    gpt = model(Shape(11, 8, 16, 1, 2, tie_head=True)).to(torch.bfloat16)
    assert gpt.head.weight is gpt.tokens.weight
    gpt.loss(torch.randint(11, (2, 8)), torch.randint(11, (2, 8))).backward()
    assert gpt.tokens.weight.grad is not None


def test_residual_projections_start_smaller_the_deeper_the_model():
    gpt = model(Shape(11, 8, 64, 8, 2))
    torch.testing.assert_close(
        gpt.blocks[0].mlp.down.weight.std().item(), 0.02 / 4, rtol=0.05, atol=0
    )
    torch.testing.assert_close(gpt.blocks[0].mlp.up.weight.std().item(), 0.02, rtol=0.05, atol=0)


# ------------------------------------------------------------------ against other implementations


def llama(tie_head=False):
    torch.manual_seed(0)
    return build(Shape(11, 8, 24, 2, 3, model="llama", tie_head=tie_head))


def hugging_face_llama(own):
    transformers = pytest.importorskip("transformers")
    shape = Shape(11, 8, 24, 2, 3, model="llama")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=shape.gated_width,
        num_hidden_layers=2,
        num_attention_heads=3,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    other = transformers.LlamaForCausalLM(config).eval()
    names = {
        "tokens.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    state = {names[n]: p for n, p in own.state_dict().items() if n in names}
    for i, block in enumerate(own.blocks):
        query, key, value = block.attention.in_.weight.chunk(3)
        at = f"model.layers.{i}."
        state |= {
            at + "self_attn.q_proj.weight": query,
            at + "self_attn.k_proj.weight": key,
            at + "self_attn.v_proj.weight": value,
            at + "self_attn.o_proj.weight": block.attention.out.weight,
            at + "mlp.gate_proj.weight": block.mlp.gate.weight,
            at + "mlp.up_proj.weight": block.mlp.up.weight,
            at + "mlp.down_proj.weight": block.mlp.down.weight,
            at + "input_layernorm.weight": block.attention_norm.weight,
            at + "post_attention_layernorm.weight": block.mlp_norm.weight,
        }
    other.load_state_dict(state)
    return other


def test_llama_computes_as_transformers_does():
    own = llama().eval()
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(11, (2, 8))
    torch.testing.assert_close(own(ids), hugging_face_llama(own)(ids).logits)


def test_bert_computes_as_transformers_does():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    own = BERT(Shape(11, 8, 24, 2, 3, model="bert")).eval()
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=8,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    other = transformers.BertForMaskedLM(config).eval()
    state = {
        "bert.embeddings.word_embeddings.weight": own.tokens.weight,
        "bert.embeddings.position_embeddings.weight": own.positions.weight,
        # All tokens are of one type here.
        "bert.embeddings.token_type_embeddings.weight": torch.zeros(1, 24),
        "cls.predictions.bias": torch.zeros(11),
        "cls.predictions.decoder.bias": torch.zeros(11),
        "cls.predictions.decoder.weight": own.head.weight,
    }

    def take(to, module):
        state[f"{to}.weight"], state[f"{to}.bias"] = module.weight, module.bias

    take("bert.embeddings.LayerNorm", own.embedding_norm)
    take("cls.predictions.transform.dense", own.transform)
    take("cls.predictions.transform.LayerNorm", own.norm)
    for i, block in enumerate(own.blocks):
        at = f"bert.encoder.layer.{i}."
        weights, biases = (
            t.chunk(3) for t in (block.attention.in_.weight, block.attention.in_.bias)
        )
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            state[f"{at}attention.self.{name}.weight"] = weight
            state[f"{at}attention.self.{name}.bias"] = bias
        take(f"{at}attention.output.dense", block.attention.out)
        take(f"{at}attention.output.LayerNorm", block.attention_norm)
        take(f"{at}intermediate.dense", block.mlp.up)
        take(f"{at}output.dense", block.mlp.down)
        take(f"{at}output.LayerNorm", block.mlp_norm)
    missing = other.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert not [name for name in missing.missing_keys if "position_ids" not in name]
    ids = torch.randint(11, (2, 8))
    torch.testing.assert_close(own(ids), other(ids).logits)


@pytest.mark.parametrize("kind", ["gpt", "llama", "bert"])
@pytest.mark.parametrize("tie_head", [False, True])
def test_parameters_are_counted(kind, tie_head):
    shape = Shape(11, 8, 24, 2, 3, model=kind, tie_head=tie_head)
    assert shape.parameters == sum(p.numel() for p in build(shape).parameters())


def test_rotary_positions_depend_on_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 16, 8)
    scores = rotated(query) @ rotated(key).mT
    diagonals = [scores[0, 0].diagonal(offset) for offset in range(-15, 16)]
    assert all(torch.allclose(d, d[:1].expand_as(d), atol=1e-5) for d in diagonals)
    torch.testing.assert_close(scores[0, 0, 3, 3], (query * key).sum(-1)[0, 0, 3])


def test_bert_sees_both_directions():
    torch.manual_seed(0)
    bert = build(Shape(11, 8, 16, 2, 2, model="bert")).eval()
    ids = torch.randint(11, (2, 8))
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    assert not torch.allclose(bert(ids)[:, 0], bert(changed)[:, 0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gpt", "llama", "bert"])
def test_bf16_activations_reach_every_layer(kind):
    own = build(Shape(11, 8, 16, 1, 2, model=kind)).to(torch.bfloat16)
    use_bf16(own)
    seen = []
    for module in own.blocks.modules():
        module.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    own.loss(torch.randint(11, (2, 8)), torch.randint(11, (2, 8))).backward()
    assert set(seen) == {torch.bfloat16}


def test_ignored_targets_have_no_part_in_the_loss():
    logits, targets = torch.randn(2, 4, 11), torch.randint(11, (2, 4))
    some = targets.clone()
    some[:, 1:] = IGNORED
    torch.testing.assert_close(token_loss(logits, some), token_loss(logits[:, :1], targets[:, :1]))

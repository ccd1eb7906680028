"""Layers encode a weight once, and anew wherever it is another: by C++ those in evaluation."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from subulp import nn, optim
from subulp.nn import MoR, MoRLinear
from subulp.nn.kept_weight import KeptWeight
from subulp.nn.mor_linear import mor_linear
from subulp.numerics import metrics
from subulp.ops.mixture import KeptEncoding
from tests.ops.support import environment, interpreted


@pytest.fixture
def encoded(monkeypatch):
    """The shapes of the weights that layers encode in evaluation."""
    found = []
    get = KeptWeight.get

    def counted(self, weight, mor, encode, role="weight"):
        def noted(matrix, kept):
            found.append(tuple(matrix.shape))
            return encode(matrix, kept)

        return get(self, weight, mor, noted, role)

    monkeypatch.setattr(KeptWeight, "get", counted)
    return found


def layer_and_input(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return MoRLinear(48, 32, dtype=dtype).eval(), torch.randn(5, 48)


@torch.no_grad()
def test_a_weight_is_encoded_once(encoded):
    layer, x = layer_and_input()
    expected = mor_linear(x, layer.weight, layer.bias, mor=layer.mor)
    for _ in range(3):
        assert torch.equal(layer(x), expected)
        assert {"input", "weight"} <= layer.mix.keys()
        layer.mix.clear()
    assert encoded == [(32, 48)]


EDITS = [
    lambda layer: layer.weight.mul_(2),
    lambda layer: layer.weight.data.mul_(2),
    lambda layer: layer.weight.data.view(torch.int16).numpy().__setitem__((3, 4), 77),
    lambda layer: layer.weight.data.copy_(layer.weight.flip(0)),
    lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight + 1)),
    lambda layer: layer.load_state_dict({"weight": layer.weight * 2, "bias": layer.bias}),
    lambda layer: layer.float(),
    lambda layer: setattr(layer, "mor", MoR("subtensor-2way", "channel")),
]


@torch.no_grad()
@pytest.mark.parametrize("edit", EDITS)
def test_every_change_is_noticed(edit, encoded):
    layer, x = layer_and_input()
    layer(x)
    edit(layer)
    expected = mor_linear(x, layer.weight, layer.bias, mor=layer.mor)
    assert torch.equal(layer(x), expected)
    assert len(encoded) == 2


def test_training_keeps_nothing(encoded):
    layer, x = layer_and_input()
    with torch.no_grad():
        layer(x)
    assert layer.kept._kept is not None
    layer(x).sum().backward()
    assert layer.kept._kept is None
    optim.SGD(layer.parameters(), lr=0.1).step()
    layer.train()
    with torch.no_grad():
        layer(x)
    assert layer.kept._kept is None
    assert len(encoded) == 1


@torch.no_grad()
def test_copies_begin_anew():
    layer, x = layer_and_input()
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.kept._kept is None
        assert torch.equal(other(x), expected)
    assert "kept" not in "".join(layer.state_dict())


@torch.no_grad()
def test_under_autocast_and_transposed(encoded):
    layer, x = layer_and_input(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            found = layer(x)
        expected = mor_linear(x, layer.weight, layer.bias, mor=layer.mor)
    assert torch.equal(found, expected)
    assert len(encoded) == 1
    assert torch.equal(layer(x), mor_linear(x, layer.weight, layer.bias, mor=layer.mor))
    assert len(encoded) == 2


@torch.no_grad()
def test_a_model_that_was_converted_back_has_none():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8)).eval()
    nn.convert_to_mor(model, MoR())
    model(torch.randn(2, 8))
    nn.convert_from_mor(model)
    assert not hasattr(model[0], "kept")


@torch.no_grad()
def test_compiled_layers_keep_theirs_too(encoded):
    layer, x = layer_and_input()
    torch._dynamo.reset()
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = mor_linear(x, layer.weight, layer.bias, mor=layer.mor)
    for _ in range(3):
        assert torch.equal(whole(x), expected)
    assert encoded == [(32, 48)]
    layer.weight.mul_(2)
    assert torch.equal(whole(x), mor_linear(x, layer.weight, layer.bias, mor=layer.mor))
    assert len(encoded) == 2
    with torch.enable_grad():
        whole(x).sum().backward()
    assert layer.kept._kept is None
    assert len(encoded) == 2


# ------------------------------------------------------------------------------ Triton's kernels


@pytest.fixture
def by_triton():
    with environment(SUBULP_BACKEND="triton"):
        yield


def small(mor: MoR, shape=(12, 40), dtype=torch.bfloat16):
    torch.manual_seed(0)
    layer = MoRLinear(shape[1], shape[0], mor=mor, dtype=dtype)
    return layer, torch.randn(5, shape[1], dtype=dtype, requires_grad=True)


def passes(layer, x, forward=None):
    """The output, the input's gradient, and what was decided about the weight."""
    x.grad = None
    y = (layer if forward is None else forward)(x)
    y.sum().backward()
    weights = [layer.mix[role] for role in ("weight", "weight transposed") if role in layer.mix]
    return y.detach(), x.grad, weights


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "mor",
    [
        MoR("subtensor-3way", "subchannel-32"),
        MoR("tensor", "subchannel-32"),
        MoR("tensor", "tensor"),
    ],
    ids=str,
)
def test_kernels_write_a_weight_once(by_triton, mor, dtype):
    layer, x = small(mor, dtype=dtype)
    y, grad, decided = passes(layer, x)
    numbers = [s.numbers.clone() for s in decided]
    for _, kept in layer.kept._there.values():
        # What is written anew would be right again.
        kept.stored[0].zero_()
    for _ in range(3):
        spoiled, none, again = passes(layer, x)
        assert torch.equal(spoiled, layer.bias.detach().expand_as(spoiled))
        assert not none.any()
        assert decided == again
    layer.weight.data[7, 9] += 1
    found, other, now = passes(layer, x)
    expected = small(mor, dtype=dtype)[0]
    expected.weight.data.copy_(layer.weight)
    for a, b in zip((found, other, now), passes(expected, x), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert not torch.equal(found, y)
    assert not torch.equal(other, grad)
    # Decisions of the past stay what they were.
    for summary, before in zip(decided, numbers, strict=True):
        assert torch.equal(summary.numbers, before)


@interpreted
@pytest.mark.parametrize(
    "mor", [MoR("subtensor-3way", "subchannel-32"), MoR("tensor", "tensor")], ids=str
)
def test_kernels_in_compiled_graphs_write_a_weight_once(by_triton, mor):
    layer, x = small(mor)
    expected = passes(layer, x)
    layer.kept.clear()
    torch._dynamo.reset()
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for a, b in zip(passes(layer, x, whole), expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    for _, kept in layer.kept._there.values():
        # What is written anew would be right again.
        kept.stored[0].zero_()
    spoiled, none, _ = passes(layer, x, whole)
    assert torch.equal(spoiled, layer.bias.detach().expand_as(spoiled))
    assert not none.any()
    with torch.no_grad():
        assert torch.equal(whole(x), spoiled)
    layer.weight.data[7, 9] += 1
    twin = small(mor)[0]
    twin.weight.data.copy_(layer.weight)
    for a, b in zip(passes(layer, x, whole), passes(twin, x), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@interpreted
@torch.no_grad()
def test_kernels_notice_every_change(by_triton):
    for edit in EDITS:
        layer, x = small(MoR("tensor", "tensor"))
        x = x.detach()
        layer(x)
        edit(layer)
        expected = mor_linear(x, layer.weight, layer.bias, mor=layer.mor)
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x), expected)


@interpreted
def test_activations_that_are_computed_anew_meet_the_same_weight(by_triton):
    layer, x = small(MoR("tensor", "tensor"))
    _, expected, _ = passes(layer, x)
    (_, kept), *_ = layer.kept._there.values()
    codes = kept.stored[0].clone()
    for there, wanted in ((codes, expected), (codes * 0, expected * 0)):
        # What is written anew would be right again.
        kept.stored[0].copy_(there)
        x.grad = None
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        assert torch.equal(x.grad, wanted)
        assert torch.equal(kept.stored[0], there)


@interpreted
def test_weights_that_are_swapped_between_the_passes(by_triton):
    """As for an average of them: the other forward pass writes over what this one encoded."""
    layer, x = small(MoR("tensor", "tensor"))
    _, expected, _ = passes(layer, x)
    y, x.grad = layer(x), None
    own = layer.weight.detach().clone()
    layer.weight.data.mul_(-3)
    with torch.no_grad():
        layer(x)
    layer.weight.data.copy_(own)
    y.sum().backward()
    assert torch.equal(x.grad, expected)


@interpreted
def test_swapped_values_are_other_bytes(by_triton):
    """The number of the bytes has their places in it."""
    x = torch.randn(6, 8)
    kept = KeptEncoding()
    mor = MoR("tensor", "tensor")
    for matrix in (x, x.flip(0), x.flip(1), x.view(8, 6).t().reshape(6, 8), torch.zeros(6, 8), x):
        found, summary = mor.encode(matrix, kept)
        expected, other = mor.encode(matrix)
        assert torch.equal(found.codes, expected.codes)
        assert summary == other


@interpreted
@torch.no_grad()
def test_a_single_zero_is_written(by_triton):
    """Its bytes add up to what there was before the first call: nothing."""
    before = torch.are_deterministic_algorithms_enabled()
    # New memory is then filled with what is no zero.
    torch.use_deterministic_algorithms(True)
    try:
        layer, _ = small(MoR("tensor", "tensor"), (1, 1))
        layer.weight.zero_()
        assert torch.equal(layer(torch.ones(3, 1, dtype=torch.bfloat16)), layer.bias.expand(3, 1))
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.filterwarnings("ignore:metric='ours' is a registered Python function")
@pytest.mark.parametrize("flushes", [0.0, 1.0])
def test_a_metric_of_the_same_name_decides_anew(flushes):
    metrics.register("ours", lambda stored, _: torch.zeros_like(stored))
    try:
        layer = MoRLinear(64, 64, mor=MoR("tensor", metric="ours")).eval()
        layer(torch.ones(4, 64))
        assert layer.mix["weight"].blocks[0] == 1
        metrics.unregister("ours")
        metrics.register("ours", lambda stored, _: torch.full_like(stored, flushes))
        layer(torch.ones(4, 64))
        assert layer.mix["weight"].blocks == layer.mix["input"].blocks
        assert layer.mix["weight"].blocks[0] == (flushes == 0.0)
    finally:
        metrics.unregister("ours")

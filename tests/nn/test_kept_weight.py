"""Layers in evaluation encode a weight once, and anew wherever it is another."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from subulp import nn, optim
from subulp.nn import MoR, MoRLinear
from subulp.nn.kept_weight import KeptWeight
from subulp.nn.mor_linear import mor_linear


@pytest.fixture
def encoded(monkeypatch):
    """The shapes of the weights that layers encode in evaluation."""
    found = []
    get = KeptWeight.get

    def counted(self, weight, mor, encode):
        def noted(matrix):
            found.append(tuple(matrix.shape))
            return encode(matrix)

        return get(self, weight, mor, noted)

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


@torch.no_grad()
@pytest.mark.parametrize(
    "edit",
    [
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.weight.data.mul_(2),
        lambda layer: layer.weight.data.view(torch.int16).numpy().__setitem__((3, 4), 77),
        lambda layer: layer.weight.data.copy_(layer.weight.flip(0)),
        lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight + 1)),
        lambda layer: layer.load_state_dict({"weight": layer.weight * 2, "bias": layer.bias}),
        lambda layer: layer.float(),
        lambda layer: setattr(layer, "mor", MoR("subtensor-2way", "channel")),
    ],
)
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
    assert layer.kept._found is not None
    layer(x).sum().backward()
    assert layer.kept._found is None
    optim.SGD(layer.parameters(), lr=0.1).step()
    layer.train()
    with torch.no_grad():
        layer(x)
    assert layer.kept._found is None
    assert len(encoded) == 1


@torch.no_grad()
def test_copies_begin_anew():
    layer, x = layer_and_input()
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.kept._found is None
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

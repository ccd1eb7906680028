"""Shares, ranges and errors of decisions, over layers, roles and time; the heat map."""

from __future__ import annotations

import math

import pytest
import torch

from subulp import diagnostics
from subulp.nn import MoR, MoRLinear, convert_to_mor


def model(mor: MoR) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)
    found = torch.nn.Sequential(*layers)
    convert_to_mor(found, mor, quiet=True)
    return found


def step(m: torch.nn.Module, x: torch.Tensor) -> None:
    m(x).square().mean().backward()


def inputs() -> torch.Tensor:
    """A quarter of the rows spans too much for E4M3, another one for any FP8 format."""
    torch.manual_seed(1)
    x = torch.randn(64, 64)
    x[16:48] = (1 + torch.rand(32, 64)) * torch.empty(32, 64).uniform_(-22, 0).exp2()
    x[32:48, 0] *= 2.0**-40
    return x


def test_shares_by_layer_and_role():
    m = model(MoR("subtensor-3way", "channel"))
    x = inputs()
    step(m, x)
    mix = diagnostics.representation_mix(m)
    found = {(o.layer, o.role): o for o in mix.operands}
    # The first layer's input needs no gradient.
    assert len(found) == 10
    assert ("0", "output gradient") not in found
    first = found["0", "input"]
    assert first.elements == {"e4m3": 0.5, "e5m2": 0.25, "bf16": 0.25}
    assert first.blocks == first.elements
    assert first.count == 64 * 64
    assert first.amax == float(x.abs().max())
    assert first.dynamic_range == pytest.approx(math.log2(x.abs().max() / x.abs().min()))
    assert 0.01 < first.error < 0.05 < first.first_error
    assert first.narrow == 0.75
    assert sum(mix.elements.values()) == pytest.approx(1)
    assert sum(mix.tensors.values()) == pytest.approx(1)
    assert mix.narrow == 1 - mix.tensors["bf16"]
    counted = sum(o.count for o in mix.operands)
    wide = sum(o.elements["bf16"] * o.count for o in mix.operands)
    assert mix.elements["bf16"] == pytest.approx(wide / counted)


def test_zeros_and_infinities_have_a_range():
    layer = MoRLinear(4, 3)
    layer(torch.zeros(2, 4))
    zeros = diagnostics.representation_mix(layer).operands[0]
    assert (zeros.amax, zeros.elements["e4m3"], zeros.layer) == (0.0, 1.0, "")
    assert math.isnan(zeros.dynamic_range)
    layer(torch.tensor([[1.0, math.inf, 0.0, 2.0]]))
    infinite = diagnostics.representation_mix(layer).operands[0]
    assert (infinite.amax, infinite.elements["bf16"]) == (math.inf, 1.0)
    assert infinite.dynamic_range == math.inf


def test_decisions_over_time():
    m = model(MoR("tensor", "tensor"))
    narrow, wide = torch.randn(8, 64), inputs()
    with diagnostics.record_mix(m) as record, diagnostics.record_mix(m, every=2) as second:
        for x in (narrow, wide, narrow):
            step(m, x)
    step(m, wide)
    mine = [h for h in record.history if (h["layer"], h["role"]) == ("0", "input")]
    assert [h["step"] for h in mine] == [1, 2, 3]
    assert [h["elements"]["e4m3"] for h in mine] == [1.0, 0.0, 1.0]
    assert {h["step"] for h in second.history} == {1, 3}
    assert len(record.history) == 3 * 6
    assert all(layer.observers == () for layer in m if isinstance(layer, MoRLinear))


def test_recording_changes_nothing():
    grads = []
    for recorded in (False, True):
        m = model(MoR("subtensor-2way", "subchannel-32"))
        if recorded:
            with diagnostics.record_mix(m):
                step(m, inputs())
        else:
            step(m, inputs())
        grads.append([p.grad for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_bad_input():
    m = model(MoR())
    with pytest.raises(ValueError, match="run the model first"):
        diagnostics.representation_mix(m)
    with pytest.raises(ValueError, match=r"see nn\.convert_to_mor"):
        diagnostics.representation_mix(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"see nn\.convert_to_mor"):
        diagnostics.record_mix(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every=0 is out of range"):
        diagnostics.record_mix(m, every=0)


@pytest.mark.parametrize("every", [0, 2.5, math.nan, True, "1"])
def test_records_are_of_every_so_many_whole_steps(every):
    with pytest.raises(ValueError, match=r"every=.* is out of range: a whole number of steps"):
        diagnostics.record_mix(model(MoR("tensor")), every)


def test_a_record_is_entered_once_at_a_time():
    net = model(MoR("tensor"))
    record = diagnostics.record_mix(net)
    with record:
        with pytest.raises(RuntimeError, match="being kept already"):
            record.__enter__()
        step(net, inputs())
    kept = len(record.history)
    step(net, inputs())
    assert len(record.history) == kept > 0
    with record:
        step(net, inputs())
    assert len(record.history) > kept

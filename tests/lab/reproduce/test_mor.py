"""MoR's measurements: exact, and able to fail; and what a run records of its mixtures."""

import ml_dtypes
import numpy as np
import pytest
import torch

from subulp.lab.reproduce.claim import Options, Watch
from subulp.lab.reproduce.mor import claims, experiments, mixtures, rules
from subulp.lab.reproduce.training import LAYERS, Training
from subulp.lab.tasks.lm.config import LMConfig
from subulp.numerics import E4M3, E5M2, mixture, round_to
from subulp.numerics.scaling import BlockScales

PARTITIONS = ["tensor", "channel", "subchannel-32", "block-128x128"]


def numbers(found, quantity):
    return [o.value for o in found.observations if o.quantity == quantity]


def test_ranges_are_the_formats():
    found = mixtures.ranges()
    assert numbers(found, "largest") == [448.0, 57344.0]
    assert numbers(found, "smallest") == [2.0**-9, 2.0**-16]


def test_scales_are_the_algorithms():
    found = mixtures.scales(70, 40, PARTITIONS)
    assert set(numbers(found, "scales that are not the algorithm's")) == {0}
    assert set(numbers(found, "blocks that saturate")) == {0}
    assert set(numbers(found, "bytes of the scales")) == {4}


def test_scales_that_are_others_are_found_out(monkeypatch):
    """With the block's exponent as it is, some blocks saturate."""
    exact = mixtures.group_amax_mantissa

    def without_rounding_down(x, fmt, partition):
        found = exact(x, fmt, partition)
        return BlockScales(found.mantissa, found.exponents + 1, found.blocks_of_group)

    monkeypatch.setattr(mixtures, "group_amax_mantissa", without_rounding_down)
    found = mixtures.scales(70, 40, ["channel"])
    assert min(numbers(found, "scales that are not the algorithm's")) > 0
    assert min(numbers(found, "blocks that saturate")) > 0


@pytest.mark.parametrize("recipe", mixture.RECIPES)
def test_choices_are_the_tests(recipe):
    found = mixtures.choices(70, 40, recipe, PARTITIONS, 0.045)
    assert set(numbers(found, "blocks that are decided otherwise")) == {0}
    assert max(numbers(found, "representations in use")) >= 2


def test_a_choice_by_another_threshold_is_found_out(monkeypatch):
    exact = mixtures.encode
    monkeypatch.setattr(
        mixtures, "encode", lambda x, recipe, partition, threshold: exact(x, recipe, partition)
    )
    found = mixtures.choices(70, 40, "tensor", ["channel"], 0.001)
    assert min(numbers(found, "blocks that are decided otherwise")) > 0


@pytest.mark.parametrize("recipe", ["subtensor-2way", "subtensor-3way"])
def test_a_recipe_that_is_another_is_found_out(recipe, monkeypatch):
    """The rules are not read from the recipe."""
    always = mixture.Recipe(recipe, (mixture.Entry(E4M3, mixture.always),))
    monkeypatch.setitem(mixtures.RECIPES, recipe, always)
    found = mixtures.choices(70, 40, recipe, ["subchannel-32"], 0.045)
    assert min(numbers(found, "blocks that are decided otherwise")) > 0


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_the_rules_round_as_all_codes_have_it(fmt):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).double()
    grid = codes[codes.isfinite()].unique()
    x = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, grid * 1.1]).float()
    x = torch.cat([x, torch.nextafter(x, x * 0), torch.nextafter(x, x * 2)])
    x = x[(x != 0) & (x.abs() <= fmt.max)]
    wanted = round_to(x, fmt).double()
    assert torch.equal(torch.from_numpy(rules._rounded(x.double().numpy(), fmt.name)), wanted)


def test_matrices_span_more_than_a_format():
    for spread, least in ((0.0, 1), (12.0, 2.0**32)):
        regions = mixtures.matrix(64, 64, spread).view(4, 16, 4, 16).abs().amax((1, 3))
        assert regions.max() / regions.min() > least
    assert torch.equal(mixtures.matrix(20, 30), mixtures.matrix(20, 30))


def test_groups_are_measured_by_their_definition():
    """A group of one block is a scale of its own."""
    found = mixtures.groups(16, 64, "subchannel-32", ["subchannel-32", "tensor"], 3.0, [0, 1])
    assert numbers(found, "bytes of the scales") == [32 + 4 * 32, 32 + 4] * 2
    x = mixtures.matrix(16, 64, 3.0, 1).double().numpy().reshape(16, 2, 32)
    scale = 448 / np.abs(x).max(-1, keepdims=True)
    back = (x * scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / scale
    own = found.values("subchannel-32", "percent of relative error")[1]
    assert own == pytest.approx(100 * np.mean(np.abs(back - x) / np.abs(x)), rel=1e-4)
    assert found.values("tensor", "percent of relative error")[1] > own


def test_curves_say_which_operands_are_narrow(tmp_path):
    config = LMConfig(
        **{"precision": ("master",), "linear": ("e4m3",), "width": 16, "layers": 1, "heads": 2},
        **{"context": 8, "batch_size": 2, "steps": 12, "eval_every": 6, "watch_every": 100},
        **{"seeds": (0,), "activations": "bf16", "device": "cpu"},
    )
    part = Training("t", config, "a", curves=(*experiments.MIXES, LAYERS))
    found = part.run(tmp_path / "t", Watch(jobs=1))
    assert {c.quantity for c in found.curves} == {*experiments.MIXES, LAYERS}
    assert {c.case for c in found.curves if c.quantity == LAYERS} == {
        f"a master blocks.0.{layer}"
        for layer in ("attention.in_", "attention.out", "mlp.up", "mlp.down")
    }
    for curve in found.curves:
        assert curve.steps == (6, 12)
        assert curve.values == pytest.approx((100.0, 100.0))
    assert found.values("a master", "last percent of weights in E4M3") == {0: pytest.approx(100)}
    assert found.values("a master", "fp8 share") == {0: 1.0}


def test_the_baseline_is_in_bf16():
    for experiment in (experiments.PARTED, experiments.THRESHOLDS, experiments.SECOND):
        for size in ("smallest", "small", "paper"):
            for part in experiment.parts(Options(size, data="text")):
                assert (part.config.dtype, part.config.activations) == ("bf16", "bf16")


def test_cases_are_those_of_the_runs():
    names = {
        name for part in experiments.PARTED.parts(Options("small")) for name in part.config.variants
    }
    names |= {
        f"{part.case} {name}".strip()
        for part in experiments.THRESHOLDS.parts(Options("small"))
        for name in part.config.variants
    }
    compared = {
        case
        for claim in claims.CLAIMS
        if claim.experiment in (experiments.PARTED, experiments.THRESHOLDS)
        for check in claim.checks
        for case in (check.case, check.than)
        if case
    }
    assert compared <= names

"""Decisions and values of a mixture against exact rationals; new types, metrics, bad input."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from subulp.numerics import (
    BF16,
    E4M3,
    E5M2,
    Format,
    metrics,
    mixture,
    partition,
    round_to,
    scaling,
    simulated,
)
from subulp.numerics.mixture import RECIPES, Entry, Recipe
from tests.oracles import mixture as oracle

from .test_scaling import lists, matrix, rough

GRIDS = {"e4m3": oracle.E4M3, "e5m2": oracle.E5M2}
PARTITIONS = [*partition.PARTITIONS, (3, 20)]


THRESHOLD = np.float32(0.045)


def decide(recipe: str, blocks, shared):
    """Types of the blocks, by the words of the issue."""
    found, sums, counts = [], [], []
    for rows in blocks:
        values = [v for row in rows for v in row]
        finite = all(map(math.isfinite, values))
        errors = {}
        counted = sum(v != 0 for v in values) if finite else 0
        for name, grid in GRIDS.items():
            s = oracle.scale(shared[name], oracle.exponent(values, shared[name], grid))
            terms = [[oracle.term(v, s, grid) if finite else Fraction(0) for v in r] for r in rows]
            errors[name] = oracle.block_sum(terms)
        sums.append(errors["e4m3"])
        counts.append(counted)
        e4, e5 = (oracle.mean([errors[n]], counted) for n in ("e4m3", "e5m2"))
        magnitudes = [abs(v) for v in values if v != 0]
        if not finite:
            found.append("bf16")
        elif not magnitudes or (e4 < e5 if recipe == "subtensor-2way" else e4 <= e5):
            found.append("e4m3")
        elif recipe == "subtensor-3way" and np.float32(max(magnitudes)) / np.float32(
            min(magnitudes)
        ) <= np.float32(57344 * 2**14):
            found.append("e5m2")
        else:
            found.append("bf16")
    if recipe == "tensor":
        finite = all(math.isfinite(v) for rows in blocks for row in rows for v in row)
        passes = finite and (not any(counts) or oracle.mean(sums, sum(counts)) < THRESHOLD)
        return ["e4m3" if passes else "bf16"] * len(blocks)
    return found


def row_lists(x, block):
    r, c = block
    return [
        x[i : i + r, j : j + c].tolist()
        for i in range(0, x.shape[0], r)
        for j in range(0, x.shape[1], c)
    ]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("block", PARTITIONS, ids=str)
def test_decisions_and_values_are_the_oracle(block, recipe):
    narrow = torch.where(matrix(seed=1).abs() < 1, 1.0, matrix(spread=1.0))
    for x in (matrix(spread=1.0), rough(), narrow):
        found, summary = mixture.encode(x, RECIPES[recipe], block)
        sizes = partition.block_of(block, x.shape)
        flat = [values for row in lists(x, sizes) for values in row]
        shared = {name: oracle.group_mantissa(flat, grid) for name, grid in GRIDS.items()}
        want = decide(recipe, row_lists(x, sizes), shared)
        names = [*(f.name for f in found.formats), "bf16"]
        assert [names[t] for t in found.block_types().flatten().tolist()] == want
        assert dict(zip(summary.names, summary.blocks, strict=True)) == {
            n: want.count(n) for n in names
        }
        decoded = [v for row in lists(mixture.decode(found), sizes) for v in row]
        for values, got, name in zip(flat, decoded, want, strict=True):
            if name == "bf16":
                expected = round_to(torch.tensor(values), BF16)
            else:
                grid = GRIDS[name]
                s = oracle.scale(shared[name], oracle.exponent(values, shared[name], grid))
                q = [float(oracle.quantise(v, s, grid)[1]) for v in values]
                expected = torch.tensor(q) * float(oracle.fp32(1 / s))
            torch.testing.assert_close(torch.tensor(got), expected, rtol=0, atol=0, equal_nan=True)


def test_sums_are_added_in_the_stated_order():
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (3, 7), (130, 40), (2, 4100), (257, 8200)):
        terms = torch.rand(shape, generator=generator)
        got = metrics.block_sums(terms[None, None])
        assert float(got) == oracle.block_sum(terms.tolist())
    sums = torch.rand(9000, generator=generator)
    whole = [np.float32(v) for v in sums.tolist()]
    assert float(metrics.total(sums.view(90, 100))) == oracle.mean(whole, 1)


def test_error_of_log_uniform_values_is_that_of_the_paper():
    """2.25 % in E4M3 and twice that in E5M2."""
    generator = torch.Generator().manual_seed(0)
    x = torch.empty(512, 512).uniform_(-3, 3, generator=generator).exp2()
    _, in_e4m3 = mixture.encode(x, RECIPES["tensor"])
    in_e5m2 = Recipe("e5m2", (Entry(E5M2, mixture.below_threshold(E5M2)),), "tensor")
    _, wider = mixture.encode(x, in_e5m2, threshold=0.5)
    assert in_e4m3.error == pytest.approx(0.0225, rel=0.03)
    assert wider.error == pytest.approx(0.045, rel=0.03)


@pytest.mark.parametrize("block", partition.PARTITIONS)
def test_partitions_and_directions_share_the_values_that_are_normal_in_all(block):
    """With one mantissa, scales differ by powers of two, and normal numbers round alike."""
    x = matrix(200, 300, spread=1.0)
    coarse, _ = mixture.encode(x, mixture.ALWAYS_E4M3, "tensor")
    # The scale of the whole tensor is the smallest.
    normal = x.abs() * coarse.scales().per_block() >= E4M3.smallest_normal
    assert 0.5 < normal.float().mean() < 1
    along, _ = mixture.encode(x, mixture.ALWAYS_E4M3, block)
    across, _ = mixture.encode(x.t().contiguous(), mixture.ALWAYS_E4M3, block)
    for values in (mixture.decode(along), mixture.decode(across).t()):
        assert torch.equal(values[normal], mixture.decode(coarse)[normal])
        assert block == "tensor" or not torch.equal(values, mixture.decode(coarse))
    apart, _ = mixture.encode(x, mixture.ALWAYS_E4M3, block, scaling="amax")
    same = mixture.decode(apart)[normal] == mixture.decode(coarse)[normal]
    assert block == "tensor" or same.float().mean() < 0.5


def test_the_threshold_decides():
    x = matrix(spread=1.0)
    _, summary = mixture.encode(x, RECIPES["tensor"], "subchannel-32")
    assert summary.blocks[0] > 0
    below = summary.error * 0.99
    _, refused = mixture.encode(x, RECIPES["tensor"], "subchannel-32", threshold=below)
    assert refused.blocks[0] == 0
    assert refused.error == 0
    assert refused.first_error == pytest.approx(summary.error)


def test_a_new_type_is_one_entry():
    """E3M4, simulated: tried first where values span little."""
    e3m4 = simulated(3, 4)
    recipe = Recipe(
        "with-e3m4",
        (
            Entry(e3m4, mixture.better_than(e3m4, E4M3)),
            Entry(E4M3, mixture.no_worse_than(E4M3, E5M2)),
            Entry(E5M2, mixture.fits_range(E5M2)),
        ),
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 256, generator=generator)
    x[0] = x[0].sign() * (1 + x[0].abs() / 4)
    x[1] *= (1.5 * torch.randn(256, generator=generator)).exp2()
    x[2] *= (3 * torch.randn(256, generator=generator)).exp2()
    x[3] *= (40 * torch.randn(256, generator=generator)).exp2()
    found, summary = mixture.encode(x, recipe, "channel")
    assert found.types.flatten().tolist() == [0, 1, 2, 3]
    assert summary.names == ("e3m4", "e4m3", "e5m2", "bf16")
    assert found.mantissa.shape == (2, 1, 1)
    scaled = x[0] * found.scales(0).per_block()[0]
    inverse = found.scales(0).inverse_per_block()[0]
    assert torch.equal(mixture.decode(found)[0], round_to(scaled, e3m4) * inverse)
    assert found.codes.dtype == torch.uint8


def test_a_registered_metric_decides():
    def underflows(scaled: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return ((rounded == 0) & (scaled != 0)).float()

    metrics.register("underflows", underflows)
    try:
        x = torch.ones(1, 1000)
        x[0, :100] = 2.0**-30
        _, summary = mixture.encode(x, RECIPES["tensor"], metric="underflows", threshold=0.2)
        assert summary.error == pytest.approx(0.1)
        with pytest.raises(ValueError, match="is taken"):
            metrics.register("underflows", underflows)
    finally:
        metrics.unregister("underflows")
    with pytest.raises(ValueError, match="metric='underflows' is unknown"):
        mixture.encode(x, RECIPES["tensor"], metric="underflows")


def test_bytes_are_those_of_the_formats():
    x = torch.ones(256, 256)
    x[:128, :128] = (torch.arange(128) * 2 - 128.0).exp2()
    found, summary = mixture.encode(x, RECIPES["subtensor-3way"], "block-128x128")
    assert summary.elements == (3 * 128**2, 0, 128**2)
    # A type and an exponent for each block, a mantissa for the tensor.
    assert found.nbytes == 3 * 128**2 + 2 * 128**2 + 4 * (1 + 1) + 4


def test_nan_keeps_being_nan():
    """Also one whose payload BF16 cuts off."""
    x = torch.ones(2, 2)
    x.view(torch.int32)[0, 0] = 0x7F800001
    x[0, 1] = -torch.inf
    decoded = mixture.decode(mixture.encode(x, RECIPES["subtensor-3way"], "channel")[0])
    assert decoded[0].isnan().tolist() == [True, False]
    assert float(decoded[0, 1]) == -torch.inf
    assert decoded[1].tolist() == [1.0, 1.0]


def test_transposed_squares_are_transposed():
    x = matrix(200, 300)
    a, _ = mixture.encode(x, RECIPES["subtensor-3way"], "block-128x128")
    b, _ = mixture.encode(x.t(), RECIPES["subtensor-3way"], "block-128x128")
    assert torch.equal(a.codes, b.codes.t())
    assert torch.equal(a.types, b.types.t())


@pytest.mark.parametrize("name", ["gam", "amax", "e8m0"])
def test_every_scaling_decodes(name):
    x = matrix(spread=1.0)
    found, _ = mixture.encode(x, RECIPES["subtensor-3way"], "subchannel-32", scaling=name)
    narrow = found.block_types() < 2
    assert narrow.any()
    mask = partition.from_blocks(narrow[..., None, None].expand(*narrow.shape, 1, 32), x.shape)
    error = (mixture.decode(found) - x).abs() / x.abs()
    assert error[mask].mean() < 0.05
    assert error[~mask].max() < 2.0**-8 if (~mask).any() else True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe("none", ()), "has no entry"),
        (lambda: Recipe("b", (Entry(BF16, mixture.below_threshold(BF16)),)), "cannot be scaled to"),
        (
            lambda: Recipe("w", (Entry(simulated(5, 3), mixture.below_threshold(E4M3)),)),
            "does not fit",
        ),
        (
            lambda: Recipe("t", (Entry(E4M3, mixture.fits_range(E4M3)),) * 2),
            "names a format twice",
        ),
        (lambda: mixture.encode(torch.ones(2, 2).long(), RECIPES["tensor"]), "x has dtype"),
        (lambda: mixture.encode(torch.ones(2, 0), RECIPES["tensor"]), "x has shape"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_scale_marker_is_in_int8():
    assert torch.iinfo(torch.int8).min == scaling.NO_SCALE


OWN = Recipe(
    "mine",
    (
        Entry(simulated(3, 4), (mixture.below_threshold(E4M3, 0.1), mixture.fits_range(E4M3))),
        Entry(E5M2, mixture.better_than(E5M2, E4M3)),
    ),
)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), mixture.ALWAYS_E4M3, OWN])
def test_a_recipe_is_data(recipe):
    again = [
        copy.deepcopy(recipe),
        pickle.loads(pickle.dumps(recipe)),
        mixture.from_text(mixture.to_text(recipe)),
    ]
    for other in again:
        assert other == recipe
        assert hash(other) == hash(recipe)
    assert recipe != Recipe(
        recipe.name, recipe.entries, "block" if recipe.granularity == "tensor" else "tensor"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "other"


def test_all_tests_of_an_entry_must_hold():
    x = matrix(spread=1.0)
    either = mixture.below_threshold(E4M3, 1.0), mixture.below_threshold(E4M3, 1e-9)
    for tests, narrow in ((either[:1], True), (either, False), (either[::-1], False)):
        _, summary = mixture.encode(x, Recipe("r", (Entry(E4M3, tests),)))
        assert (summary.sole == "e4m3") == narrow


@pytest.mark.parametrize("metric", metrics.KNOWN)
def test_metrics_are_their_formulas(metric):
    x = matrix(spread=1.0)
    x[3, :7] = 2.0**-60
    found, summary = mixture.encode(x, mixture.ALWAYS_E4M3, metric=metric)
    counted = x != 0
    error = ((mixture.decode(found) - x).abs() / x.abs())[counted].double()
    exact = {
        "relative-error": error.mean(),
        "squared-relative-error": (error**2).mean(),
        "underflow": (error == 1).double().mean(),
    }[metric]
    assert exact > 0
    assert summary.error == pytest.approx(float(exact), rel=1e-4)


def test_fp16_matrices_keep_fp16():
    x = matrix(spread=1.0).half()
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    found, summary = mixture.encode(x, RECIPES["tensor"])
    assert summary.sole == "fp16"
    assert torch.equal(mixture.decode(found).nan_to_num(7.0), x.float().nan_to_num(7.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Entry(E4M3, lambda evidence: evidence.amax > 0), "recipe is data"),
        (lambda: Entry(E4M3, ()), "is empty"),
        (lambda: Entry("e4m3", mixture.always), "is no subulp.numerics.Format"),
        (lambda: Recipe("r", (E4M3,)), r"use a mixture\.Entry"),
        (lambda: Recipe(7, OWN.entries), "name=7 is no string"),
        (lambda: Recipe("r", OWN.entries, "blok"), "granularity='blok' is unknown"),
        (lambda: Recipe("r", OWN.entries * 2), "names a format twice"),
        (
            lambda: Recipe(
                "r", (Entry(E4M3, mixture.always), Entry(simulated(4, 3), mixture.always))
            ),
            "names a format twice",
        ),
        (
            lambda: Recipe("r", (Entry(Format("bf16", 4, 3), mixture.always),)),
            "has the name of what remains",
        ),
        (lambda: mixture.below_threshold(E4M3, 0.0), r"threshold=0\.0 is out of range"),
        (lambda: mixture.below_threshold(E4M3, float("nan")), "threshold=nan is out of range"),
        (lambda: mixture.below_threshold("e4m3"), "takes a subulp.numerics.Format"),
        (lambda: mixture.better_than(E4M3, None), "other=None cannot apply"),
        (lambda: mixture.no_worse_than(E4M3, BF16), "cannot be scaled to"),
        (lambda: mixture.Acceptance("always", E4M3), "'always' takes nothing"),
        (lambda: mixture.Acceptance("sometimes"), "kind='sometimes' is unknown"),
        (lambda: metrics.register("underflow", abs), "is taken"),
        (lambda: metrics.register("mine", 3), "is not a function"),
        (lambda: metrics.unregister("underflow"), "is not registered"),
    ],
)
def test_bad_recipes(make, message):
    with pytest.raises(ValueError, match=message):
        make()

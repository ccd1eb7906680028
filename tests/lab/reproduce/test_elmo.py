"""ELMO's measurements: exact where they are, and able to fail."""

import dataclasses

import pytest
import torch

from subulp.lab.reproduce.claim import Options
from subulp.lab.reproduce.elmo import (
    claims,
    classifier_memory,
    classifier_step,
    experiments,
    exponents,
    linear_tree,
    narrow_sums,
)
from subulp.lab.reproduce.found import Found, Observation
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.encoder import Bags
from tests.lab.tasks.xmc.support import write_data


def value(found, case, quantity):
    (found,) = found.values(case, quantity).values()
    return found


def test_a_step_in_fp8_is_the_papers():
    found = classifier_step.fp8(64, 32, 8)
    assert value(found, "rows", "weights that are no neighbour of the exact one") == 0
    assert value(found, "rows", "weights that were rounded") > 64 * 32 / 2
    assert abs(value(found, "rows", "errors in standard deviations")) < 4
    assert value(found, "inputs", "largest error of the gradient") == 0


def test_a_step_that_is_another_is_found_out(monkeypatch):
    exact = classifier_step.sigmoid
    monkeypatch.setattr(classifier_step, "sigmoid", lambda x: exact(x) + 0.02)
    found = classifier_step.fp8(64, 32, 8)
    assert value(found, "rows", "weights that are no neighbour of the exact one") > 0
    assert value(found, "inputs", "largest error of the gradient") > 2.0**-16


def test_neighbours_are_the_formats():
    x = torch.tensor([0.0, 1.0, 1.05, -1.05, 447.0, 500.0], dtype=torch.float64)
    below, above = classifier_step._neighbours(x)
    assert below.tolist() == [0.0, 1.0, 1.0, -1.125, 416.0, 448.0]
    assert above.tolist() == [0.0, 1.0, 1.125, -1.0, 448.0, 448.0]


def test_gradients_are_autograds():
    found = classifier_step.fp32(64, 32, 8)
    for name in ("inputs", "rows"):
        assert 0 < value(found, name, "relative error") < 64 * 2.0**-24


def test_stochastic_rounding_is_unbiased():
    found = narrow_sums.unbiased(1)
    assert {o.value for o in found.observations} == {0}


def test_nearest_loses_what_kahan_keeps():
    found = narrow_sums.sums(32, 2.0**-10, ["nearest", "kahan"])
    assert value(found, "nearest", "share of the sum that is lost") == 1
    assert value(found, "kahan", "share of the sum that is lost") == 0


def test_bytes_of_a_step():
    found = classifier_memory.trace(["renee", "fp8"], 4096, 64, 8, 4)
    assert value(found, "renee", "bytes of a weight before the step") == pytest.approx(8, rel=1e-3)
    assert 16 < value(found, "renee", "bytes of a weight at the peak") < 17
    assert value(found, "fp8", "bytes of a weight before the step") == pytest.approx(1, rel=1e-3)
    curves = {curve.case: curve for curve in found.curves}
    assert all(len(curve.steps) <= 48 for curve in curves.values())
    peak = value(found, "renee", "bytes of a weight at the peak")
    assert max(curves["renee"].values) == peak


def test_a_text_adds_the_same_to_an_encoder():
    shape = {"vocabulary": 50, "width": 16, "layers": 2, "heads": 2}
    one, two = (classifier_memory.encoder(shape, 8, [n, n + 1], 10) for n in (1, 5))
    first, second = (value(found, "encoder", "GiB by a line") for found in (one, two))
    assert first == pytest.approx(second, rel=1e-9)


def test_exponents_are_counted_per_seed():
    options = {"generated_labels": 64, "width": 16, "batch_size": 32, "steps": 3, "threads": 1}
    found = exponents.exponents({**options, "device": "cpu"}, 1, 2)
    for name in ("weights", "inputs", "gradients of weights", "gradients of logits"):
        inside, below = (
            found.values(name, f"percent {where} e5m2")[1] for where in ("inside", "below")
        )
        assert inside + below == pytest.approx(100, abs=1e-9)
    again = exponents.exponents({**options, "device": "cpu"}, 1, 2)
    assert again == found


def test_each_storage_is_compared_at_its_best():
    def at(rate, rows, values):
        case = f"rate {rate}, batch 64, {rows}"
        return [Observation(case, "P@1", v, seed) for seed, v in enumerate(values)]

    found = experiments.best(
        Found((*at(0.1, "fp32", (50, 52)), *at(0.2, "fp32", (49, 60)), *at(0.1, "fp8", (40, 41))))
    )
    numbers = {(o.case, o.quantity, o.seed): o.value for o in found}
    assert numbers["best fp32", "P@1", 0] == 49
    assert numbers["best fp32", "P@1", 1] == 60
    assert numbers["best fp32", "rate of the classifier", None] == 0.2
    assert numbers["best fp8", "batch", None] == 64


def test_a_run_that_diverged_is_not_the_best():
    case = "rate {}, batch 64, fp8"
    found = experiments.best(
        Found(
            (
                Observation(case.format(0.4), "P@1", float("nan"), 0),
                Observation(case.format(0.1), "P@1", 3.0, 0),
            )
        )
    )
    assert {o.value for o in found if o.quantity == "P@1"} == {3.0}


def test_the_encoder_comes_on_top():
    found = experiments.with_encoder(
        Found(
            (
                Observation("encoder", "GiB by a line", 5.0),
                Observation("fp8, 10 labels", "GiB of the classifier by a line", 2.0),
            )
        )
    )
    assert [(o.case, o.quantity, o.value) for o in found] == [
        ("fp8, 10 labels", "GiB with an encoder", 7.0)
    ]


@pytest.mark.parametrize(
    "experiment", [experiments.QUALITY, experiments.ENCODERS, experiments.GRID, experiments.RATES]
)
def test_the_papers_size_needs_its_data_and_encoder(experiment):
    with pytest.raises(ValueError, match="size=paper needs data and encoder: give --data DIR"):
        experiment.parts(Options("paper", data="somewhere"))


def test_the_papers_size_has_the_papers_hyperparameters():
    parts = {
        part.name: part for part in experiments.QUALITY.parts(Options("paper", None, "d", "e"))
    }
    fp8 = parts["label-texts-fp8"].config
    assert (fp8.dropout, fp8.batch_size, fp8.epochs, fp8.products) == (0.85, 512, 100, "fp8")
    assert str(fp8.data) == "d/LF-AmazonTitles-131K"
    others = parts["no-label-texts-others"].config
    assert (others.dropout, others.precision) == (0.7, ("fp32", "renee", "bf16"))


@pytest.mark.parametrize("size", ["smallest", "small"])
def test_no_machine_decides_what_is_multiplied(size):
    for experiment in (
        experiments.QUALITY,
        experiments.ENCODERS,
        experiments.GRID,
        experiments.RATES,
    ):
        for part in experiment.parts(Options(size)):
            assert part.config.products in ("fp8", "bf16", "fp32")
            assert part.config.threads == 1


def test_published_numbers_are_those_of_the_checks():
    by_name = {claim.name: claim for claim in claims.CLAIMS}
    table = by_name["elmo-table8"]
    found = [check.published(table.published) for check in table.checks]
    assert None not in found
    own = dataclasses.replace(table.checks[0], case="nothing")
    assert own.published(table.published) is None


def test_a_linear_tree_learns_what_words_say(tmp_path, monkeypatch, capfd):
    write_data(tmp_path)
    config = XMCConfig(data=tmp_path, width=16, batch_size=8)
    found = linear_tree.quality(config, "tree", [0, 1])
    print("later")
    assert capfd.readouterr() == ("later\n", "")
    # Two of eight words name an instance's two labels.
    assert min(found.values("tree", "P@1").values()) > 80
    assert set(found.values("tree", "P@1")) == {0, 1}
    ids = torch.tensor([3, 1, 3, 2])
    bags = Bags(ids, torch.tensor([0, 3, 3, 4]), torch.tensor([1.0, 2.0, 1.0, 5.0]), ids * 0)
    first, none, last = linear_tree._features(bags)
    assert [term for term, _ in first] == [1, 3]
    assert [value for _, value in first] == pytest.approx([0.5**0.5, 0.5**0.5])
    assert none == []
    assert last == [(2, 1.0)]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match="needs omikuji: pip install"):
        linear_tree.quality(config, "tree", [0])

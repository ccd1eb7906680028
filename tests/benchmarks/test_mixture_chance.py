"""The benchmark of chance: its errors are of the size it says, its record comes back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Scripts find each other in their own folder.
sys.path.insert(0, str(BENCHMARKS))
try:
    import mixture_chance
    from mixture_chance import MIXTURE, PLAIN, Job, Run
finally:
    sys.path.remove(str(BENCHMARKS))


def test_errors_at_the_start_have_no_bias_and_the_size_of_e4m3s():
    weights = {"matrix": torch.randn(400, 500), "vector": torch.ones(5)}
    found = mixture_chance.disturbed(weights, seed=0, draw=1)
    assert torch.equal(found["vector"], weights["vector"])
    error = found["matrix"].double() / weights["matrix"].double() - 1
    assert float(error.abs().mean()) == pytest.approx(0.0225, rel=0.01)
    assert float(error.mean()) == pytest.approx(0, abs=3e-4)
    again, other = (mixture_chance.disturbed(weights, seed=0, draw=d)["matrix"] for d in (1, 2))
    assert torch.equal(again, found["matrix"])
    assert not torch.equal(other, found["matrix"])


def test_a_record_comes_back_and_is_summed_up(tmp_path):
    alike = {s: {"partitions": 0.5, "directions": 0.25} for s in mixture_chance.SCALINGS}
    runs = [
        Run(Job(PLAIN, 0, draw), loss, dict.fromkeys(mixture_chance.PARTITIONS, 1.01 * loss), alike)
        for draw, loss in enumerate((2.0, 2.02, 1.98))
    ]
    runs += [Run(Job(MIXTURE, 0, draw), loss, {}, {}) for draw, loss in ((1, 2.0402), (2, 1.98))]
    record = tmp_path / "chance.json"
    mixture_chance.write(record, {}, 7, runs)
    assert mixture_chance.read(record, 7) == runs
    assert mixture_chance.read(record, 8) == mixture_chance.read(tmp_path / "none.json", 7) == []
    found = mixture_chance.summarise(runs)
    start = found["an error at the start, above none"]
    assert start == pytest.approx(
        {
            "mean": 0,
            "standard deviation": 2**0.5,
            "standard error": 1,
            "least": -1,
            "most": 1,
        }
    )
    mixed = found["a mixture, above BF16 from the same disturbed weights"]
    assert (mixed["least"], mixed["most"]) == pytest.approx((0, 1))
    evaluated = found["weights trained in BF16, evaluated in"]
    assert all(evaluated[p]["mean"] == pytest.approx(1) for p in mixture_chance.PARTITIONS)
    assert found["values alike"]["gam"] == {"partitions": 0.5, "directions": 0.25}

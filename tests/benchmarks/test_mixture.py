"""The benchmark of mixtures: its eager twin decides what the library decides."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from subulp.numerics import mixture
from subulp.numerics.mixture import RECIPES
from subulp.numerics.partition import PARTITIONS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Scripts find each other in their own folder.
sys.path.insert(0, str(BENCHMARKS))
try:
    import mixture as benchmark
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_eager_decides_the_same(recipe, partition):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 256, generator=generator)
    # Some blocks that E4M3 is too narrow for.
    x[:128, :128] *= torch.empty(128, 128).uniform_(-22, 0, generator=generator).exp2()
    codes, types = benchmark.eager(x, recipe, partition)
    found, _ = mixture.encode(x, RECIPES[recipe], partition)
    chosen = found.block_types()
    assert torch.equal(types.flatten().int(), chosen.flatten().int())
    if not bool((chosen == len(found.formats)).any()):
        assert torch.equal(codes, found.codes)


def test_it_records_every_case(tmp_path, monkeypatch):
    # Other tests measure the memory of this process.
    monkeypatch.setattr(benchmark, "keep_freed", lambda: None)
    benchmark.main(size=256, rounds=1, out=tmp_path / "mixture.json")
    record = json.loads((tmp_path / "mixture.json").read_text())
    assert len(record["cpu"]) == 2 * len(RECIPES) * len(PARTITIONS)
    assert all(row["share_of_bound"] > 0 and row["times_eager"] > 0 for row in record["cpu"])


@pytest.mark.gpu
def test_it_runs_on_a_gpu():
    assert len(benchmark.on_gpu([(256, 256, 256)], 1)) == len(RECIPES) * len(PARTITIONS)

"""The memory benchmark: every loop holds the bytes that arithmetic says, category by category."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from subulp.lab.reproduce.extra_bits import memory_loops
from subulp.nn.linear import TILE_BYTES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Scripts find each other in their own folder.
sys.path.insert(0, str(BENCHMARKS))
try:
    import memory_timeline
finally:
    sys.path.remove(str(BENCHMARKS))

# A gradient of over a MiB: smaller ones wait for each other when the step is fused.
SHAPE = memory_loops.Shape(layers=4, width=768, batch_size=2)
# Beside what arithmetic counts: activations of a batch, scalars, and the tile into which a narrow
# weight is decoded.
SLACK = 64 * 1024


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other on busy cores take longer than such small layers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def found(one_thread) -> dict[str, dict]:
    return {name: memory_timeline.live(name, SHAPE) for name in memory_loops.CASES}


@pytest.mark.parametrize("name", memory_loops.CASES)
def test_bytes_of_each_category(name, found):
    case, peak = memory_loops.CASES[name], found[name]["peak_bytes"]
    assert peak["weights"] == case.bytes["weights"] * SHAPE.parameters
    states = peak["states"] - case.bytes["states"] * SHAPE.parameters
    # subulp counts the steps of each parameter in four bytes.
    assert states == (0 if name in memory_loops.STANDARD else 4 * SHAPE.layers)
    layer = case.layer_bytes.get("gradients", 0) * SHAPE.layer
    assert peak["gradients"] == case.bytes["gradients"] * SHAPE.parameters + layer


@pytest.mark.parametrize("name", memory_loops.CASES)
def test_the_peak_is_what_arithmetic_says(name, found):
    tile = 0 if name in memory_loops.STANDARD else TILE_BYTES
    beside = found[name]["peak_bytes"]["total"] - memory_loops.CASES[name].expected(SHAPE)
    assert 0 <= beside <= tile + SLACK


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("standard", "backward"),
        ("standard-late-zero-grad", "forward"),
        ("standard-backward-inside", "backward"),
        ("standard-foreach-decay", "step"),
    ],
)
def test_each_standard_loop_has_its_own_peak(name, phase, found):
    assert found[name]["peak_at"].split()[1] == phase


@pytest.mark.parametrize("name", memory_loops.CASES)
def test_every_loop_trains_the_same(name, found):
    losses, others = found[name]["losses"], found["standard"]["losses"]
    assert losses == sorted(losses, reverse=True)
    assert losses == pytest.approx(others, rel=0.05)


def test_weight_decay_costs_a_fused_step_nothing(found):
    plain, decayed = (found[name]["peak_bytes"] for name in ("extra-bits-8", "extra-bits-8-decay"))
    assert plain == decayed


def test_too_large_is_refused_before_it_is_built():
    row = memory_timeline.measure("standard", SHAPE, available=1000)
    assert row["expected_bytes"] == 12 * SHAPE.parameters + 2 * SHAPE.layer
    assert row["refused"] == "needs 0.0 GB, 0.0 GB are available"


def test_widths_are_whole_groups_of_extra_bits():
    shape = memory_loops.Shape.of(1_000_000_000, 32, 2)
    assert shape.width % 32 == 0
    assert shape.parameters == pytest.approx(1_000_000_000, rel=0.01)


def test_record_and_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_timeline, "alone", lambda function, *arguments: function(*arguments))
    memory_timeline.main(
        parameters=100_000,
        layers=4,
        cases="standard,extra-bits-8",
        reserve_gb=0,
        out=tmp_path / "results" / "record.json",
        figures=tmp_path / "figures",
    )
    record = json.loads((tmp_path / "results" / "record.json").read_text())
    assert record["parameters"] == 4 * 160**2
    standard, ours = record["cases"]
    assert (standard["name"], ours["name"]) == ("standard", "extra-bits-8")
    live = 1 - ours["peak_bytes"]["total"] / standard["peak_bytes"]["total"]
    assert record["saved"]["extra-bits-8"]["standard"]["live"] == live
    for name in ("memory-timeline.png", "memory-peaks.png"):
        assert (tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG")


def test_the_script_measures_in_processes_of_their_own():
    command = [sys.executable, str(BENCHMARKS / "memory_timeline.py"), "--reserve-gb", "0"]
    command += ["--parameters", "100_000", "--cases", "extra-bits-8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "extra-bits-8: 0.0 GB at 1 backward" in done.stdout


def test_an_unknown_case_is_named():
    with pytest.raises(SystemExit, match=r"no-such-loop.*choose from standard"):
        memory_timeline.main(cases="no-such-loop")

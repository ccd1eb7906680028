"""The command for GPUs: its parts run on small tensors, and it hides no failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import gpu
    import gpu_rates
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("section", gpu_rates.SECTIONS)
def test_rates_run_on_small_tensors(section, capsys):
    gpu_rates.main([section, "--small"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["aim"] == gpu_rates.AIMS[section]
    # A CPU has nothing to choose.
    assert bool(found["rates"]) == (section != "tuning")
    assert found["configurations"] == []


def test_every_kernel_is_among_those_that_the_sanitizer_sees():
    """Interpreted, their launches counted."""
    code = """
import sys
from collections import Counter
from triton.runtime import interpreter
counts, run = Counter(), interpreter.InterpretedFunction.run
def counted(function, *args, grid, warmup, **options):
    counts[function.fn.__name__] += 1
    return run(function, *args, grid=grid, warmup=warmup, **options)
interpreter.InterpretedFunction.run = counted
import gpu_kernels
gpu_kernels.main("cpu")
print(" ".join(sorted(counts)))
"""
    environment = {**os.environ, "SUBULP_BACKEND": "triton", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=BENCHMARKS, env=environment, check=True, capture_output=True, text=True
    )
    launched = set(done.stdout.splitlines()[-1].split())
    sources = (BENCHMARKS.parent / "src" / "subulp" / "ops").rglob("triton*.py")
    lines = [line for path in sources for line in path.read_text().splitlines()]
    kernels = {
        line.removeprefix("def ").split("(")[0]
        for before, line in pairwise(lines)
        if line.startswith("def ") and "_kernel(" in line and "triton.jit" in before
    }
    # A CPU has products of its own.
    assert launched | {"product_kernel"} == kernels


def test_without_a_gpu_it_fails_and_says_where(tmp_path, monkeypatch, capsys):
    seen: dict[str, dict[str, str]] = {}

    def run(clock, section, command, **environment):
        passed = section == "checks"
        seen[section] = environment
        return {"status": "passed" if passed else "failed", "seconds": 1.0, "output": "no GPU"}

    monkeypatch.setattr(gpu, "run", run)
    out = tmp_path / "record.json"
    assert gpu.main(["--no-build", "--out", str(out)]) == 1
    record = json.loads(out.read_text())
    assert record["sections"]["checks"]["status"] == "passed"
    assert record["sections"]["tests"]["status"] == "failed"
    printed = capsys.readouterr().out
    assert "--- tests: failed\nno GPU" in printed
    assert "1 of 9 sections passed" in printed
    # Kernels are measured first, and what was chosen is what the rates are of.
    measured = [name for name in seen if name in ("tuning", "rates")]
    assert measured == ["tuning", "rates"]
    assert seen["tuning"]["SUBULP_TUNE"] == "1"
    assert seen["rates"] == {**seen["tuning"], "SUBULP_TUNE": "0"}


def test_what_takes_too_long_is_no_pass(monkeypatch):
    monkeypatch.setitem(gpu.LIMITS, "checks", 0.2)
    clock = gpu.Clock(time.monotonic() + 60)
    found = gpu.run(clock, "checks", [sys.executable, "-c", "import time; time.sleep(60)"])
    assert found["status"] == "took too long"
    failed = gpu.run(clock, "build", [sys.executable, "-c", "raise SystemExit('wrong')"])
    assert failed["status"] == "failed"
    assert "wrong" in failed["output"]


def test_all_together_take_no_longer_than_they_may(tmp_path, capsys):
    begun = time.monotonic()
    out = tmp_path / "record.json"
    assert gpu.main(["--no-build", "--out", str(out), "--minutes", "0.005"]) == 1
    assert time.monotonic() - begun < 20
    sections = json.loads(out.read_text())["sections"]
    assert len(sections) == 9
    assert {found["status"] for found in sections.values()} <= {"took too long", "not run"}
    assert "no time was left: give more with --minutes" in capsys.readouterr().out

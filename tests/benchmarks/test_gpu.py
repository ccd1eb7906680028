"""The command for GPUs: its parts run on small tensors, and it hides no failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops.support import interpreted

from .scripts import BENCHMARKS, script

gpu, gpu_kernels, gpu_memory = map(script, ("gpu", "gpu_kernels", "gpu_memory"))
gpu_peers, gpu_rates, gpu_turns = map(script, ("gpu_peers", "gpu_rates", "gpu_turns"))
ROOT = BENCHMARKS.parent


@pytest.mark.parametrize("section", gpu_rates.SECTIONS)
def test_rates_run_on_small_tensors(section, capsys, monkeypatch):
    monkeypatch.setattr(gpu_peers, "installed", lambda package: False)
    gpu_rates.main([section, "--small"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["aim"] == gpu_rates.AIMS[section]
    # A CPU has nothing to choose.
    assert bool(found["rates"]) == (section != "tuning")
    assert found["configurations"] == []
    absent = {
        "optimizers": ["optimi", "flashoptim"],
        "tables": ["fbgemm_gpu"],
        "mixtures": ["torchao", "transformer_engine"],
    }
    assert found["peers"] == {"absent": absent.get(section, []), "failed": {}}
    # Every number has its place in the tables, and aims find what they judge.
    sections = {section: {"status": "passed", "result": found}}
    machine = {"gpu": None, "date": "2026-01-01", "versions": {}}
    page = gpu.tables_of({"machine": machine, "sections": sections})
    assert all(f"| {name} |" in page for name in found["rates"])
    aims = gpu.judge(section, found["rates"], "NVIDIA H100 80GB HBM3")
    assert bool(aims) == (section != "tuning")


def test_the_encoder_has_the_size_of_bert_base():
    with torch.device("meta"):
        encoder = gpu_memory.Encoder(gpu_turns.FULL, again=False)
    assert sum(p.numel() for p in encoder.parameters()) == 109_482_240


def test_activations_that_are_computed_again_are_the_same():
    torch.manual_seed(0)
    encoder = gpu_memory.Encoder(gpu_turns.SMALL, again=False).eval()
    tokens, grads = torch.randint(50, (3, 4)), []
    for encoder.again in (False, True):
        encoder.zero_grad()
        encoder(tokens).square().sum().backward()
        grads.append([p.grad for p in encoder.parameters()])
    assert all(map(torch.equal, *grads))


def test_fp8_products_are_what_fp32_has_of_the_same_numbers():
    generator = torch.Generator().manual_seed(0)
    # Small whole numbers, which both formats have, and so have their sums.
    a, b = (torch.randint(-3, 4, s, generator=generator).float() for s in ((32, 64), (64, 16)))
    heads = script("gpu_heads")
    for kind in ("fp32", "bf16", "fp8"):
        assert torch.equal(heads.product(kind, a, b)().float(), a @ b)
        assert torch.equal(heads.product(kind, b.t(), a.t())().float(), b.t() @ a.t())


def test_heads_where_units_of_fp8_are():
    heads = script("gpu_heads")
    peaks = {"bf16": 1e12, "fp8": 2e12}
    found = heads.of_batch(torch.device("cpu"), gpu_turns.SMALL, 16, peaks, units=True)
    ours = [f"fp8, 16 instances, {v}" for v in ("1 chunk", "8 chunks", "1 chunk, loss")]
    for name in (*ours, "three bare products, fp8, 16 instances"):
        assert found[name]["share_of_peak"] > 0
        assert found[name]["time_of_products"] > 0
    assert found["three bare products, all fp8, 16 instances"]["peer"]
    squares = heads.squares(torch.device("cpu"), gpu_turns.SMALL, peaks, units=True)
    assert [row["products"] for row in squares.values()] == ["bf16", "fp8"]
    aims = gpu.judge("heads", found, "NVIDIA H100 80GB HBM3")
    assert len(aims) == 2 + 6


def test_a_share_of_the_peak_counts_each_format_at_its_own():
    heads = script("gpu_heads")
    peaks = {"bf16": 100.0, "fp8": 200.0}
    assert heads.share_of_peak({"bf16": 50.0}, 1.0, peaks) == 0.5
    assert heads.share_of_peak({"bf16": 50.0, "fp8": 50.0}, 1.0, peaks) == 0.75
    assert heads.share_of_peak({"fp32": 50.0}, 1.0, peaks) is None


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
    assert launched == kernels


@interpreted
def test_the_sanitizer_sees_products_on_units_and_decoded_ones():
    kinds = set()
    for job in gpu_kernels.products("cpu"):
        assert job.is_aligned
        with np.errstate(all="ignore"):
            found, decoded = (
                gpu_kernels.triton_product.multiply(each)
                for each in (job, replace(job, units=False))
            )
        parts = [part for half in (found == decoded).split(128) for part in half.split(128, dim=1)]
        # Units multiply all of a part or nothing of it, and round at other places.
        kinds |= {(job.dtype, bool(part.all())) for part in parts}
    assert kinds >= {
        (dtype, way) for dtype in (torch.bfloat16, torch.float16) for way in (True, False)
    }


BLOCKED = """
from importlib.machinery import PathFinder
from functools import partial
def find_spec(find, name, path=None, target=None):
    return None if name in {names!r} else find(name, path, target)
# No function: pytest keeps it in a class, where that would become a method.
PathFinder.find_spec = partial(find_spec, PathFinder.find_spec)
import pytest
raise SystemExit(pytest.main({arguments!r}))
"""


def test_its_tests_need_no_more_than_torch_triton_numpy_and_pytest():
    """Collected while whatever else the project asks for cannot be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [text for texts in project["optional-dependencies"].values() for text in texts]
    names = {text.split(">")[0].split("<")[0].strip().replace("-", "_") for text in wanted}
    # What PyTorch and pytest need themselves.
    names -= {"triton", "pytest", "packaging", "jinja2"}
    names |= {"optimi", "sklearn", "fbgemm_gpu", "torchrec", "flashoptim", "transformer_engine"}
    names |= {"xdist"}
    assert names >= {"hypothesis", "cyclopts", "pydantic", "torchao", "transformers", "ml_dtypes"}
    options = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    code = BLOCKED.format(names=sorted(names), arguments=[*options, *gpu.test_files()])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1].split("/")[0]) > 600


@pytest.mark.parametrize("has_xdist", [False, True])
def test_its_tests_run_in_several_processes_where_they_can(monkeypatch, has_xdist):
    seen = []

    def run(clock, section, command, **environment):
        seen.append((command, environment))

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(
        gpu.importlib.util,
        "find_spec",
        lambda name: True if has_xdist or name == "pytest" else None,
    )
    gpu.tests(gpu.Clock(0.0))
    ((command, environment),) = seen
    assert ("-n" in command) == has_xdist
    assert not has_xdist or command[command.index("-n") + 1] == "12"
    # No other plugin has a say.
    assert environment == {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    assert {"tests/gpu/test_launches.py", "tests/nn/test_cached_lookup.py"} & set(command)


def faked(monkeypatch, found):
    """Sections that are not run; the environment of each, in their order."""
    seen: dict[str, dict[str, str]] = {}

    def run(clock, section, command, **environment):
        seen[section] = environment
        return {"seconds": 1.0, **found(section)}

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    return seen


def test_without_a_gpu_it_fails_and_says_where(tmp_path, monkeypatch, capsys):
    def found(section):
        return {"status": "passed" if section == "checks" else "failed", "output": "no GPU"}

    seen = faked(monkeypatch, found)
    out = tmp_path / "record.json"
    assert gpu.main(["--out", str(out)]) == 1
    record = json.loads(out.read_text())
    assert record["sections"]["checks"]["status"] == "passed"
    assert record["sections"]["tests"]["status"] == "failed"
    printed = capsys.readouterr().out
    assert "--- tests: failed\nno GPU" in printed
    assert "1 of 11 sections passed" in printed
    # What is worth the most comes first: limits count on it.
    assert list(seen) == list(gpu.LIMITS)
    # Kernels are measured before what their choices are for.
    assert seen["tuning"]["SUBULP_TUNE"] == "1"
    for name in gpu.MEASURED[1:]:
        assert seen[name] == {**seen["tuning"], "SUBULP_TUNE": "0"}


def test_a_missed_aim_is_listed_and_is_no_failure(tmp_path, monkeypatch, capsys):
    rates = {
        "slow": {"share_of_copy_bandwidth": 0.5, "seconds": 1.0},
        "fast": {"share_of_copy_bandwidth": 0.9, "seconds": 0.5},
    }
    peers = {"absent": ["flashoptim"], "failed": {"torch-optimi": "RuntimeError: no kernel"}}
    nothing = {"aim": "none", "rates": {}, "peers": {"absent": [], "failed": {}}}

    def found(section):
        result = {"aim": "bandwidth", "rates": rates, "peers": peers}
        output = json.dumps(result if section == "optimizers" else nothing)
        return {"status": "passed", "output": f"a warning\n{output}"}

    faked(monkeypatch, found)
    monkeypatch.setattr(gpu, "describe", lambda packages: {"gpu": "NVIDIA H100 80GB HBM3"})
    out = tmp_path / "record.json"
    assert gpu.main(["--out", str(out)]) == 0
    aims = json.loads(out.read_text())["sections"]["optimizers"]["aims"]
    assert aims == {
        "slow: share of a copy's bandwidth": [0.5, ">= 0.85", False],
        "fast: share of a copy's bandwidth": [0.9, ">= 0.85", True],
    }
    printed = capsys.readouterr().out
    assert "missed     slow: share of a copy's bandwidth: 0.5 (>= 0.85)" in printed
    assert "1 met, 1 missed, 0 not judged" in printed
    assert "flashoptim is not installed" in printed
    assert "torch-optimi failed: RuntimeError: no kernel" in printed
    assert "11 of 11 sections passed" in printed


@pytest.fixture
def ready(monkeypatch, tmp_path):
    """A file; a command has taken too long once that is there, on however slow a machine."""
    file, communicate = tmp_path / "ready", subprocess.Popen.communicate
    expired = []

    def wait(process, input=None, timeout=None):
        if expired or timeout is None:
            return communicate(process, input, timeout)
        while not file.exists():
            assert process.poll() is None
            time.sleep(0.02)
        expired.append(process)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", wait)
    return file


def is_running(process):
    """Whether a process is there, and has not ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_what_takes_too_long_is_no_pass(ready):
    # What the command has started is ended with it.
    child = (
        "import os, pathlib, time; "
        f"new = pathlib.Path({str(ready)!r} + '.new'); new.write_text(str(os.getpid())); "
        f"new.rename({str(ready)!r}); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    found = gpu.run(gpu.Clock(time.monotonic()), "checks", [sys.executable, "-c", parent])
    assert found["status"] == "took too long"
    begun = int(ready.read_text())
    for _ in range(3000):
        if not is_running(begun):
            break
        time.sleep(0.02)
    assert not is_running(begun)


def test_what_fails_is_no_pass():
    command = [sys.executable, "-c", "raise SystemExit('wrong')"]
    failed = gpu.run(gpu.Clock(time.monotonic()), "build", command)
    assert failed["status"] == "failed"
    assert "wrong" in failed["output"]


@pytest.fixture(params=[False, True], ids=["", "in the background"])
def ignored(request):
    """Interrupts are ignored, as in what a script starts in the background."""
    before = signal.getsignal(signal.SIGINT)
    if request.param:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored")
def test_tests_that_take_too_long_still_name_their_failures(ready, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "LAST_WORDS", 600.0)
    file = tmp_path / "test_slow.py"
    file.write_text(
        "import pathlib, time\n"
        "def test_a(): assert 0, 'wrong'\n"
        f"def test_b(): pathlib.Path({str(ready)!r}).touch(); time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir"]
    found = gpu.run(gpu.Clock(time.monotonic()), "tests", [*command, str(tmp_path), str(file)])
    assert found["status"] == "took too long"
    assert "AssertionError: wrong" in found["output"]


def test_a_command_that_does_not_end_is_ended(ready, monkeypatch):
    monkeypatch.setattr(gpu, "LAST_WORDS", 1.0)
    code = "import pathlib, signal, time; signal.signal(2, signal.SIG_IGN); "
    code += f"print('here', flush=True); pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    found = gpu.run(gpu.Clock(time.monotonic()), "checks", [sys.executable, "-c", code])
    assert found["status"] == "took too long"
    assert found["output"] == "here\n"


def test_limits_are_eight_minutes_and_leave_each_section_its_own(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    assert sum(gpu.LIMITS.values()) == 480
    assert list(gpu.LIMITS)[2:] == ["tests", *gpu.MEASURED, "sanitizer", "races"]
    # Whoever comes before takes all that it may: the next still has its own.
    spent = 0.0
    for name, limit in gpu.LIMITS.items():
        seconds = gpu.Clock(1000.0 - spent).seconds(name)
        assert seconds == pytest.approx(limit)
        spent += limit


def test_all_together_take_no_longer_than_they_may(tmp_path, capsys):
    out = tmp_path / "record.json"
    assert gpu.main(["--no-build", "--out", str(out), "--minutes", "0.005"]) == 1
    sections = json.loads(out.read_text())["sections"]
    assert len(sections) == 10
    assert {found["status"] for found in sections.values()} <= {"took too long", "not run"}
    assert "0 of 10 sections passed" in capsys.readouterr().out


def test_without_time_nothing_is_begun():
    clock = gpu.Clock(time.monotonic() - 1000)
    found = gpu.run(clock, "checks", ["no such command"])
    assert found["status"] == "not run"
    assert found["output"] == "no time was left: give more with --minutes"

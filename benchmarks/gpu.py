"""Everything that a GPU can tell about subulp, in one command: ``make gpu``.

Builds the package for the Python that runs this, compares every operation with its reference, runs
the tests that are marked ``gpu``, one case of each kernel under compute-sanitizer, has the kernels
of gpu_rates.py choose their configurations, and measures the rates of these; writes one record for
the device, prints a table of it and what passed and failed. It needs no network and no more than
PyTorch, Triton, NumPy, pytest and a compiler: what else is missing is named. Its status is 0 only
if nothing failed.

    python benchmarks/gpu.py [--out benchmarks/results/gpu-NAME.json] [--no-build] [--minutes 8]

What the minutes do not suffice for is not run, and counts as a failure.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMITS = {"build": 150, "checks": 60, "tests": 200, "tuning": 100, "rates": 60, "sanitizer": 100}
"""Seconds that a section may take, however many are left."""

MINUTES = 8.0
"""Of all sections together."""

CHECKS = """
import json
from subulp.diagnostics.self_check import self_check
from subulp.ops.backend import OPS
checks = [self_check(op, "cuda") for op in OPS]
print(json.dumps({c.name: c.error or f"{c.cases} cases" for c in checks}))
raise SystemExit(any(c.error for c in checks))
"""

# The tests of the lab want its own dependencies, which this machine need not have.
TESTS = ("tests/gpu", "tests/ops", "tests/nn", "tests/optim")


def main(arguments: list[str]) -> int:
    out = Path(arguments[arguments.index("--out") + 1]) if "--out" in arguments else None
    minutes = MINUTES
    if "--minutes" in arguments:
        minutes = float(arguments[arguments.index("--minutes") + 1])
    clock = Clock(time.monotonic() + 60 * minutes)
    record: dict[str, Any] = {"benchmark": "gpu", "machine": machine(), "sections": {}}
    sections = record["sections"]
    if "--no-build" not in arguments:
        pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "."]
        sections["build"] = run(clock, "build", pip)
    sections["checks"] = run(clock, "checks", [sys.executable, "-c", CHECKS])
    sections["tests"] = tests(clock)
    # Of its own, so that every record is of choices made in the same run.
    with tempfile.TemporaryDirectory() as cache:
        for name in ("tuning", "optimizers", "tables", "heads", "mixtures", "memory"):
            is_first = name == "tuning"
            command = [sys.executable, str(HERE / "gpu_rates.py"), name]
            environment = {"SUBULP_CACHE": cache, "SUBULP_TUNE": str(int(is_first))}
            found = run(clock, "tuning" if is_first else "rates", command, **environment)
            found["result"] = parsed(found)
            sections[name] = found
    sections["sanitizer"] = sanitizer(clock)
    write(record, out)
    return show(sections)


def machine() -> dict[str, Any]:
    sys.path.insert(0, str(HERE))
    from machine import describe  # noqa: PLC0415 - beside this file

    packages = ("triton", "fbgemm-gpu", "torchao", "torch-optimi", "transformer-engine")
    return describe(packages)


@dataclass(frozen=True)
class Clock:
    """When all is to be over, by ``time.monotonic``."""

    end: float

    def seconds(self, section: str) -> float:
        """How many a section may take."""
        return min(LIMITS[section], self.end - time.monotonic())


def run(clock: Clock, section: str, command: list[str], **environment: str) -> dict[str, Any]:
    """Run a command from the root of the sources; its status, seconds and what it printed."""
    seconds = clock.seconds(section)
    if seconds <= 0:
        output = "no time was left: give more with --minutes"
        return {"status": "not run", "seconds": 0.0, "output": output}
    print(f"{section}: {' '.join(command)[:120]}", flush=True)
    started = time.monotonic()
    variables = {**os.environ, **environment}
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        status, printed, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        status = None
        printed, errors = (
            text.decode() if isinstance(text, bytes) else text or ""
            for text in (late.stdout, late.stderr)
        )
    return {
        "status": "passed" if status == 0 else "took too long" if status is None else "failed",
        "seconds": time.monotonic() - started,
        "output": (printed if status == 0 else printed + errors)[-4000:],
    }


def parsed(found: dict[str, Any]) -> Any:
    """The JSON object of the last line, which is then not kept as text."""
    if found["status"] != "passed":
        return None
    return json.loads(found.pop("output").strip().splitlines()[-1])


def tests(clock: Clock) -> dict[str, Any]:
    """The tests that are marked ``gpu``, of all files whose imports this machine has."""
    files = [
        str(path.relative_to(ROOT))
        for folder in TESTS
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        if re.search(r"pytest\.mark\.gpu|DEVICES|on_every_device|any_ranks", path.read_text())
    ]
    if importlib.util.find_spec("pytest") is None:
        return {"status": "failed", "seconds": 0.0, "output": "pytest is not installed"}
    # A file that cannot be imported is a failure, and does not keep the others from running.
    options = ["-m", "gpu", "-q", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    return run(clock, "tests", [sys.executable, "-m", "pytest", *options, *files])


def sanitizer(clock: Clock) -> dict[str, Any]:
    """One case of each kernel under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"status": "not run", "seconds": 0.0, "output": "compute-sanitizer is not here"}
    command = [tool, "--error-exitcode", "9", "--print-limit", "5", sys.executable]
    # Memory that PyTorch keeps would hide accesses beyond a tensor's end.
    return run(
        clock,
        "sanitizer",
        [*command, str(HERE / "gpu_kernels.py")],
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )


def write(record: dict[str, Any], out: Path | None) -> None:
    if out is None:
        device = record["machine"]["gpu"] or "none"
        name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        out = HERE / "results" / f"gpu-{name}.json"
    out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {out}")


def show(sections: dict[str, Any]) -> int:
    """Print the rates, and what passed and failed; the status of the whole."""
    for name, found in sections.items():
        result = found.get("result")
        if result is None:
            continue
        print(f"\n{name}: aim {result['aim']}")
        for method, numbers in result["rates"].items():
            named = numbers if isinstance(numbers, dict) else {"": numbers}
            line = ", ".join(f"{key} {value:.4g}" for key, value in named.items() if value)
            print(f"  {method:32} {line}")
    print()
    for name, found in sections.items():
        print(f"{name:12} {found['status']:14} {found['seconds']:6.1f} s")
    wrong = [name for name, found in sections.items() if found["status"] != "passed"]
    for name in wrong:
        print(f"\n--- {name}: {sections[name]['status']}\n{sections[name].get('output', '')}")
    print(f"\n{len(sections) - len(wrong)} of {len(sections)} sections passed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

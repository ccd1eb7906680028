"""Everything that a GPU can tell about subulp, in one command: ``make gpu``.

Builds the package for the Python that runs this, compares every operation with its reference, runs
the tests that are marked ``gpu``, has the kernels of gpu_rates.py choose their configurations,
measures rates and memory with these, and runs one case of each kernel under compute-sanitizer;
writes one record for the device, and prints what it measured, which aims that meets, and what
passed and failed. It needs no network and no more than PyTorch, Triton, NumPy, pytest and a
compiler; pytest-xdist, compute-sanitizer and peers are used where they are, and what is missing is
named. Its status is 0 only if nothing failed: an aim that is missed is listed, and is no failure.

    python benchmarks/gpu.py [--out benchmarks/results/gpu-NAME.json] [--no-build] [--minutes 8]
    python benchmarks/gpu.py --table RECORD.json

What the minutes do not suffice for is not run, and counts as a failure. The second prints the
tables that README.md has of a record.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from gpu_aims import judge, verdict  # noqa: E402 - beside this file
from gpu_table import tables_of  # noqa: E402 - the same
from machine import describe  # noqa: E402 - the same

LIMITS = {
    **{"build": 75, "checks": 45, "tests": 120, "tuning": 50, "optimizers": 25, "tables": 25},
    **{"heads": 20, "mixtures": 35, "memory": 15, "sanitizer": 45, "races": 25},
}
"""Seconds of each section, in their order: what one leaves, the next may take."""

MINUTES = sum(LIMITS.values()) / 60
"""Of all sections together."""

LAST_WORDS = 5.0
"""Seconds in which a command that took too long may still tell what it has found."""

MEASURED = ("tuning", "optimizers", "tables", "heads", "mixtures", "memory")
PACKAGES = ("triton", "fbgemm-gpu", "flashoptim", "torchao", "torch-optimi", "transformer-engine")

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
    if "--table" in arguments:
        print(tables_of(json.loads(Path(value_of(arguments, "--table")).read_text())))
        return 0
    out = Path(value_of(arguments, "--out")) if "--out" in arguments else None
    minutes = float(value_of(arguments, "--minutes")) if "--minutes" in arguments else MINUTES
    clock = Clock(time.monotonic(), minutes / MINUTES)
    record: dict[str, Any] = {"benchmark": "gpu", "machine": {}, "sections": {}}
    for name, found in sections_of(clock, build="--no-build" not in arguments):
        if not record["machine"]:
            # Only a package that is built has a version.
            record["machine"] = describe(PACKAGES)
        if found.get("result") is not None:
            device = record["machine"]["gpu"]
            found["aims"] = judge(name, found["result"]["rates"], device)
        record["sections"][name] = found
        # Whatever ends this early leaves what there is.
        path = write(record, out)
    print(f"wrote {path}")
    return show(record["sections"])


def sections_of(clock: Clock, *, build: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the sections in the order of ``LIMITS``: what is worth the most first."""
    if build:
        pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "."]
        yield "build", run(clock, "build", pip)
    yield "checks", run(clock, "checks", [sys.executable, "-c", CHECKS])
    yield "tests", tests(clock)
    # Of its own, so that every record is of choices made in the same run.
    with tempfile.TemporaryDirectory() as cache:
        for name in MEASURED:
            command = [sys.executable, str(HERE / "gpu_rates.py"), name]
            environment = {"SUBULP_CACHE": cache, "SUBULP_TUNE": str(int(name == "tuning"))}
            found = run(clock, name, command, **environment)
            result = parsed(found)
            if result is not None:
                # The numbers, not their text.
                del found["output"]
            yield name, {**found, "result": result}
    yield "sanitizer", sanitizer(clock, "sanitizer", "memcheck")
    # Shared memory is what kernels of sorted segments exchange sums through.
    yield "races", sanitizer(clock, "races", "racecheck", "tables")


def value_of(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


@dataclass(frozen=True)
class Clock:
    """When each section is to be over.

    Attributes:
        begun: When the first one began, by ``time.monotonic``.
        scale: What ``LIMITS`` are multiplied by.
    """

    begun: float
    scale: float = 1.0

    def seconds(self, section: str) -> float:
        """How many a section may take: its own, and what those before it have left."""
        names = list(LIMITS)
        until = sum(LIMITS[name] for name in names[: names.index(section) + 1])
        return self.begun + self.scale * until - time.monotonic()


def run(clock: Clock, section: str, command: list[str], **environment: str) -> dict[str, Any]:
    """Run a command from the root of the sources; its status, seconds and what it printed."""
    seconds = clock.seconds(section)
    if seconds <= 0:
        output = "no time was left: give more with --minutes"
        return {"status": "not run", "seconds": 0.0, "output": output}
    print(f"{section}: {' '.join(command)[:120]}", flush=True)
    started = time.monotonic()
    # A session of its own, to end whatever the command has started along with it.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_interrupts,  # noqa: PLW1509 - this script has one thread
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
        status = "failed" if process.returncode else "passed"
    except subprocess.TimeoutExpired:
        printed, errors = end(process)
        status = "took too long"
    except BaseException:
        end(process)
        raise
    output = printed if status == "passed" else (printed + errors)[-20_000:]
    return {"status": status, "seconds": time.monotonic() - started, "output": output}


def _hear_interrupts() -> None:
    # What a script starts in the background ignores them, and so do all whom that starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a command and what it has started; what it printed, pytest its failures at the last."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        return process.communicate(timeout=LAST_WORDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def parsed(found: dict[str, Any]) -> Any:
    """The JSON object of the last line."""
    if found["status"] != "passed":
        return None
    return json.loads(found["output"].strip().splitlines()[-1])


def test_files() -> list[str]:
    """The files with tests that are marked ``gpu``."""
    return [
        str(path.relative_to(ROOT))
        for folder in TESTS
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        if re.search(r"pytest\.mark\.gpu|DEVICES|on_every_device|any_ranks", path.read_text())
    ]


def tests(clock: Clock) -> dict[str, Any]:
    """The tests that are marked ``gpu``; in several processes where pytest-xdist is installed."""
    if importlib.util.find_spec("pytest") is None:
        return {"status": "failed", "seconds": 0.0, "output": "pytest is not installed"}
    # A file that cannot be imported is a failure, and does not keep the others from running.
    options = ["-m", "gpu", "-q", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:
        # Compiling the kernels is most of the work, and it is the processor's.
        workers = max(1, min(12, (os.cpu_count() or 1) - 2))
        options += ["-p", "xdist.plugin", "-n", str(workers), "--dist", "worksteal"]
    # What other plugins warn of is an error in these tests.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return run(clock, "tests", [sys.executable, "-m", "pytest", *options, *test_files()], **alone)


def sanitizer(clock: Clock, section: str, check: str, *parts: str) -> dict[str, Any]:
    """One case of each kernel under one of compute-sanitizer's checks.

    Args:
        clock: Of all sections.
        section: This one's name.
        check: ``"memcheck"`` or ``"racecheck"``.
        parts: Of gpu_kernels.py; all without any.
    """
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"status": "not run", "seconds": 0.0, "output": "compute-sanitizer is not here"}
    command = [tool, "--tool", check, "--error-exitcode", "9", "--print-limit", "5"]
    # Memory that PyTorch keeps would hide accesses beyond a tensor's end.
    return run(
        clock,
        section,
        [*command, sys.executable, str(HERE / "gpu_kernels.py"), "cuda", *parts],
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )


def write(record: dict[str, Any], out: Path | None) -> Path:
    """Write the record to ``out``, by default to a file that is named after the device."""
    if out is None:
        device = record["machine"]["gpu"] or "none"
        name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        out = HERE / "results" / f"gpu-{name}.json"
    out.write_text(json.dumps(record, indent=2) + "\n")
    return out


def show(sections: dict[str, Any]) -> int:
    """Print the rates, and what passed and failed; the status of the whole."""
    for name, found in sections.items():
        result = found.get("result")
        if result is None:
            continue
        print(f"\n{name}: aim {result['aim']}")
        for method, numbers in result["rates"].items():
            line = ", ".join(f"{key} {n:.4g}" for key, n in numbers.items() if is_shown(n))
            print(f"  {method:32} {line}")
        for package in result["peers"]["absent"]:
            print(f"  {package} is not installed")
        for peer, error in result["peers"]["failed"].items():
            print(f"  {peer} failed: {error}")
    show_aims(sections)
    print()
    for name, found in sections.items():
        print(f"{name:12} {found['status']:14} {found['seconds']:6.1f} s")
    wrong = [name for name, found in sections.items() if found["status"] != "passed"]
    for name in wrong:
        print(f"\n--- {name}: {sections[name]['status']}\n{sections[name].get('output', '')}")
    print(f"\n{len(sections) - len(wrong)} of {len(sections)} sections passed")
    return int(bool(wrong))


def is_shown(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool)


def show_aims(sections: dict[str, Any]) -> None:
    """Which aims are met: a line for each, and their number."""
    aims = [row for found in sections.values() for row in found.get("aims", {}).items()]
    if not aims:
        return
    print("\naims")
    for name, (value, aim, met) in aims:
        number = "no value" if value is None else f"{value:.3g}"
        print(f"  {verdict(met):10} {name}: {number} ({aim})")
    counts = [verdict(met) for _, (_, _, met) in aims]
    kinds = ("met", "missed", "not judged")
    print(", ".join(f"{counts.count(kind)} {kind}" for kind in kinds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

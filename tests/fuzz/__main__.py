"""Fuzz one parser with atheris, or each of them in its own process.

    python -m tests.fuzz --seconds 60             # all of them
    python -m tests.fuzz --target bag --seconds 600

A finding is written to the working folder as ``crash-...``, and ends the process with an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a name of TARGETS; without it, one after the other")
    parser.add_argument("--seconds", type=int, default=60, help="of each target (default: 60)")
    arguments = parser.parse_args()
    if arguments.target is None:
        return _all(arguments.seconds)
    return _fuzz(arguments.target, arguments.seconds)


def _all(seconds: int) -> int:
    from tests.fuzz.targets import TARGETS  # noqa: PLC0415

    failed = []
    for name in TARGETS:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "tests.fuzz", "--target", name, f"--seconds={seconds}"]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(TARGETS)} targets: nothing found")
    return int(bool(failed))


def _fuzz(name: str, seconds: int) -> int:
    import atheris  # noqa: PLC0415 - an extra

    # Only what is imported inside is instrumented, and torch would take minutes.
    with atheris.instrument_imports(include=["subulp.lab", "tomllib", "json"]):
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415

    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for index, data in enumerate(target.seeds):
            (Path(corpus) / str(index)).write_bytes(data)

        def one(data: bytes) -> None:
            with tempfile.TemporaryDirectory() as folder:
                target.run(data, Path(folder))

        limits = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=3000"]
        options = [sys.argv[0], corpus, *limits, "-max_len=4096", "-print_final_stats=1"]
        atheris.Setup(options, one)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Time to import the library, beside the time to import torch.

Every round starts a new process that imports torch and then the library; medians over the rounds.

    python benchmarks/import_time.py --out benchmarks/results/import-time-NAME.json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from machine import describe
from rich.console import Console

PROGRAM = """
import time
start = time.perf_counter()
import torch
between = time.perf_counter()
import subulp, subulp.optim, subulp.nn, subulp.diagnostics
print(between - start, time.perf_counter() - between)
"""

app = App(help=__doc__)


def measure() -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
    )
    torch, ours = map(float, done.stdout.split())
    return torch, ours


@app.default
def run(
    rounds: Annotated[int, Parameter(negative=())] = 11,
    out: Annotated[Path | None, Parameter(negative=())] = None,
) -> None:
    """Measure, print and save.

    Args:
        rounds: Processes.
        out: JSON file for the record.
    """
    measure()  # Compiles the byte code.
    torch, ours = zip(*(measure() for _ in range(rounds)), strict=True)
    found = {
        "torch_seconds": statistics.median(torch),
        "library_seconds": statistics.median(ours),
        "library_seconds_range": [min(ours), max(ours)],
        "aim_seconds": 0.3,
    }
    Console().print(found)
    if out is not None:
        record = {"rounds": rounds, "machine": describe(), **found}
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()

"""Memory over three training steps: standard mixed precision against narrow weights.

"Memory Efficient Mixed Precision Optimizers", Figure 2: a synthetic model, SGD with momentum. Every
loop is measured twice, each time in a process of its own: the bytes of live tensors by category, at
every allocation and release; and, without that bookkeeping, the peak of the process's resident
memory above what it had before the model was built. A loop that does not fit the machine is refused
by name, with the bytes that it needs; the others run.

    python benchmarks/memory_timeline.py --out benchmarks/results/memory-NAME.json --figures DIR
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App
from machine import describe
from memory_figures import plot_peaks, plot_timelines
from rich.console import Console
from rich.table import Table

from subulp.diagnostics.memory import CATEGORIES
from subulp.lab.engine.process_memory import alone, kib
from subulp.lab.reproduce.extra_bits.memory_loops import CASES, STANDARD, STEPS, Shape, live

PANELS = ("standard", "standard-late-zero-grad", "extra-bits-8", "collage-light")
"""The loops of the timeline figure."""
AIM = 0.54
"""The share of the peak that the paper's Figure 2 saves."""


# -------------------------------------------------------------------------------- measuring


def resident(name: str, shape: Shape) -> int:
    """Bytes by which resident memory rises at its peak over the steps of one loop."""
    train(name, Shape(layers=2, width=64, batch_size=shape.batch_size))
    before = kib("/proc/self/status", "VmRSS")
    train(name, shape)
    # Never below zero: a model of a few kilobytes fits the pages that are there already.
    return max(0, kib("/proc/self/status", "VmHWM") - before) * 1024


def train(name: str, shape: Shape) -> None:
    _, _, step = CASES[name].train(shape)
    for _ in range(STEPS):
        step(lambda phase: None)


def measure(name: str, shape: Shape, available: int) -> dict[str, Any]:
    case = CASES[name]
    expected = case.expected(shape)
    row = {"name": name, "about": case.about, "expected_bytes": expected}
    if expected > available:
        return {**row, "refused": f"needs {giga(expected)}, {giga(available)} are available"}
    return {**row, **alone(live, name, shape), "resident_bytes": alone(resident, name, shape)}


# -------------------------------------------------------------------------------- reporting


def savings(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Share of each standard loop's peak that each other loop saves, live and resident."""
    found = {row["name"]: row for row in rows}
    return {
        name: {
            other: {
                "live": 1 - row["peak_bytes"]["total"] / found[other]["peak_bytes"]["total"],
                "resident": 1 - row["resident_bytes"] / max(1, found[other]["resident_bytes"]),
            }
            for other in STANDARD
            if other in found
        }
        for name, row in found.items()
        if name not in STANDARD
    }


def peak_table(rows: Sequence[dict[str, Any]], shape: Shape) -> Table:
    table = Table("bytes a parameter", *CATEGORIES, "live", "arithmetic", "resident")
    for row in rows:
        values = [*(row["peak_bytes"][c] for c in (*CATEGORIES, "total"))]
        values += [row["expected_bytes"], row["resident_bytes"]]
        table.add_row(row["name"], *(f"{value / shape.parameters:.3f}" for value in values))
    return table


def savings_table(saved: dict[str, dict[str, dict[str, float]]]) -> Table:
    others = list(next(iter(saved.values())))
    table = Table("saved, live (resident), %", *others)
    for name, row in saved.items():
        table.add_row(
            name,
            *(
                f"{'[bold]' if row[o]['live'] >= AIM else ''}"
                f"{100 * row[o]['live']:.1f} ({100 * row[o]['resident']:.1f})"
                for o in others
            ),
        )
    return table


def giga(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


app = App(help=__doc__)


@app.default
def main(
    *,
    parameters: int = 1_000_000_000,
    layers: int = 32,
    batch_size: int = 2,
    cases: str = ",".join(CASES),
    reserve_gb: float = 3.0,
    out: Path | None = None,
    figures: Path | None = None,
) -> None:
    """Measure, print two tables, and write the record and the figures.

    Args:
        parameters: Size of the model, about: layers are square.
        layers: Equal layers. One layer's gradient is alive even when the step is fused.
        batch_size: Rows of the batch; activations are not what is measured here.
        cases: Comma-separated names of loops.
        reserve_gb: Memory to leave to the system and to others.
        out: JSON record to write.
        figures: Folder for memory-timeline.png and memory-peaks.png.
    """
    names = cases.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"--cases has no {', '.join(unknown)}: choose from {', '.join(CASES)}")
    shape = Shape.of(parameters, layers, batch_size)
    machine = describe()
    # As wide as the tables, also where the output is no terminal.
    console = Console(width=120)
    console.print(f"{shape.parameters:,} parameters in {layers} layers, {machine['processor']}")
    rows = []
    for name in names:
        available = kib("/proc/meminfo", "MemAvailable") * 1024 - round(reserve_gb * 1e9)
        row = measure(name, shape, available)
        if "refused" in row:
            console.print(f"{name}: {row['refused']}")
        else:
            losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
            peak = giga(row["peak_bytes"]["total"])
            console.print(f"{name}: {peak} at {row['peak_at']}, losses {losses}")
        rows.append(row)

    measured = [row for row in rows if "refused" not in row]
    if not measured:
        raise SystemExit("nothing fits: take fewer --parameters")
    saved = savings(measured)
    console.print(peak_table(measured, shape))
    if any(saved.values()):
        console.print(savings_table(saved))
    timelines = {row["name"]: row.pop("timeline") for row in measured}
    if figures:
        figures.mkdir(parents=True, exist_ok=True)
        chosen = {name: timelines[name] for name in PANELS if name in timelines}
        plot_timelines(chosen or timelines, shape.parameters, figures / "memory-timeline.png")
        plot_peaks(measured, shape.parameters, figures / "memory-peaks.png")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "benchmark": "memory_timeline",
            "machine": machine,
            "parameters": shape.parameters,
            "layers": layers,
            "width": shape.width,
            "batch_size": batch_size,
            "steps": STEPS,
            "cases": rows,
            "saved": saved,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()

"""Peak memory of a classifier's training step against the number of labels.

ELMO, Figure 4, for the classifier alone, and Table 10 with ``--chunks``. Every case runs in a
process of its own: its peak of resident memory above what it had before the classifier was built. A
case that does not fit the machine is refused by name, with the bytes that it needs; the others run.
``--out`` is written after every case, and cases that it has already stay.

    python benchmarks/xmc_memory.py --out benchmarks/results/xmc-memory-NAME.json --figure FILE
    python benchmarks/xmc_memory.py --labels 2812281 --storages bf16 --chunks 1,2,4,8,16,32
"""

from __future__ import annotations

import json
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from cyclopts import App
from machine import describe
from rich.console import Console
from rich.table import Table

from subulp.lab.engine.process_memory import alone, kib
from subulp.lab.reproduce.elmo.classifier_memory import STORAGES, measure

LABELS = "131072,670091,2812281,8623847,18000000"
"""The paper's data sets, and its largest number of labels."""

# Bytes that a step keeps of a weight, and of a logit of the whole batch (of a tile where 0). Renee:
# weight, momentum and FP16 copy, and its gradient as a product, in FP16 and widened.
_WEIGHT = {"fp32": 4, "renee": 16, "bf16": 2, "fp8": 1}
_LOGIT = {"renee": 4}
_TILES = 64 * 2**20


def expected(storage: str, labels: int, dim: int, batch: int) -> int:
    """Bytes that a case needs, to say no before the machine does."""
    return _WEIGHT[storage] * labels * dim + _LOGIT.get(storage, 0) * labels * batch + _TILES


def case(
    storage: str, labels: int, dim: int, batch: int, chunks: int, threads: int
) -> dict[str, Any]:
    """One row of the record."""
    need = expected(storage, labels, dim, batch)
    row: dict[str, Any] = {
        "storage": storage,
        "labels": labels,
        "chunks": chunks,
        "weight_bytes": _WEIGHT[storage] * labels * dim if storage in STORAGES else None,
        "expected_bytes": need,
    }
    available = kib("/proc/meminfo", "MemAvailable") * 1024
    if need > available:
        return {**row, "refused": f"needs {giga(need)}, {giga(available)} are available"}
    try:
        peak, seconds = alone(measure, storage, labels, dim, batch, chunks, threads)
    except BrokenProcessPool:
        # Other processes have taken what was free before.
        return {**row, "refused": f"was killed, needs {giga(need)}"}
    return {**row, "peak_bytes": peak, "seconds": seconds}


_NAMES = {"fp8": "fp8 (E4M3)", "renee": "renee (FP16-FP32)"}


def giga(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _of(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["storage"], row["labels"], row["chunks"]


def _done(row: dict[str, Any]) -> bool:
    return "peak_bytes" in row


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table("labels", "storage", "chunks", "peak", "over the weights", "s/step")
    for row in rows:
        name = (f"{row['labels']:,}", row["storage"], str(row["chunks"]))
        if not _done(row):
            table.add_row(*name, row["refused"], "", "")
            continue
        over = ""
        if row["weight_bytes"]:
            over = f"{100 * (row['peak_bytes'] / row['weight_bytes'] - 1):+.1f} %"
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.2f}"
        table.add_row(*name, giga(row["peak_bytes"]), over, seconds)
    Console().print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Peak memory against labels; what does not fit is drawn hollow, at what it would need."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    from subulp.lab.report.figure import GRID, TEXT  # noqa: PLC0415
    from subulp.lab.report.styles import STYLES  # noqa: PLC0415

    styles = dict(zip(("fp32", "renee", "bf16", "fp8"), STYLES, strict=False))
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for storage, style in styles.items():
        mine = [row for row in rows if row["storage"] == storage]
        if not mine:
            continue
        x = [row["labels"] for row in mine]
        y = [row.get("peak_bytes", row["expected_bytes"]) / 2**30 for row in mine]
        axes.plot(
            x,
            y,
            color=style.hex,
            linestyle=style.dashes,
            linewidth=1.4,
            label=_NAMES.get(storage, storage),
        )
        for row, size in zip(mine, y, strict=True):
            fits = "peak_bytes" in row
            axes.plot(
                row["labels"],
                size,
                marker=style.marker,
                color=style.hex,
                markerfacecolor=style.hex if fits else "white",
                markersize=6,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("labels")
    axes.set_ylabel("peak memory, GiB")
    axes.set_title("hollow: computed, does not fit the machine", fontsize=9, loc="left", color=TEXT)
    axes.legend(frameon=False)
    axes.grid(color=GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160, facecolor="white")


app = App(help=__doc__)


@app.default
def main(
    *,
    labels: str = LABELS,
    storages: str = "fp32,renee,bf16,fp8",
    chunks: str = "8",
    dim: int = 768,
    batch: int = 128,
    threads: int = 2,
    out: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Measure and print a table; ``--out`` keeps a record, ``--figure`` a plot."""
    record: dict[str, Any] = {
        "benchmark": "xmc_memory",
        "machine": describe(),
        "dim": dim,
        "batch": batch,
        "rows": [],
    }
    if out and out.exists():
        record = json.loads(out.read_text())
        if (record["dim"], record["batch"]) != (dim, batch):
            raise ValueError(f"out={out} holds other sizes: give another file")
    rows = record["rows"]
    for count in map(int, labels.split(",")):
        for storage in storages.split(","):
            if storage not in _WEIGHT:
                raise ValueError(f"storages={storage} is unknown: use {', '.join(_WEIGHT)}")
            for parts in map(int, chunks.split(",")):
                if any(_of(row) == (storage, count, parts) and _done(row) for row in rows):
                    continue
                rows[:] = [row for row in rows if _of(row) != (storage, count, parts)]
                rows.append(case(storage, count, dim, batch, parts, threads))
                if out:
                    rows.sort(key=lambda row: (row["labels"], list(_WEIGHT).index(row["storage"])))
                    out.write_text(json.dumps(record, indent=2) + "\n")
    print_table(rows)
    if figure:
        plot(rows, figure)


if __name__ == "__main__":
    app()

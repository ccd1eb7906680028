"""Whether a core waits for memory beside its arithmetic, or before it.

    python benchmarks/memory_beside_sums.py --out benchmarks/results/memory-beside-sums-NAME.json

A loop in C (memory_alone.c) asks for the rows that a batch's lookups read, in no order and where
they lie in a table, and touches each 32 rows later; beside each it adds up lines of a small buffer.
If waiting goes on beside arithmetic, both together take as long as the longer one; if not, as long
as both. Rows are asked for one by one, or some at a time. One thread; medians over batches, whose
ways take turns. ``alone``: nothing else runs between, and the TLB and the caches hold what they
can. ``after others``: random rows of another table of a gigabyte are written before each, as
between two steps of a model.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cyclopts import App
from embeddings import BATCHES, WARM_UP, Ours, row_numbers, seconds
from machine import describe
from memory_alone import MemoryAlone, loop
from rich.console import Console
from rich.table import Table

SUMS = (0, 8, 16, 32)
"""Lines added up beside a row; none: memory alone."""

CHUNKS = (1, 4, 16)
"""Rows asked for at a time."""

TABLES = {"int8": ("int8", 0.0), "fp32": ("fp32", 0.0)}
"""Storage and cached share."""


class Others:
    """What runs between two steps: writes to random rows of a table in small pages."""

    def __init__(self, dim: int, rows: int = 2_000_000, count: int = 20_000) -> None:
        self.table, self.values = torch.zeros(rows, dim), torch.ones(count, dim)
        self._generator = torch.Generator().manual_seed(1)

    def run(self) -> None:
        rows = torch.randint(len(self.table), (len(self.values),), generator=self._generator)
        self.table.index_add_(0, rows, self.values)


class Ways:
    """The loop over a batch's rows, in each of the ways that are compared."""

    def __init__(self) -> None:
        self.near, self.to = torch.zeros(64 * 16), torch.zeros(4)

    def measure(self, runs: np.ndarray, chunk: int, sums: int) -> float:
        """Nanoseconds a run."""
        library = loop()
        assert library is not None
        arguments = runs.ctypes.data, len(runs), chunk, sums
        taken = seconds(
            lambda: library.touch_beside_sums(*arguments, self.near.data_ptr(), self.to.data_ptr())
        )
        return taken * 1e9 / len(runs)


def measure(
    storage: str, fraction: float, others: Others | None, rows: int, dim: int, rounds: int
) -> list[dict[str, float]]:
    """Of one table: how long sums take, and both together, for each number of sums."""
    generator = torch.Generator().manual_seed(0)
    batches = [row_numbers(rows, 40_960, generator) for _ in range(BATCHES)]
    method, offsets = Ours(rows, dim, storage, fraction), torch.arange(0, 40_961, 20)
    for i in range(WARM_UP):
        method.step(batches[i % BATCHES], offsets, torch.ones(2048, dim))
    runs = [MemoryAlone(method.bag, values).reads for values in batches]
    # Lookups come in no order.
    runs = [own[torch.randperm(len(own), generator=generator).numpy()] for own in runs]
    # Runs of nothing: what is left are the sums.
    none = [np.zeros_like(own) for own in runs]
    cases = [(1, sums, True) for sums in SUMS]
    cases += [(chunk, sums, False) for sums in SUMS for chunk in CHUNKS]
    times: dict[tuple[int, int, bool], list[float]] = {case: [] for case in cases}
    ways = Ways()
    for turn in range(rounds):
        for i, (chunk, sums, alone) in enumerate(cases):
            if others is not None:
                others.run()
            # Each way meets each batch, which was touched as long ago as all others.
            batch = (none if alone else runs)[(i + turn) % BATCHES]
            times[chunk, sums, alone].append(ways.measure(batch, chunk, sums))
    found = {case: statistics.median(own) for case, own in times.items()}
    return [
        {
            "sums": sums,
            "sums_ns": found[1, sums, True],
            **{f"both_by_{chunk}_ns": found[chunk, sums, False] for chunk in CHUNKS},
        }
        for sums in SUMS
    ]


app = App(help=__doc__)


@app.default
def run(
    *, rows: int = 2_000_000, dim: int = 128, rounds: int = 32, out: Path | None = None
) -> None:
    """Time of memory, of sums, and of both together."""
    torch.set_num_threads(1)
    machine = describe(packages=())
    titles = "one by one", *(f"{chunk} at a time" for chunk in CHUNKS[1:])
    table = Table("", "lines added", "these alone", *(f"and rows, {text}" for text in titles))
    results: list[dict[str, Any]] = []
    for after, others in (("alone", None), ("after others", Others(dim))):
        for name, (storage, fraction) in TABLES.items():
            for found in measure(storage, fraction, others, rows, dim, rounds):
                results.append({"rows": name, "state": after, **found})
                sums, *cells = found.values()
                table.add_row(f"{name}, {after}", str(sums), *(f"{ns:.1f}" for ns in cells))
    console = Console()
    console.print(f"ns a row, {rows:,} rows x {dim}, one thread, {machine['processor']}")
    console.print(table)
    if out:
        record = {
            "benchmark": "memory beside sums",
            "machine": machine,
            "rows": rows,
            "dim": dim,
            "rounds": rounds,
            "results": results,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()

"""One training step of a classifier over many labels, against the matrix products that it must do.

All ways take turns in one process; medians over the rounds, ratios of times within a round. The
bound is three bare FP32 products of the step's shapes: logits, the inputs' gradient and the
weights' gradient, nothing else; on a CPU with units of BF16, also the same three of torch in BF16.
``e4m3`` and the others multiply as ``products="auto"`` does there. Peak memory is that of live
tensors over one step. Then the five best labels of each input, by the same rows and by
``nn.Linear``.

    python benchmarks/xmc_speed.py --out benchmarks/results/xmc-speed-NAME.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from machine import describe
from rich.console import Console
from rich.table import Table

from subulp import nn, optim
from subulp.diagnostics import track_memory

POSITIVES = 5
"""Labels of an instance."""

AIMS = {"e4m3 / bound": 1.15, "torch / e4m3": 1.7, "memory of e4m3 / torch": 0.2}
AIMS_WITH_UNITS = {
    "e4m3 / bound": 0.5,
    "e4m3 / bound in bf16": 1.7,
    "torch / e4m3": 3.0,
    "memory of e4m3 / torch": 0.11,
}
"""On a CPU with units of BF16."""

Step = Callable[[], None]


class Bound:
    """Three products of torch into memory that is there already."""

    def __init__(self, labels: int, dim: int, batch: int, dtype: torch.dtype) -> None:
        self.x = torch.randn(batch, dim).to(dtype)
        self.weight = torch.randn(labels, dim).to(dtype)
        self.logits = torch.empty(batch, labels, dtype=dtype)
        self.grad_x, self.grad_weight = torch.empty_like(self.x), torch.empty_like(self.weight)

    def step(self) -> None:
        torch.mm(self.x, self.weight.t(), out=self.logits)
        torch.mm(self.logits, self.weight, out=self.grad_x)
        torch.mm(self.logits.t(), self.x, out=self.grad_weight)


class Torch:
    """``nn.Linear``, binary cross-entropy and SGD, in FP32."""

    def __init__(self, labels: int, dim: int, batch: int) -> None:
        self.model = torch.nn.Linear(dim, labels, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.x, self.rows, self.cols = inputs(labels, dim, batch)
        self.loss = torch.nn.BCEWithLogitsLoss(reduction="sum")

    def step(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.x)
        targets = torch.zeros_like(logits)
        targets[self.rows, self.cols] = 1
        self.loss(logits, targets).backward()
        self.optimizer.step()


class Ours:
    """:class:`subulp.nn.ExtremeClassifier` with rows of one storage."""

    def __init__(
        self, labels: int, dim: int, batch: int, storage: str, products: str = "auto"
    ) -> None:
        self.model = nn.ExtremeClassifier(dim, labels, storage=storage, products=products, seed=0)
        self.optimizer = optim.RowSGD(self.model, lr=0.01)
        self.x, self.rows, self.cols = inputs(labels, dim, batch)

    def step(self) -> None:
        self.model(self.x, self.rows, self.cols).backward()


def best_labels(methods: dict[str, Any], rounds: int) -> dict[str, float]:
    """Median seconds in which each method finds the five best labels of its inputs."""
    ways: dict[str, Step] = {"torch": lambda: methods["torch"].model(methods["torch"].x).topk(5)}
    for name in ("e4m3", "e4m3, fp32 products"):
        head = methods[name]
        ways[name] = lambda head=head: head.model.topk(head.x, 5)
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for made in range(rounds + 1):
            for name, way in ways.items():
                spent = seconds(way)
                if made:
                    times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def inputs(labels: int, dim: int, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, dim, generator=generator).mul_(0.3).requires_grad_()
    rows = torch.arange(batch).repeat_interleave(POSITIVES)
    return x, rows, torch.randint(labels, (batch * POSITIVES,), generator=generator)


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak(method: Torch | Ours) -> int:
    with track_memory(method.model, method.optimizer) as memory:
        method.step()
    return memory.peak_bytes["total"]


app = App(help=__doc__)


@app.default
def main(
    *,
    labels: int = 131_072,
    dim: int = 768,
    batch: int = 128,
    rounds: int = 7,
    threads: int = 2,
    out: Path | None = None,
) -> None:
    """Measure and print a table; ``--out`` keeps a record."""
    torch.set_num_threads(threads)
    machine = describe()
    methods: dict[str, Any] = {
        "bound": Bound(labels, dim, batch, torch.float32),
        "torch": Torch(labels, dim, batch),
        **{s: Ours(labels, dim, batch, s) for s in ("e4m3", "bf16", "fp16", "fp32")},
        **{f"e4m3, {p} products": Ours(labels, dim, batch, "e4m3", p) for p in ("fp32", "bf16")},
    }
    chosen = methods["e4m3"].model.chosen_products
    if chosen == "bf16":
        methods["bound in bf16"] = Bound(labels, dim, batch, torch.bfloat16)
    aims = AIMS_WITH_UNITS if chosen == "bf16" else AIMS
    for method in methods.values():
        method.step()
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            times[name].append(seconds(method.step))
    topk = best_labels(methods, rounds)
    rows = []
    for name, method in methods.items():
        ratios = [a / b for a, b in zip(times[name], times["bound"], strict=True)]
        rows.append(
            {
                "name": name,
                "seconds": statistics.median(times[name]),
                "times_bound": statistics.median(ratios),
                "peak_bytes": None if isinstance(method, Bound) else peak(method),
            }
        )
    found = {row["name"]: row for row in rows}

    def ratio(first: str, second: str) -> float:
        pairs = zip(times[first], times[second], strict=True)
        return statistics.median(a / b for a, b in pairs)

    ratios = {
        **{name: ratio(*name.split(" / ")) for name in aims if not name.startswith("memory")},
        "memory of e4m3 / torch": found["e4m3"]["peak_bytes"] / found["torch"]["peak_bytes"],
    }
    table = Table("", "ms/step", "x bound", "peak, MiB")
    for row in rows:
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}"
        table.add_row(
            row["name"], f"{row['seconds'] * 1e3:.1f}", f"{row['times_bound']:.3f}", memory
        )
    console = Console()
    console.print(f"{labels:,} labels x {dim}, batch {batch}, {machine['processor']}")
    console.print(f"products of e4m3: {chosen}")
    console.print(table)
    for name, value in ratios.items():
        console.print(f"{name}: {value:.3f} (aim {aims[name]})", highlight=False)
    for name, spent in topk.items():
        console.print(f"five best labels, {name}: {spent * 1e3:.0f} ms", highlight=False)
    if out:
        record = {
            "benchmark": "xmc_speed",
            "machine": machine,
            "labels": labels,
            "dim": dim,
            "batch": batch,
            "rounds": rounds,
            "aims": aims,
            "chosen_products": chosen,
            "ratios": ratios,
            "topk_seconds": topk,
            "methods": rows,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()

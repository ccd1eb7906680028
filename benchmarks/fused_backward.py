"""The step inside the backward pass against the step after it: time and gradient memory.

The language model of `subulp train lm`, by default wider than there; both ways take turns in one
process, medians over the rounds, ratios of times within a round.

    python benchmarks/fused_backward.py --out benchmarks/results/fused-NAME.json
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

from subulp import optim
from subulp.diagnostics import track_memory
from subulp.train.config import LMConfig
from subulp.train.loop import build

VOCABULARY = 65


def case(config: LMConfig, precision: str, fused: bool, max_norm: float | None) -> dict[str, Any]:
    model, optimizer = build(config, VOCABULARY, precision, 0, torch.device("cpu"))
    for group in optimizer.param_groups:
        # The other policies look at all gradients first, which takes a second pass while fused.
        group["nonfinite"] = "propagate"
    handle = optim.fuse_backward(model, optimizer, max_norm=max_norm) if fused else None
    shape = (config.batch_size, config.context + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        if handle is not None:
            handle.backward(loss)
            return
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with track_memory(model, optimizer) as memory:
        step()
    return {
        "step": step,
        "parameters": sum(p.numel() for p in model.parameters()),
        "gradient_bytes": memory.category_peak_bytes["gradients"],
    }


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


app = App(help=__doc__)


@app.default
def main(
    *,
    width: int = 512,
    layers: int = 6,
    batch_size: int = 8,
    precision: str = "collage-plus",
    rounds: int = 15,
    out: Path | None = None,
) -> None:
    config = LMConfig(width=width, layers=layers, batch_size=batch_size, heads=8)
    machine = describe()
    cases = {
        "unfused": case(config, precision, fused=False, max_norm=None),
        "fused": case(config, precision, fused=True, max_norm=None),
        "unfused, clipped": case(config, precision, fused=False, max_norm=1.0),
        "fused, clipped": case(config, precision, fused=True, max_norm=1.0),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, each in cases.items():
            times[name].append(seconds(each["step"]))
    rows = []
    for name, each in cases.items():
        other = name.replace("fused", "unfused") if name.startswith("fused") else name
        ratios = [a / b for a, b in zip(times[name], times[other], strict=True)]
        rows.append(
            {
                "name": name,
                "seconds": statistics.median(times[name]),
                "times_unfused": statistics.median(ratios),
                "gradient_bytes": each["gradient_bytes"],
            }
        )
    parameters = cases["fused"]["parameters"]
    table = Table("", "ms/step", "x unfused", "gradients at peak, MiB")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['times_unfused']:.3f}",
            f"{row['gradient_bytes'] / 2**20:.2f}",
        )
    console = Console()
    console.print(f"{parameters:,} parameters, {precision}, {machine['processor']}")
    console.print(table)
    if out:
        record = {
            "benchmark": "fused_backward",
            "machine": machine,
            "parameters": parameters,
            "precision": precision,
            "width": width,
            "layers": layers,
            "batch_size": batch_size,
            "rounds": rounds,
            "methods": rows,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()

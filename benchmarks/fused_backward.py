"""The step inside the backward pass against the step after it: time and gradient memory.

Two GPTs in BF16, the default of `subulp train lm` and one of 19 million parameters, and the default
ResNet-18 of `subulp train image` in FP16. Every method and its
unfused counterpart take turns in one process, first one then the other first; what counts is the
median of their ratios within a round, so that a busy machine slows both.

    python benchmarks/fused_backward.py --out benchmarks/results/fused-NAME.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from machine import describe
from rich.console import Console
from rich.table import Table

from subulp import optim
from subulp.diagnostics import track_memory
from subulp.lab.tasks.image.resnet import ResNet18
from subulp.lab.tasks.lm.models import GPT, Shape

Loss = Callable[[], torch.Tensor]

AIM = 1.03
"""A fused step takes at most this many times an unfused one, where it needs one backward pass."""
AIM_OF_TWO_PASSES = 1.35

METHODS: dict[str, dict[str, float]] = {
    "plain": {},
    "clip_parameter_norm=1": {"clip_parameter_norm": 1.0},
    "max_norm=1, two passes": {"max_norm": 1.0},
    "max_norm=1, half kept": {"max_norm": 1.0, "kept": 0.5},
    "max_norm=1, three quarters kept": {"max_norm": 1.0, "kept": 0.75},
}
"""Options of ``fuse_backward``; ``kept`` is a share of all gradients, for ``keep_bytes``."""


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained: a GPT of a shape, or without one a ResNet-18."""

    name: str
    shape: Shape | None
    batch_size: int
    rounds: int
    precision: str


CASES = (
    Case(
        "GPT 0.24 M",
        Shape(vocabulary=65, context=64, width=96, layers=2, heads=4),
        4,
        200,
        "collage-plus",
    ),
    Case(
        "GPT 19 M",
        Shape(vocabulary=65, context=64, width=512, layers=6, heads=8),
        8,
        15,
        "collage-plus",
    ),
    Case("ResNet-18 2.8 M", None, 64, 40, "extra-bits-8"),
)


@dataclass
class Side:
    """A training step and what it is known to keep alive."""

    step: Callable[[], None]
    parameters: int
    gradient_bytes: int
    largest_bytes: int


def gpt(case: Case, shape: Shape) -> tuple[torch.nn.Module, Loss]:
    model = GPT(shape).to(torch.bfloat16)
    tokens = torch.randint(shape.vocabulary, (case.batch_size, shape.context + 1))
    return model, lambda: model.loss(tokens[:, :-1], tokens[:, 1:])


def resnet(case: Case) -> tuple[torch.nn.Module, Loss]:
    model = ResNet18(channels=1, classes=10, width=32).half()
    pictures = torch.randn(case.batch_size, 1, 8, 8).half()
    labels = torch.randint(10, (case.batch_size,))
    return model, lambda: torch.nn.functional.cross_entropy(model(pictures), labels)


def make_side(case: Case, options: dict[str, float], *, fused: bool) -> Side:
    torch.manual_seed(0)
    optimizer: optim.AdamW | optim.SGD
    if case.shape is not None:
        model, loss_of = gpt(case, case.shape)
        optimizer = optim.AdamW(model.parameters(), precision=case.precision)
    else:
        model, loss_of = resnet(case)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, precision=case.precision)
    given: dict[str, Any] = dict(options)
    if "kept" in given:
        given["keep_bytes"] = int(given.pop("kept") * sum(p.nbytes for p in model.parameters()))
    handle = optim.fuse_backward(model, optimizer, **given) if fused else None

    def step() -> None:
        loss = loss_of()
        if handle is not None:
            handle.backward(loss)
            return
        loss.backward()
        if "max_norm" in options:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
        if "clip_parameter_norm" in options:
            for p in model.parameters():
                torch.nn.utils.clip_grad_norm_([p], options["clip_parameter_norm"])
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with track_memory(model, optimizer) as memory:
        step()
    return Side(
        step,
        sum(p.numel() for p in model.parameters()),
        memory.category_peak_bytes["gradients"],
        max(p.nbytes for p in model.parameters()),
    )


def measure(case: Case, method: str) -> dict[str, Any]:
    sides = {
        name: make_side(case, METHODS[method], fused=name == "fused")
        for name in ("unfused", "fused")
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(case.rounds):
        for name in sorted(sides, reverse=i % 2 == 0):
            times[name].append(seconds(sides[name].step))
    ratios = sorted(f / u for f, u in zip(times["fused"], times["unfused"], strict=True))
    return {
        "case": case.name,
        "precision": case.precision,
        "parameters": sides["fused"].parameters,
        "method": method,
        "seconds_unfused": statistics.median(times["unfused"]),
        "seconds_fused": statistics.median(times["fused"]),
        "times_unfused": statistics.median(ratios),
        "times_unfused_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "gradient_bytes_unfused": sides["unfused"].gradient_bytes,
        "gradient_bytes_fused": sides["fused"].gradient_bytes,
        "largest_gradient_bytes": sides["fused"].largest_bytes,
    }


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


app = App(help=__doc__)


@app.default
def main(*, out: Path | None = None) -> None:
    machine = describe()
    rows = [measure(case, method) for case in CASES for method in METHODS]
    table = Table(
        "model", "", "ms/step", "x unfused", "quartiles", "gradients at peak, MiB", "unfused, MiB"
    )
    for row in rows:
        low, high = row["times_unfused_quartiles"]
        table.add_row(
            row["case"],
            row["method"],
            f"{row['seconds_fused'] * 1e3:.1f}",
            f"{row['times_unfused']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{row['gradient_bytes_fused'] / 2**20:.2f}",
            f"{row['gradient_bytes_unfused'] / 2**20:.2f}",
        )
    console = Console()
    console.print(f"{machine['processor']}, load {machine['load_before']:.2f}")
    console.print(table)
    for row in rows:
        aim = AIM_OF_TWO_PASSES if "max_norm" in METHODS[row["method"]] else AIM
        verdict = "met" if row["times_unfused"] <= aim else "missed"
        console.print(f"{row['case']}, {row['method']}: the aim of {aim} is {verdict}")
    if out:
        record = {
            "benchmark": "fused_backward",
            "machine": machine,
            "aim": AIM,
            "aim_of_two_passes": AIM_OF_TWO_PASSES,
            "cases": [asdict(case) for case in CASES],
            "methods": rows,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()

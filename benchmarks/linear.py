"""A linear layer's forward and backward pass with narrow weights or operands, against torch's.

    python benchmarks/linear.py --out benchmarks/results/linear-NAME.json

Activations of 1,024 x 1,024 and a weight of 4,096 x 1,024: ``nn.Linear`` of torch in FP32 and, on a
CPU with units of BF16, in BF16; ``subulp.nn.Linear`` with weights in BF16 and E4M3; ``MoRLinear``
with E4M3 by tensor and by block, and with decisions. Then a forward pass of one row in evaluation,
where mixtures keep what they encoded. All ways take turns in one process; medians over the rounds,
ratios of times within a round.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
from cyclopts import App
from machine import describe
from rich.console import Console
from rich.table import Table

from subulp import nn
from subulp.ops import bf16_product

AIM = 1.3
"""Mixtures over torch's BF16 layer, where there are units of BF16."""

BATCH, OUT, IN = 1024, 4096, 1024


def layers(wide: bool) -> dict[str, tuple[torch.nn.Module, torch.dtype]]:
    """The layers with the dtype of their activations; ``wide``: a square of 4,096."""
    size = (OUT, OUT) if wide else (IN, OUT)
    bf16, units = torch.bfloat16, bf16_product.units_at(torch.device("cpu"))

    def mor(*arguments: str) -> torch.nn.Module:
        return nn.MoRLinear(*size, mor=nn.MoR(*arguments)).to(bf16)

    return {
        "torch fp32": (torch.nn.Linear(*size), torch.float32),
        **({"torch bf16": (torch.nn.Linear(*size).to(bf16), bf16)} if units else {}),
        "subulp bf16": (nn.Linear(*size).to(bf16), bf16),
        "subulp e4m3": (nn.Linear(*size).to(torch.float8_e4m3fn), bf16),
        "mor tensor": (mor("tensor", "tensor"), bf16),
        "mor tensor, block": (mor("tensor", "block-128x128"), bf16),
        "mor 2way, block": (mor("subtensor-2way", "block-128x128"), bf16),
        "mor 3way, block": (mor("subtensor-3way", "block-128x128"), bf16),
    }


def train(layer: torch.nn.Module, dtype: torch.dtype) -> float:
    """Seconds of a forward and a backward pass."""
    x = torch.randn(BATCH, IN).to(dtype).requires_grad_()
    grad = torch.randn(BATCH, OUT).to(dtype)
    layer.zero_grad()
    start = time.perf_counter()
    layer(x).backward(grad)
    return time.perf_counter() - start


@torch.no_grad()
def evaluate(layer: torch.nn.Module, dtype: torch.dtype) -> float:
    """Seconds of a forward pass of one row."""
    x = torch.randn(1, OUT).to(dtype)
    start = time.perf_counter()
    layer.eval()(x)
    return time.perf_counter() - start


app = App(help=__doc__)


@app.default
def main(*, rounds: int = 9, threads: int = 2, out: Path | None = None) -> None:
    """Measure and print two tables; ``--out`` keeps a record."""
    torch.set_num_threads(threads)
    machine = describe()
    units = bf16_product.units_at(torch.device("cpu"))
    base = "torch bf16" if units else "torch fp32"
    console = Console()
    console.print(f"{machine['processor']}; units of BF16: {'yes' if units else 'no'}")
    found = {}
    for name, wide, seconds in (("training", False, train), ("one row", True, evaluate)):
        ways = layers(wide)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for made in range(rounds + 2):
            for way, (layer, dtype) in ways.items():
                spent = seconds(layer, dtype)
                if made >= 2:
                    times[way].append(spent)
        table = Table(name, "ms", f"x {base}")
        rows = []
        for way in ways:
            ratio = statistics.median(a / b for a, b in zip(times[way], times[base], strict=True))
            milliseconds = 1e3 * statistics.median(times[way])
            rows.append({"name": way, "milliseconds": milliseconds, f"times {base}": ratio})
            table.add_row(way, f"{milliseconds:.1f}", f"{ratio:.2f}")
        console.print(table)
        found[name] = rows
    if units:
        console.print(f"aim: training of mixtures at most {AIM} x {base}")
    if out:
        record = {
            "benchmark": "linear",
            "machine": machine,
            "units_of_bf16": units,
            "rounds": rounds,
            "aim": AIM if units else None,
            **found,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()

"""The pass that decides on a matrix and represents it, against memory and against eager PyTorch.

    python benchmarks/mixture.py --out benchmarks/results/mixture-NAME.json

On a CPU: every recipe and partition, FP32 matrices of 4,096 x 4,096, with one thread and with two.
The bound reads the matrix twice and writes a byte an element, at the bandwidth of a copy in the
same rounds. Eager PyTorch computes the same decisions, without the fixed order of sums. All ways
take turns in one process, which keeps the memory that they free; medians over rounds, ratios of
times within a round.

On a GPU: the three products of a linear layer's forward and backward pass need six operands; the
cost is that of deciding on both operands of one product over that product's own time in BF16.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from machine import describe
from rich.console import Console
from rich.table import Table
from torch import Tensor

from subulp.lab.engine.process_memory import keep_freed
from subulp.numerics.mixture import RECIPES, THREE_WAY, TWO_WAY
from subulp.numerics.partition import PARTITIONS, block_of
from subulp.ops.mixture import encode

AIMS = {"share of the bound": 0.6, "times eager": 5.0}

_E4M3_MAX, _E5M2_MAX, _E5M2_LOWEST = 448.0, 57344.0, 2.0**-14


def eager(x: Tensor, recipe: str, partition: str) -> tuple[Tensor, Tensor]:
    """The same decisions as plain PyTorch writes them: codes, and types of blocks.

    Blocks must divide the matrix.
    """
    rows, columns = block_of(partition, x.shape)
    blocks = x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    magnitude = blocks.abs()
    amax = magnitude.amax((1, 3), keepdim=True)
    some = magnitude > 0
    count = some.sum((1, 3), keepdim=True)

    def candidate(largest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # One mantissa for the matrix, an exponent for each block.
        mantissa = torch.frexp(largest / amax.max())[0].expand(amax.shape)
        own, exponent = torch.frexp(largest / amax)
        scale = torch.ldexp(mantissa, exponent - (mantissa > own).int())
        scaled = blocks * scale
        codes = scaled.to(dtype)
        error = (scaled - codes.float()).abs() / scaled.abs()
        return codes, torch.where(some, error, 0.0).sum((1, 3), keepdim=True)

    codes, error = candidate(_E4M3_MAX, torch.float8_e4m3fn)
    if recipe == "tensor":
        wide = (error.sum() / count.sum() >= 0.045).expand(amax.shape)
        return codes.view(torch.uint8).view(x.shape), wide
    narrow, other = candidate(_E5M2_MAX, torch.float8_e5m2)
    if recipe == TWO_WAY.name:
        return codes.view(torch.uint8).view(x.shape), error >= other
    assert recipe == THREE_WAY.name
    smallest = torch.where(some, magnitude, torch.inf).amin((1, 3), keepdim=True)
    second = error > other
    third = second & (amax / smallest > _E5M2_MAX / _E5M2_LOWEST)
    chosen = torch.where(second, narrow.view(torch.uint8), codes.view(torch.uint8))
    return chosen.view(x.shape), second.int() + third.int()


def interleaved(
    ways: dict[str, Callable[[], Any]], rounds: int, wait: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            wait()
            start = time.perf_counter()
            way()
            wait()
            # The first round warms up.
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def on_cpu(size: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Every recipe and partition with a number of threads."""
    torch.set_num_threads(threads)
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    # A copy reads and writes four bytes an element; the pass reads eight and writes one.
    bound = 9 / 8
    results = []
    for recipe, partition in itertools.product(RECIPES.values(), PARTITIONS):
        times = interleaved(
            {
                "copy": lambda: target.copy_(x),
                "ours": lambda r=recipe, p=partition: encode(x, r, p),
                "eager": lambda r=recipe, p=partition: eager(x, r.name, p),
            },
            rounds,
        )
        results.append(
            {
                "recipe": recipe.name,
                "partition": partition,
                "threads": threads,
                "ns_per_element": 1e9 * statistics.median(times["ours"]) / x.numel(),
                "share_of_bound": bound * ratio(times["copy"], times["ours"]),
                "times_eager": ratio(times["eager"], times["ours"]),
            }
        )
    return results


def on_gpu(shapes: Sequence[tuple[int, int, int]], rounds: int) -> list[dict[str, Any]]:
    """Every recipe and partition, against the BF16 product that it prepares."""
    results = []
    for rows, k, columns in shapes:
        a = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(columns, k, device="cuda", dtype=torch.bfloat16)
        for recipe, partition in itertools.product(RECIPES.values(), PARTITIONS):
            times = interleaved(
                {
                    "product": lambda a=a, b=b: a @ b.t(),
                    "ours": lambda a=a, b=b, r=recipe, p=partition: (
                        encode(a, r, p),
                        encode(b, r, p),
                    ),
                },
                rounds,
                torch.cuda.synchronize,
            )
            results.append(
                {
                    "recipe": recipe.name,
                    "partition": partition,
                    "shape": [rows, k, columns],
                    "cost_of_product": ratio(times["ours"], times["product"]),
                }
            )
    return results


app = App(help=__doc__)


@app.default
def main(*, size: int = 4096, rounds: int = 7, out: Path | None = None) -> None:
    """Measure what this machine has."""
    machine = describe(packages=("triton",))
    keep_freed()
    console = Console()
    results = [row for threads in (1, 2) for row in on_cpu(size, rounds, threads)]
    table = Table("recipe", "partition", "threads", "ns an element", "of the bound", "x eager")
    for row in results:
        table.add_row(
            row["recipe"],
            row["partition"],
            str(row["threads"]),
            f"{row['ns_per_element']:.3f}",
            f"{row['share_of_bound']:.0%}",
            f"{row['times_eager']:.1f}",
        )
    console.print(f"{size:,} x {size:,} FP32, {machine['processor']}")
    console.print(table)
    gpu: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        gpu = on_gpu([(4096, 4096, 4096), (8192, 4096, 4096)], 10 * rounds)
        table = Table("recipe", "partition", "shape", "time of the BF16 product")
        for row in gpu:
            shape = " x ".join(map(str, row["shape"]))
            table.add_row(row["recipe"], row["partition"], shape, f"{row['cost_of_product']:.2f}")
        console.print(table)
    if out:
        record = {
            "benchmark": "mixture",
            "machine": machine,
            "size": size,
            "rounds": rounds,
            "aims": AIMS,
            "cpu": results,
            "gpu": gpu,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()

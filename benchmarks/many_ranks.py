"""Steps of DTensors against those of plain tensors, and the step inside FSDP2's backward pass.

The first in this process, a mesh of one rank: what a step of DTensors takes beyond one of plain
tensors of the same local size. The second, against a step after the pass, with two ranks of gloo
that share this machine's cores: a GPT of 19 million BF16 parameters. Methods take turns; what
counts is the median of their ratios within a round.

    python benchmarks/many_ranks.py --out benchmarks/results/many-ranks-NAME.json
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cyclopts import App
from machine import describe
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from subulp import optim
from subulp.lab.tasks.lm.models import GPT, Shape

AIM = 1.03
"""A step of DTensors takes at most this many times one of plain tensors."""
TENSORS, SIDE, ROUNDS = 200, 406, 40
"""Square matrices of BF16: 33 million parameters."""
PRECISIONS = ("nearest", "collage-light", "collage-plus", "stochastic", "extra-bits-8", "master")

RANKS, PASSES = 2, 15
SHAPE = Shape(vocabulary=65, context=64, width=512, layers=6, heads=8)
METHODS: dict[str, dict[str, float]] = {
    "plain": {},
    "max_norm=1, two passes": {"max_norm": 1.0},
}


def overhead(precision: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    values = [torch.randn(SIDE, SIDE).to(torch.bfloat16) for _ in range(TENSORS)]

    def optimizer_of(tensors: list[torch.Tensor]) -> optim.AdamW:
        params = [nn.Parameter(x) for x in tensors]
        for p in params:
            p.grad = torch.ones_like(p) * 1e-3
        return optim.AdamW(params, precision=precision, lr=1e-4, seed=1)

    divided = [distribute_tensor(x.clone(), mesh, [Shard(0)]) for x in values]
    sides = {"plain": optimizer_of(values), "dtensor": optimizer_of(divided)}
    for optimizer in sides.values():
        optimizer.step()
        optimizer.step()
    found = by_turns({name: optimizer.step for name, optimizer in sides.items()}, ROUNDS)
    return {"precision": precision, **compared(found, "dtensor", "plain")}


def fused(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = []
    for method, options in METHODS.items():
        sides = {
            name: step_of(mesh, options, fuse=name == "fused") for name in ("unfused", "fused")
        }
        for step in sides.values():
            step()
        found = by_turns(sides, PASSES)
        rows.append({"method": method, **compared(found, "fused", "unfused")})
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def step_of(mesh: Any, options: dict[str, float], *, fuse: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = GPT(SHAPE).to(torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(model.named_parameters(), precision="collage-plus")
    handle = optim.fuse_backward(model, optimizer, **options) if fuse else None  # type: ignore[arg-type]
    tokens = torch.randint(SHAPE.vocabulary, (4, SHAPE.context + 1))

    def step() -> None:
        # FSDP2 gathers parameters around forward(), not around a method of another name.
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        if handle is not None:
            handle.backward(loss)
            return
        loss.backward()
        if "max_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_turns(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name in sorted(steps, reverse=i % 2 == 0):
            started = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - started)
    return times


def compared(times: dict[str, list[float]], one: str, other: str) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in zip(times[one], times[other], strict=True))
    return {
        f"seconds_{one}": statistics.median(times[one]),
        f"seconds_{other}": statistics.median(times[other]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }


def shown(rows: list[dict[str, Any]], name: str, one: str, other: str) -> Table:
    table = Table(name, f"{one}, ms", f"{other}, ms", "ratio", "quartiles")
    for row in rows:
        low, high = row["ratio_quartiles"]
        table.add_row(
            row[name],
            f"{row[f'seconds_{one}'] * 1e3:.1f}",
            f"{row[f'seconds_{other}'] * 1e3:.1f}",
            f"{row['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    return table


app = App(help=__doc__)


@app.default
def main(*, out: Path | None = None) -> None:
    machine = describe(())
    with tempfile.TemporaryDirectory() as folder:
        alone = dist.FileStore(str(Path(folder) / "alone"), 1)
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        steps = [overhead(precision) for precision in PRECISIONS]
        dist.destroy_process_group()
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        mp.spawn(fused, (str(Path(folder) / "ranks"), results), RANKS)
        passes = results.get()
    console = Console()
    console.print(f"{machine['processor']}, load {machine['load_before']:.2f}")
    console.print(shown(steps, "precision", "dtensor", "plain"))
    met = all(row["ratio"] <= AIM for row in steps)
    console.print(f"DTensors: the aim of {AIM} is {'met' if met else 'missed'}")
    console.print(shown(passes, "method", "fused", "unfused"))
    if out:
        record = {
            "benchmark": "many_ranks",
            "machine": machine,
            "aim": AIM,
            "parameters": TENSORS * SIDE * SIDE,
            "tensors": TENSORS,
            "steps": steps,
            "ranks": RANKS,
            "fused": passes,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()

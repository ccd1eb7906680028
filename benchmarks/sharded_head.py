"""A classifier sharded over ranks: memory of each, and bytes sent per step.

``memory``: peak of resident memory of one training step, in one process and in each of several
ranks, above what the process had before the classifier was built. ``bytes``: what a rank hands to
collectives in a step, counted as the best algorithm sends it, against the least that can do: its
embeddings and pairs to every other rank, and the other ranks' part of the FP32 gradient.

    python benchmarks/sharded_head.py memory --labels 8623847 --ranks 1,4
    python benchmarks/sharded_head.py bytes --ranks 2,4
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from machine import describe
from rich.console import Console
from rich.table import Table
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from subulp import nn, optim
from subulp.lab.engine.process_memory import kib

PAIR_BYTES = 8
"""An instance and a label, 32 bits each."""


def train(
    mesh: DeviceMesh | None, labels: int, dim: int, batch: int, positives: int, **options: Any
) -> float:
    """Build a classifier and take a step with this rank's part of a batch; seconds of the step."""
    head = nn.ExtremeClassifier(dim, labels, seed=0, mesh=mesh, **options)
    optim.RowSGD(head, lr=0.05)
    ranks = 1 if mesh is None else mesh.size()
    part = batch // ranks
    x = torch.randn(part, dim).mul_(0.3).requires_grad_()
    rows = torch.arange(part).repeat_interleave(positives)
    cols = torch.randint(labels, (part * positives,))
    start = time.perf_counter()
    head(x, rows, cols).backward()
    return time.perf_counter() - start


# -------------------------------------------------------------------------------------- processes


def start(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each rank of a process group finds; the mesh comes before the other arguments."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        multiprocessing.spawn(_rank, (ranks, directory, work, arguments), nprocs=ranks)
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, directory: str, work: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    mesh = None
    if ranks > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(minutes=9),
        )
        mesh = init_device_mesh("cpu", (ranks,))
    found = work(mesh, *arguments)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        distributed.destroy_process_group()


def peak(mesh: DeviceMesh | None, labels: int, dim: int, batch: int, storage: str) -> Any:
    """Bytes of this rank's peak, and seconds of its step."""
    train(mesh, 2000, 16, batch, 5, storage=storage)
    before = kib("/proc/self/status", "VmRSS")
    seconds = train(mesh, labels, dim, batch, 5, storage=storage)
    return (kib("/proc/self/status", "VmHWM") - before) * 1024, seconds


class Counted:
    """Bytes that a rank sends in each collective of ``torch.distributed``."""

    def __init__(self, ranks: int) -> None:
        self.sent: dict[str, float] = {}
        others = ranks - 1
        # Of the second argument, but for a reduction in place: what rings and their like send.
        shares = {
            "all_gather_single": others,
            "all_gather_into_tensor": others,
            "reduce_scatter_single": others / ranks,
            "reduce_scatter_tensor": others / ranks,
            "all_to_all_single": others / ranks,
            "all_reduce": 2 * others / ranks,
        }
        for name, share in shares.items():
            if hasattr(distributed, name):
                setattr(distributed, name, self._counted(name, share))

    def _counted(self, name: str, share: float) -> Callable[..., Any]:
        plain = getattr(distributed, name)
        argument = 0 if name == "all_reduce" else 1

        def call(*arguments: Any, **options: Any) -> Any:
            kind = name.removesuffix("_single").removesuffix("_into_tensor")
            kind = kind.removesuffix("_tensor")
            self.sent[kind] = self.sent.get(kind, 0) + share * arguments[argument].nbytes
            return plain(*arguments, **options)

        return call


def sent(mesh: DeviceMesh, labels: int, dim: int, batch: int, positives: int, dtype: str) -> Any:
    """Bytes of one step by collective."""
    head = nn.ExtremeClassifier(dim, labels, seed=0, mesh=mesh)
    optim.RowSGD(head, lr=0.05)
    part = batch // mesh.size()
    x = torch.randn(part, dim).to(getattr(torch, dtype)).requires_grad_()
    rows = torch.arange(part).repeat_interleave(positives)
    cols = torch.randperm(labels)[: part * positives]
    counted = Counted(mesh.size())
    head(x, rows, cols).backward()
    return counted.sent


# --------------------------------------------------------------------------------------- commands

app = App(help=__doc__)


def record(name: str, rows: list[dict[str, Any]], out: Path | None, **sizes: Any) -> None:
    if out:
        found = {"benchmark": name, "machine": describe(), **sizes, "rows": rows}
        out.write_text(json.dumps(found, indent=2) + "\n")


@app.command
def memory(
    *,
    labels: int = 670_091,
    dim: int = 768,
    batch: int = 32,
    storage: str = "e4m3",
    ranks: str = "1,4",
    out: Path | None = None,
) -> None:
    """Peak bytes per rank, against one process's divided by the number of ranks."""
    rows: list[dict[str, Any]] = []
    table = Table("ranks", "highest peak of a rank, MiB", "of one process's share", "s/step")
    for count in map(int, ranks.split(",")):
        found = start(count, peak, labels, dim, batch, storage)
        highest = max(nbytes for nbytes, _ in found)
        seconds = max(time for _, time in found)
        whole = rows[0]["peak_bytes"] if rows and rows[0]["ranks"] == 1 else None
        share = None if whole is None else highest * count / whole
        rows.append({"ranks": count, "peak_bytes": highest, "of_share": share, "seconds": seconds})
        table.add_row(
            str(count),
            f"{highest / 2**20:.0f}",
            "" if share is None else f"{share:.3f}",
            f"{seconds:.2f}",
        )
        record("sharded_head memory", rows, out, labels=labels, dim=dim, batch=batch)
    Console().print(table)


@app.command(name="bytes")
def bytes_sent(
    *,
    labels: int = 10_000,
    dim: int = 768,
    batch: int = 256,
    positives: int = 5,
    ranks: str = "2,4",
    dtypes: str = "float32,bfloat16",
    out: Path | None = None,
) -> None:
    """Bytes that a rank sends in a step, against the least that it must."""
    rows: list[dict[str, Any]] = []
    table = Table("ranks", "embeddings", "sent, KiB", "least, KiB", "ratio")
    for count in map(int, ranks.split(",")):
        for dtype in dtypes.split(","):
            found = start(count, sent, labels, dim, batch, positives, dtype)
            part, others = batch // count, count - 1
            least = others * (
                part * dim * getattr(torch, dtype).itemsize
                + part * positives * PAIR_BYTES
                + part * dim * 4
            )
            total = max(sum(by.values()) for by in found)
            rows.append(
                {
                    "ranks": count,
                    "dtype": dtype,
                    "sent": total,
                    "least": least,
                    "ratio": total / least,
                    "by_collective": found[0],
                }
            )
            table.add_row(
                str(count),
                dtype,
                f"{total / 1024:.1f}",
                f"{least / 1024:.1f}",
                f"{total / least:.4f}",
            )
            record("sharded_head bytes", rows, out, labels=labels, dim=dim, batch=batch)
    Console().print(table)


if __name__ == "__main__":
    app()

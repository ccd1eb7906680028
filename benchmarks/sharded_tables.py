"""Tables split over ranks: bytes sent a step against the least possible, and the time of a step.

    python benchmarks/sharded_tables.py --out benchmarks/results/sharded-tables-NAME.json

Eight tables with Zipf-like row numbers, a global batch that is divided among the ranks, forward
pass, backward pass and update on gloo ranks of one machine, a thread each. One process without a
mesh is the bound of time. Bytes are those that leave a rank for another, of all ranks together.

The least possible, if nothing is compressed and no row number is left out: four bytes for each
lookup whose row lies elsewhere, and four for the length of its bag there; and for each such bag,
one sum back and one gradient, in FP32. That sum of the bag's rows on one rank would be added to
those of others in an order that depends on the ranks; where a bag lies on several ranks, rows
travel one by one instead (see docs/cached-tables.md), which is what is above the least.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from embeddings import row_numbers
from machine import describe
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from subulp import nn, optim
from subulp.nn.table_part import shard_of

TABLES = 8
PLANS = {
    "tables": [nn.TableWise()] * TABLES,
    "rows": [nn.RowWise()] * TABLES,
    "columns": [nn.ColumnWise(2)] * TABLES,
}
WIRES = ("fp32", "bf16")

app = App(help=__doc__)


def configs(rows: int, dim: int) -> list[nn.EmbeddingTable]:
    return [nn.EmbeddingTable(rows, dim, "int8", 0.05) for _ in range(TABLES)]


def batches(
    count: int, rows: int, bags: int, lookups: int, rank: int, ranks: int
) -> list[tuple[Tensor, Tensor]]:
    """Row numbers and lengths of a rank's share of some batches."""
    found = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        drawn = row_numbers(rows, TABLES * bags * lookups, generator).view(TABLES, bags, lookups)
        share = drawn[:, bags * rank // ranks : bags * (rank + 1) // ranks]
        found.append((share.flatten(), torch.full((share[..., 0].numel(),), lookups)))
    return found


class Sent:
    """Counts what leaves this rank."""

    def __init__(self, rank: int) -> None:
        self.bytes, self._rank = 0, rank
        self._send = distributed.all_to_all_single
        distributed.all_to_all_single = self._count

    def _count(self, out: Tensor, sent: Tensor, to: Any, counts: list[int], **named: Any) -> Any:
        self.bytes += (sum(counts) - counts[self._rank]) * sent.itemsize
        return self._send(out, sent, to, counts, **named)


def least(bags: Any, values: Tensor, lengths: Tensor, dim: int) -> int:
    """Bytes that a rank's lookups cost at least: its own, and the sums and gradients for them."""
    ranks, rank = bags.ranks.size, bags.ranks.rank
    per_table = values.view(TABLES, -1)
    bag = torch.arange(lengths.numel()).repeat_interleave(lengths).view(TABLES, -1)
    total = 0
    for placed in bags.placed:
        rows = per_table[placed.table]
        if placed.rank is None:
            owner, _ = shard_of(rows, torch.full_like(rows, placed.period), ranks)
        else:
            owner = torch.full_like(rows, placed.rank)
        away = owner != rank
        pairs = (bag[placed.table][away] * ranks + owner[away]).unique().numel()
        total += int(away.sum()) * 4 + pairs * (4 + 2 * 4 * placed.dim)
    return total


def timed(bags: Any, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Seconds of each step."""
    seconds = []
    for values, lengths in data:
        start = time.perf_counter()
        bags(values, lengths).sum().backward()
        seconds.append(time.perf_counter() - start)
    return seconds


def work(rank: int, ranks: int, folder: str, sizes: dict[str, int]) -> None:
    """Measure every plan on this rank."""
    torch.set_num_threads(1)
    where = f"file://{folder}/store-{ranks}"
    distributed.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    mesh = init_device_mesh("cpu", (ranks,))
    rows, dim, steps = sizes["rows"], sizes["dim"], sizes["steps"]
    data = batches(2 * steps, rows, sizes["bags"], sizes["lookups"], rank, ranks)
    sent, found = Sent(rank), {}
    for name, plan in PLANS.items():
        for wire in WIRES:
            bags = nn.ShardedCachedEmbeddingBags(configs(rows, dim), mesh, plan, wire=wire, seed=0)
            optim.RowAdagrad(bags, lr=0.01)
            timed(bags, data[:steps])
            before = sent.bytes
            seconds = timed(bags, data[steps:])
            lower = sum(least(bags, *each, dim) for each in data[steps:])
            found[f"{name}, {wire}"] = {
                "seconds": statistics.median(seconds),
                "bytes": (sent.bytes - before) / steps,
                "least": lower / steps,
            }
    (Path(folder) / f"{ranks}-{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def one_process(sizes: dict[str, int]) -> float:
    torch.set_num_threads(1)
    bags = nn.CachedEmbeddingBags(configs(sizes["rows"], sizes["dim"]), seed=0)
    optim.RowAdagrad(bags, lr=0.01)
    data = batches(2 * sizes["steps"], sizes["rows"], sizes["bags"], sizes["lookups"], 0, 1)
    return statistics.median(timed(bags, data)[sizes["steps"] :])


@app.default
def main(
    rows: int = 500_000,
    dim: int = 64,
    bags: int = 1024,
    lookups: int = 4,
    steps: int = 20,
    ranks: tuple[int, ...] = (1, 2),
    out: Path | None = None,
) -> None:
    """Measure, print a table, write a record.

    Args:
        rows: Of each table.
        dim: Numbers of a row.
        bags: Of a feature, in the batch of all ranks.
        lookups: Of a bag.
        steps: Measured steps; as many go before.
        ranks: Numbers of ranks.
        out: Where the record is written.
    """
    sizes = {"rows": rows, "dim": dim, "bags": bags, "lookups": lookups, "steps": steps}
    alone = one_process(sizes)
    results: dict[str, Any] = {"one process": {"seconds": alone}}
    with tempfile.TemporaryDirectory() as folder:
        for count in ranks:
            torch.multiprocessing.spawn(work, (count, folder, sizes), count)
            each = [
                json.loads((Path(folder) / f"{count}-{r}.json").read_text()) for r in range(count)
            ]
            for name in each[0]:
                of_ranks = [one[name] for one in each]
                results[f"{count} ranks, {name}"] = {
                    "seconds": max(one["seconds"] for one in of_ranks),
                    "bytes": sum(one["bytes"] for one in of_ranks),
                    "least": sum(one["least"] for one in of_ranks),
                }
    table = Table("", "ms", "of one process", "MB sent", "of the least")
    for name, found in results.items():
        sent, lower = found.get("bytes", 0), found.get("least", 0)
        table.add_row(
            name,
            f"{found['seconds'] * 1e3:.2f}",
            f"{found['seconds'] / alone:.2f}",
            f"{sent / 1e6:.3f}",
            f"{sent / lower:.3f}" if lower else "",
        )
    Console().print(table)
    if out is not None:
        record = {"command": sizes, "machine": describe(), "results": results}
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app()

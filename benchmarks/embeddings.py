"""Embedding tables in training: lookups a second, memory, and the cost of a lookup by table size.

    python benchmarks/embeddings.py speed --out benchmarks/results/embeddings-NAME.json
    python benchmarks/embeddings.py tables --out benchmarks/results/embedding-tables-NAME.json
    python benchmarks/embeddings.py rows --out benchmarks/results/embedding-rows-NAME.json

``speed``: two million rows of 128 numbers, batches of 2,048 bags of 20 lookups, Zipf-like row
numbers, 48 % of them different; forward pass, backward pass and update. All ways take turns in
one process; medians over rounds, ratios of times within a round. Peers: torch's ``EmbeddingBag``
with sparse gradients and Adagrad, and FBGEMM's tables on the CPU (``pip install --no-deps
fbgemm-gpu-cpu``). A table's bound counts bytes and random bits. Each different row is read by the
lookups, and read and written by the update, where it lies, at the bandwidth of a copy in the same
rounds; so are its count and the optimizer's state, and row numbers, sums and gradients move once a
pass. Rows that do not lie in the cache are rounded stochastically, at the rate of a block in the
processor's cache. Beside it a loop that only touches the memory of a table's step takes its turn
(``memory_alone.py``): rows lie anywhere, and waiting for them takes longer than a copy.

``tables``: twenty-six tables with a lookup in each bag, as recommendation models have, small ones
with a small batch and larger ones with a large batch. Peers as above, PyTorch's without a row-wise
optimizer and a module a table.

``rows``: INT4 rows of 64 numbers with a cache of 5 %, from a hundred thousand rows to a hundred
million, each size in a process of its own, all sizes in turn and that three times: medians, and
ratios within a turn. By Zipf's law, larger tables have more different rows in a batch, each of
which is to be fetched and updated; so the sizes are compared once more by power laws under which
48 % of a batch's row numbers differ in every table. What touching their memory alone costs is
measured of batches that come after the steps.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from machine import describe
from memory_alone import SHARED_SECONDS, MemoryAlone, between_cores, loop
from rich.console import Console
from rich.table import Table
from torch import Tensor

from subulp import nn, optim
from subulp.lab.engine.process_memory import alone, keep_freed, kib
from subulp.numerics.int_rows import row_bytes
from subulp.ops.head import RandomAddress
from subulp.ops.rows import encode_rows

BATCHES = 16
WARM_UP = 48
"""Batches before the first measured one: the caches are full then."""

DIFFERENT = 0.48
"""Share of different row numbers in a batch, as in ``speed``."""

AIMS = {
    "int8+5%, nearest / fbgemm fp32": 2.5,
    "int4+5%, nearest / fbgemm fp32": 2.5,
    "int8+5% / fbgemm fp32": 2.0,
    "int4+5% / fbgemm fp32": 2.0,
    "int8+5% / torch": 6.0,
    "int4+5% / torch": 6.0,
    "fp32 / fbgemm fp32": 1.0,
    "memory of int8+5% / fbgemm fp32": 1 / 3,
    "memory of int4+5% / fbgemm fp32": 1 / 5,
}


def row_numbers(rows: int, count: int, generator: torch.Generator, exponent: float = 1.0) -> Tensor:
    """int64 ``(count,)``: the row of rank r is as likely as ``r ** -exponent`` (1: Zipf's law)."""
    u = torch.rand(count, dtype=torch.float64, generator=generator)
    if exponent == 1:
        ranks = float(rows) ** u
    else:
        rest = 1 - exponent
        ranks = (1 + u * (float(rows) ** rest - 1)) ** (1 / rest)
    ranks = ranks.long().clamp(1, rows) - 1
    # An odd factor that shares no divisor with the number of rows moves each rank to its own row.
    return ranks * 7_368_787 % rows


def exponent_of(rows: int, count: int, different: float) -> float:
    """The exponent under which that share of ``count`` row numbers is different, by bisection."""
    low, high = 0.0, 4.0
    for _ in range(30):
        # Never exactly 1, where the formula is another.
        exponent = (low + high) / 2 + 1e-9
        values = row_numbers(rows, count, torch.Generator().manual_seed(0), exponent)
        if len(values.unique()) > different * count:
            low = exponent
        else:
            high = exponent
    return exponent


class Ours:
    """:class:`subulp.nn.CachedEmbeddingBag`."""

    def __init__(
        self,
        rows: int,
        dim: int,
        storage: str,
        fraction: float,
        optimizer: str = "row-wise",
        rounding: str = "stochastic",
    ) -> None:
        self.optimizer = optimizer
        self.stochastic = rounding == "stochastic" and storage != "fp32"
        self.bag = nn.CachedEmbeddingBag(
            rows,
            dim,
            storage,
            cache_fraction=fraction,
            include_last_offset=True,
            rounding=rounding,
            seed=0,
        )
        if optimizer == "sgd":
            optim.RowSGD(self.bag, lr=0.01)
        else:
            optim.RowAdagrad(self.bag, lr=0.01)

    def step(self, values: Tensor, offsets: Tensor, grad: Tensor) -> None:
        self.bag(values, offsets).backward(grad)

    def nbytes(self) -> int:
        memory = self.bag.memory()
        return memory.total + memory.optimizer


class OurTables:
    """:class:`subulp.nn.CachedEmbeddingBags`."""

    def __init__(self, count: int, rows: int, dim: int, storage: str, fraction: float) -> None:
        config = nn.EmbeddingTable(rows, dim, storage, fraction)
        self.bags = nn.CachedEmbeddingBags([config] * count, seed=0)
        optim.RowAdagrad(self.bags, lr=0.01)

    def step(self, values: Tensor, offsets: Tensor, grad: Tensor) -> None:
        self.bags(values, offsets=offsets).backward(grad)


class TorchTables:
    """A ``torch.nn.EmbeddingBag`` for each table, sparse gradients and one Adagrad."""

    def __init__(self, count: int, rows: int, dim: int) -> None:
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, include_last_offset=True)
            for _ in range(count)
        )
        self.optimizer = torch.optim.Adagrad(self.bags.parameters(), lr=0.01)

    def step(self, values: Tensor, offsets: Tensor, grad: Tensor) -> None:
        self.optimizer.zero_grad()
        parts = values.chunk(len(self.bags))
        bounds = offsets[: len(parts[0]) + 1]
        sums = [bag(part, bounds) for bag, part in zip(self.bags, parts, strict=True)]
        torch.cat(sums, 1).backward(grad)
        self.optimizer.step()


class Fbgemm:
    """FBGEMM's table-batched embedding on the CPU."""

    def __init__(
        self, rows: int, dim: int, storage: str, optimizer: str = "row-wise", tables: int = 1
    ) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType  # noqa: PLC0415
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # noqa: PLC0415
            EmbeddingLocation,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: PLC0415
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {"row-wise": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD}
        self.bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * tables,
            optimizer=kinds[optimizer],
            learning_rate=0.01,
            weights_precision=SparseType(storage),
            # Its stochastic rounding is for GPUs; on a CPU rows are rounded to nearest.
            stochastic_rounding=False,
        )
        for weights in self.bags.split_embedding_weights():
            weights.data.uniform_(-0.001, 0.001)
        state = rows * 4 if optimizer == "row-wise" else 0
        self._nbytes = tables * (rows * dim * {"fp32": 4, "fp16": 2}[storage] + state)

    def step(self, values: Tensor, offsets: Tensor, grad: Tensor) -> None:
        self.bags(values, offsets).backward(grad)

    def nbytes(self) -> int:
        return self._nbytes


class Torch:
    """``torch.nn.EmbeddingBag`` with sparse gradients, and Adagrad: a state for every number."""

    def __init__(self, rows: int, dim: int) -> None:
        self.bag = torch.nn.EmbeddingBag(
            rows, dim, mode="sum", sparse=True, include_last_offset=True
        )
        self.optimizer = torch.optim.Adagrad(self.bag.parameters(), lr=0.01)

    def step(self, values: Tensor, offsets: Tensor, grad: Tensor) -> None:
        self.optimizer.zero_grad()
        self.bag(values, offsets).backward(grad)
        self.optimizer.step()

    def nbytes(self) -> int:
        return 2 * self.bag.weight.nbytes


class Copy:
    """A copy of more than a processor's cache holds."""

    NBYTES = 2 * (1 << 28)
    """Read and written."""

    def __init__(self) -> None:
        self.source = torch.randn(self.NBYTES // 2 // 4)
        self.target = torch.empty_like(self.source)

    def step(self, values: Tensor, offsets: Tensor, grad: Tensor) -> None:
        self.target.copy_(self.source)


class Rounding:
    """Rows in a processor's cache to integers, with random bits or without."""

    NUMBERS = 1 << 18

    def __init__(self, dim: int, *, stochastic: bool) -> None:
        self.wide = torch.randn(self.NUMBERS // dim, dim)
        self.rows = torch.empty(len(self.wide), row_bytes(dim, 8), dtype=torch.uint8)
        self.random = RandomAddress(seed=0, stream=0, step=1, offset=0) if stochastic else None

    def step(self, values: Tensor, offsets: Tensor, grad: Tensor) -> None:
        encode_rows(self.wide, self.rows, 8, self.random)


@dataclass(frozen=True)
class Work:
    """What a step of one of our tables must do."""

    nbytes: float
    random_numbers: float

    @classmethod
    def of(cls, method: Ours, batches: list[Tensor], bags: int) -> Work:
        """The mean over batches; which rows lie in the cache is as the last step left it."""
        (table,) = method.bag.tables
        codes = table.table.codes
        dim, stored = method.bag.embedding_dim, codes.nbytes / len(codes)
        state = 4 if method.optimizer == "row-wise" else 0
        nbytes = numbers = 0.0
        for values in batches:
            different = values.unique()
            cached = int(torch.isin(different, table.tags).sum())
            others = len(different) - cached
            # Read; read and written, with the optimizer's state and, in a cache, a count and a tag.
            nbytes += 3 * (cached * dim * 4 + others * stored) + 2 * state * len(different)
            nbytes += (2 * 4 + 2 * 4) * len(different) if table.sets else 0
            # Row numbers of both passes, sums written, gradients read.
            nbytes += 2 * values.nbytes + 2 * bags * dim * 4
            numbers += others * dim if method.stochastic else 0
        return cls(nbytes / len(batches), numbers / len(batches))


app = App(help=__doc__)


def rounds_by_cache(waits: list[list[float | None]]) -> dict[str, list[int]]:
    """The rounds in which the cores shared a third-level cache all the time, or never."""
    found: dict[str, list[int]] = {"one cache": [], "a cache each": []}
    for i, around in enumerate(waits):
        apart = {None if wait is None else wait >= SHARED_SECONDS for wait in around}
        if apart == {False}:
            found["one cache"].append(i)
        elif apart == {True}:
            found["a cache each"].append(i)
    return {cache: among for cache, among in found.items() if among}


@app.command
def speed(
    *,
    rows: int = 2_000_000,
    dim: int = 128,
    batch: int = 2048,
    lookups: int = 20,
    rounds: int = 15,
    threads: int = 2,
    out: Path | None = None,
) -> None:
    """Lookups a second of our tables and others'."""
    torch.set_num_threads(threads)
    machine = describe(packages=("fbgemm-gpu-cpu",))
    generator = torch.Generator().manual_seed(0)
    batches = [row_numbers(rows, batch * lookups, generator) for _ in range(BATCHES)]
    unique = statistics.fmean(len(b.unique()) / len(b) for b in batches)
    offsets = torch.arange(0, batch * lookups + 1, lookups)
    grad = torch.randn(batch, dim, generator=generator)
    methods: dict[str, Any] = {
        "torch": Torch(rows, dim),
        "fbgemm fp32": Fbgemm(rows, dim, "fp32"),
        "fbgemm fp16": Fbgemm(rows, dim, "fp16"),
        "fbgemm fp32, sgd": Fbgemm(rows, dim, "fp32", "sgd"),
        "fp32": Ours(rows, dim, "fp32", 0.0),
        "fp32, sgd": Ours(rows, dim, "fp32", 0.0, "sgd"),
        "fp16": Ours(rows, dim, "fp16", 0.0),
        **{
            storage + ("+5%" if fraction else ""): Ours(rows, dim, storage, fraction)
            for storage in ("int8", "int4", "int2")
            for fraction in (0.0, 0.05)
        },
        **{
            f"{storage}+5%, nearest": Ours(rows, dim, storage, 0.05, rounding="nearest")
            for storage in ("int8", "int4")
        },
        **(
            scales := {
                "copy": Copy(),
                "stochastic": Rounding(dim, stochastic=True),
                "nearest": Rounding(dim, stochastic=False),
            }
        ),
    }
    for i in range(WARM_UP):
        for method in methods.values():
            method.step(batches[i % BATCHES], offsets, grad)
    alone_of = {
        name: [MemoryAlone(method.bag, values) for values in batches] if loop() else []
        for name, method in methods.items()
        if isinstance(method, Ours)
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    touched: dict[str, list[float]] = {name: [] for name in alone_of}
    waits: list[list[float | None]] = []
    for i in range(rounds):
        before = between_cores()
        for name, method in methods.items():
            times[name].append(seconds(method.step, batches[i % BATCHES], offsets, grad))
        for name, memory in alone_of.items():
            # Of a batch as long ago as that of a step.
            touched[name] += [seconds(m.touch) for m in memory[(i + 1) % BATCHES :][:1]]
        waits.append([before, between_cores()])

    def faster(name: str, other: str, among: Sequence[int] = range(rounds)) -> float:
        return statistics.median(times[other][i] / times[name][i] for i in among)

    # What a byte and a random number cost at the least.
    of_byte = statistics.median(times["copy"]) / Copy.NBYTES
    random_bits = statistics.median(
        a - b for a, b in zip(times["stochastic"], times["nearest"], strict=True)
    )
    of_number = random_bits / Rounding.NUMBERS
    results = []
    for name, method in methods.items():
        if name in scales:
            continue
        ours = isinstance(method, Ours)
        work = Work.of(method, batches, batch) if ours else None
        least = None if work is None else work.nbytes * of_byte + work.random_numbers * of_number
        alone_seconds = statistics.median(touched[name]) if touched.get(name) else None
        results.append(
            {
                "name": name,
                "lookups_per_second": batch * lookups / statistics.median(times[name]),
                "times_fbgemm_fp32": faster(name, "fbgemm fp32"),
                "times_torch": faster(name, "torch"),
                "share_of_bound": least and least / statistics.median(times[name]),
                "memory_alone_seconds": alone_seconds,
                "share_of_memory_alone": alone_seconds
                and alone_seconds / statistics.median(times[name]),
                "bytes_moved": work and work.nbytes,
                "random_numbers": work and work.random_numbers,
                "bytes": method.nbytes(),
                "hit_rate": method.bag.hit_rate if ours else None,
            }
        )
    found = {row["name"]: row for row in results}
    memory = found["fbgemm fp32"]["bytes"]
    ratios = {
        **{
            f"{storage}+5%, nearest / fbgemm fp32": found[f"{storage}+5%, nearest"][
                "times_fbgemm_fp32"
            ]
            for storage in ("int8", "int4")
        },
        "int8+5% / fbgemm fp32": found["int8+5%"]["times_fbgemm_fp32"],
        "int4+5% / fbgemm fp32": found["int4+5%"]["times_fbgemm_fp32"],
        "int8+5% / torch": found["int8+5%"]["times_torch"],
        "int4+5% / torch": found["int4+5%"]["times_torch"],
        "fp32 / fbgemm fp32": found["fp32"]["times_fbgemm_fp32"],
        "memory of int8+5% / fbgemm fp32": found["int8+5%"]["bytes"] / memory,
        "memory of int4+5% / fbgemm fp32": found["int4+5%"]["bytes"] / memory,
    }
    by_cache = {}
    for cache, among in rounds_by_cache(waits).items():
        pairs = {pair: pair.split(" / ") for pair in ratios if "memory" not in pair}
        by_cache[cache] = {
            "rounds": len(among),
            **{pair: faster(name, other, among) for pair, (name, other) in pairs.items()},
        }
    table = Table(
        *("", "M lookups/s", "x fbgemm fp32", "x torch", "of bound", "memory alone"),
        *("GiB", "hit rate"),
    )
    for row in results:
        table.add_row(
            row["name"],
            f"{row['lookups_per_second'] / 1e6:.2f}",
            f"{row['times_fbgemm_fp32']:.2f}",
            f"{row['times_torch']:.2f}",
            f"{row['share_of_bound']:.0%}" if row["share_of_bound"] else "",
            f"{row['share_of_memory_alone']:.0%}" if row["share_of_memory_alone"] else "",
            f"{row['bytes'] / 2**30:.2f}",
            f"{row['hit_rate']:.1%}" if row["hit_rate"] else "",
        )
    console = Console()
    console.print(
        f"{rows:,} rows x {dim}, {batch} x {lookups} lookups, {unique:.0%} different, "
        f"{machine['processor']}"
    )
    console.print(table)
    for name, value in ratios.items():
        own = [f"{known[name]:.2f} {cache}" for cache, known in by_cache.items() if name in known]
        of_caches = f"; {', '.join(own)}" if own else ""
        console.print(f"{name}: {value:.2f} (aim {AIMS[name]:.2f}){of_caches}", highlight=False)
    for cache, known in by_cache.items():
        console.print(f"{known['rounds']} of {rounds} rounds: the cores had {cache}")
    if out:
        record = {
            "benchmark": "embeddings speed",
            "machine": machine,
            "rows": rows,
            "dim": dim,
            "batch": batch,
            "lookups": lookups,
            "unique": unique,
            "rounds": rounds,
            "copy_bytes_per_second": 1 / of_byte,
            "random_numbers_per_second": 1 / of_number,
            "aims": AIMS,
            "ratios": ratios,
            "seconds_between_cores": waits,
            "ratios_by_cache": by_cache,
            "methods": results,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


def seconds(step: Callable[..., None], *arguments: Tensor) -> float:
    start = time.perf_counter()
    step(*arguments)
    return time.perf_counter() - start


SHAPES = ((10_000, 16, 128), (100_000, 64, 2048))
"""Rows of a table, numbers of a row, and bags of a batch."""


@app.command(name="tables")
def many_tables(
    *, count: int = 26, rounds: int = 200, threads: int = 2, out: Path | None = None
) -> None:
    """Time of a step of many tables, ours and others'."""
    keep_freed()
    torch.set_num_threads(threads)
    machine = describe(packages=("fbgemm-gpu-cpu",))
    shapes = [_of_shape(count, *shape, rounds) for shape in SHAPES]
    names = list(shapes[0]["seconds"])
    titles = [f"{s['rows']:,} x {s['dim']}, batch {s['batch']:,}: ms" for s in shapes]
    table = Table("", *(cell for title in titles for cell in (title, "x fbgemm fp32")))
    for name in names:
        cells = [(s["seconds"][name] * 1e3, s["times_fbgemm_fp32"][name]) for s in shapes]
        table.add_row(name, *(text for ms, x in cells for text in (f"{ms:.3f}", f"{x:.2f}")))
    console = Console()
    console.print(f"{count} tables, a lookup a bag, {machine['processor']}")
    console.print(table)
    if out:
        record = {
            "benchmark": "embeddings tables",
            "machine": machine,
            "tables": count,
            "rounds": rounds,
            "shapes": shapes,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


def _of_shape(count: int, rows: int, dim: int, batch: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.cat([row_numbers(rows, batch, generator) for _ in range(count)])
        for _ in range(BATCHES)
    ]
    offsets = torch.arange(count * batch + 1)
    grad = torch.randn(batch, count * dim, generator=generator)
    methods: dict[str, Any] = {
        "torch": TorchTables(count, rows, dim),
        "fbgemm fp32": Fbgemm(rows, dim, "fp32", tables=count),
        "fp32": OurTables(count, rows, dim, "fp32", 0.0),
        **{
            storage + ("+5%" if fraction else ""): OurTables(count, rows, dim, storage, fraction)
            for storage in ("int8", "int4")
            for fraction in (0.0, 0.05)
        },
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for i in range(WARM_UP + rounds):
        for name, method in methods.items():
            taken = seconds(method.step, batches[i % BATCHES], offsets, grad)
            if i >= WARM_UP:
                times[name].append(taken)
    peer = times["fbgemm fp32"]
    return {
        "rows": rows,
        "dim": dim,
        "batch": batch,
        "seconds": {name: statistics.median(own) for name, own in times.items()},
        "times_fbgemm_fp32": {
            name: statistics.median(a / b for a, b in zip(peer, own, strict=True))
            for name, own in times.items()
        },
    }


@app.command(name="rows")
def by_rows(
    *,
    sizes: str = "100000,1000000,10000000,100000000",
    dim: int = 64,
    storage: str = "int4",
    batch: int = 2048,
    lookups: int = 20,
    rounds: int = 15,
    passes: int = 3,
    threads: int = 2,
    out: Path | None = None,
) -> None:
    """Time of a lookup against the number of rows; all sizes in turn, several times."""
    machine = describe(packages=("fbgemm-gpu-cpu",))
    counts = [int(rows) for rows in sizes.split(",")]
    laws: dict[str, list[dict[str, Any]]] = {}
    for law in ("zipf", "equal-share"):
        exponents = [
            1.0 if law == "zipf" else exponent_of(rows, batch * lookups, DIFFERENT)
            for rows in counts
        ]
        measured = [
            [
                alone(_of_size, rows, dim, storage, batch, lookups, rounds, threads, exponent)
                for rows, exponent in zip(counts, exponents, strict=True)
            ]
            for _ in range(passes)
        ]
        laws[law] = [
            {"rows": rows, "exponent": exponent, **_over_passes(measured, i)}
            for i, (rows, exponent) in enumerate(zip(counts, exponents, strict=True))
        ]
        _print_sizes(law, laws[law])
    if out:
        record = {
            "benchmark": "embeddings rows",
            "machine": machine,
            "dim": dim,
            "storage": storage,
            "batch": batch,
            "lookups": lookups,
            "rounds": rounds,
            "passes": passes,
            "laws": laws,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


def _over_passes(measured: list[list[dict[str, float]]], i: int) -> dict[str, Any]:
    """Medians of the i-th size, and how its cost of a different row compares within a pass."""
    own = [sizes[i] for sizes in measured]
    ratios = [
        (sizes[i]["ns_per_lookup"] / sizes[i]["unique"])
        / (sizes[0]["ns_per_lookup"] / sizes[0]["unique"])
        for sizes in measured
    ]
    alone_ratios = [sizes[i]["memory_alone_ns"] / sizes[0]["memory_alone_ns"] for sizes in measured]
    return {
        **{name: statistics.median(of[name] for of in own) for name in own[0]},
        "different_row_of_smallest": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "memory_alone_of_smallest": statistics.median(alone_ratios),
    }


def _print_sizes(law: str, results: list[dict[str, Any]]) -> None:
    table = Table(
        *("rows", "ns a lookup", "of the smallest", "different", "ns a different row"),
        *("of the smallest", "range", "memory alone, ns", "of the smallest"),
        *("hit rate", "peak, GiB"),
        title=law,
    )
    for row in results:
        table.add_row(
            f"{row['rows']:,}",
            f"{row['ns_per_lookup']:.0f}",
            f"{row['ns_per_lookup'] / results[0]['ns_per_lookup']:.2f}",
            f"{row['unique']:.0%}",
            f"{row['ns_per_lookup'] / row['unique']:.0f}",
            f"{row['different_row_of_smallest']:.2f}",
            "{:.2f} to {:.2f}".format(*row["range"]),
            f"{row['memory_alone_ns']:.0f}",
            f"{row['memory_alone_of_smallest']:.2f}",
            f"{row['hit_rate']:.1%}",
            f"{row['peak_bytes'] / 2**30:.2f}",
        )
    Console().print(table)


def _of_size(
    rows: int,
    dim: int,
    storage: str,
    batch: int,
    lookups: int,
    rounds: int,
    threads: int,
    exponent: float,
) -> dict[str, float]:
    torch.set_num_threads(threads)
    before = kib("/proc/self/status", "VmRSS")
    method = Ours(rows, dim, storage, 0.05)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(0, batch * lookups + 1, lookups)
    grad = torch.randn(batch, dim, generator=generator)
    times, unique = [], []
    for i in range(WARM_UP + rounds):
        values = row_numbers(rows, batch * lookups, generator, exponent)
        if i == WARM_UP:
            method.bag.reset_statistics()
        elapsed = seconds(method.step, values, offsets, grad)
        if i >= WARM_UP:
            times.append(elapsed)
            unique.append(len(values.unique()) / len(values))
    touched = []
    for _ in range(rounds if loop() else 0):
        # A step between two: what one has touched is no longer near.
        method.step(row_numbers(rows, batch * lookups, generator, exponent), offsets, grad)
        values = row_numbers(rows, batch * lookups, generator, exponent)
        memory = MemoryAlone(method.bag, values)
        method.step(row_numbers(rows, batch * lookups, generator, exponent), offsets, grad)
        touched.append(seconds(memory.touch) / len(values.unique()))
    return {
        "ns_per_lookup": 1e9 * statistics.median(times) / (batch * lookups),
        "unique": statistics.fmean(unique),
        "memory_alone_ns": 1e9 * statistics.median(touched) if touched else math.nan,
        "hit_rate": method.bag.hit_rate,
        "peak_bytes": (kib("/proc/self/status", "VmHWM") - before) * 1024,
        "table_bytes": method.nbytes(),
    }


if __name__ == "__main__":
    app()

"""Calls of the embedding ops on a few small tables, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from subulp.nn.cached_table import CachedTable, EmbeddingTable
from subulp.numerics.int_rows import ROW_FORMATS
from subulp.ops.embedding import embedding_pool, embedding_update, embedding_weight_grad

STORAGES = tuple(ROW_FORMATS)
RULES = ("sgd", "adagrad", "rowwise")


@dataclass
class Tables:
    """Tables, their accumulators and a feature for each."""

    tables: list[CachedTable]
    accumulators: list[Tensor]
    features: list[int]
    evictions: Tensor = field(default_factory=lambda: torch.zeros(0))

    def operands(self) -> list[list]:
        ops = [table.as_op() for table in self.tables]
        names = ("codes", "cache", "tags", "bits", "ways", "mixed")
        return [[getattr(op, name) for op in ops] for name in names]

    def pool(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple:
        return (*self.operands(), self.features, values, offsets, weights)

    def weight_grad(self, values: Tensor, offsets: Tensor, grad: Tensor) -> tuple:
        return (*self.operands(), self.features, values, offsets, grad)

    def update(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None, grad: Tensor, step: int
    ) -> tuple:
        codes, caches, tags, bits, ways, mixed = self.operands()
        count = len(self.tables)

        def role(name: str) -> list[Tensor]:
            found = [getattr(table, name) for table in self.tables]
            return [torch.empty(0, dtype=torch.int32) if t is None else t for t in found]

        return (
            *(codes, caches, tags, role("counts"), role("stamps"), role("floors")),
            *(self.accumulators, self.evictions, bits, ways, mixed),
            [table.config.rounding == "stochastic" for table in self.tables],
            *(list(range(count)), [0.1 + 0.1 * i for i in range(count)]),
            *([0.01 * (i % 2) for i in range(count)], [1e-6] * count),
            *(7, step, self.features, values, offsets, weights, grad),
        )

    def state(self) -> dict[str, Tensor]:
        kept = {f"sum{i}": t for i, t in enumerate(self.accumulators)}
        for i, table in enumerate(self.tables):
            kept |= {f"{i}.{name}": t for name, t in table.state_dict().items()}
        return {**kept, "evictions": self.evictions}


def make(
    storage: str,
    rule: str,
    *,
    dim: int = 35,
    rounding: str = "stochastic",
    rows: int = 150,
    ways: int = 8,
) -> Tables:
    """One table of each policy and kind of cache; the last two features share a table."""
    configs = [
        EmbeddingTable(rows, dim, storage, 0.0, rounding=rounding),
        EmbeddingTable(rows + 3, dim, storage, 0.2, "lfu", ways, rounding=rounding),
        EmbeddingTable(rows - 7, dim + 1, storage, 0.2, "lru", 4, rounding, "mixed"),
        EmbeddingTable(rows, dim, storage, 0.1, "lru", 1, rounding=rounding),
        EmbeddingTable(rows, dim, storage, 0.1, "lfu", 1, rounding, "mixed"),
    ]
    return of(configs, rule, [0, 1, 2, 3, 4, 1])


def of(configs: list[EmbeddingTable], rule: str, features: list[int]) -> Tables:
    """Tables with random rows, before their first step."""
    tables = []
    for i, config in enumerate(configs):
        table = CachedTable(config)
        generator = torch.Generator().manual_seed(i)
        table.table.store(0, torch.randn(table.table.rows, table.table.dim, generator=generator))
        tables.append(table)
    shapes = [(t.table.rows, t.table.dim) for t in tables]
    accumulators = {
        "sgd": lambda: [torch.zeros(0) for _ in shapes],
        "adagrad": lambda: [torch.zeros(shape) for shape in shapes],
        "rowwise": lambda: [torch.zeros(shape[0]) for shape in shapes],
    }[rule]()
    evictions = torch.zeros(len(tables), dtype=torch.int64)
    return Tables(tables, accumulators, features, evictions)


def batch(
    tables: Tables, step: int, bags: int = 9, weighted: bool = True, longest: int = 8
) -> tuple:
    """Row numbers of which few are frequent, offsets, weights and a gradient."""
    generator = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(0, longest + 1, (len(tables.features) * bags,), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    feature = torch.arange(len(tables.features)).repeat_interleave(bags)
    rows = torch.tensor([tables.tables[t].table.rows for t in tables.features])
    limits = rows[feature].repeat_interleave(lengths)
    values = (torch.rand(len(limits), generator=generator) ** 2 * limits).long() * 11 % limits
    weights = torch.randn(len(limits), generator=generator) if weighted else None
    width = sum(tables.tables[t].table.dim for t in tables.features)
    return values, offsets, weights, torch.randn(bags, width, generator=generator)


def train(
    tables: Tables, steps: int, bags: int = 9, weighted: bool = True, longest: int = 8
) -> dict[str, Tensor]:
    """The state after some steps, and what was looked up before each of them."""
    seen = {}
    for step in range(1, steps + 1):
        values, offsets, weights, grad = batch(tables, step, bags, weighted, longest)
        out, statistics = embedding_pool(*tables.pool(values, offsets, weights))
        seen |= {f"out{step}": out, f"statistics{step}": statistics}
        seen[f"weights{step}"] = embedding_weight_grad(*tables.weight_grad(values, offsets, grad))
        embedding_update(*tables.update(values, offsets, weights, grad, step))
    return seen | tables.state()

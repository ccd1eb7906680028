"""Embedding tables that ranks share: what is measured of all of them, and their state as one
process has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....nn import CachedEmbeddingBags, EmbeddingTable, ShardedCachedEmbeddingBags
from ....nn.cached_table import CachedTable, CacheMemory
from ...engine.ranks import Ranks
from ...engine.task import State
from .parameter_tables import ParameterTables

Tables = CachedEmbeddingBags | ShardedCachedEmbeddingBags | ParameterTables

_ROWS = ("table.codes", "counts")
_CACHE = ("cache", "tags", "stamps")
_COUNTS = ("statistics", "evicted")
_FLOORS = "floors"


def make_tables(
    tables: Sequence[EmbeddingTable], narrow_above: int, seed: int, ranks: Ranks
) -> Tables:
    """The tables of a model: one row a category, whole in one process or split over the ranks."""
    if not ranks.several:
        return CachedEmbeddingBags(tables, narrow_above, stacked=True, seed=seed)
    made = ShardedCachedEmbeddingBags(
        tables, ranks.mesh, narrow_above=narrow_above, stacked=True, seed=seed
    )

    def take_mean(module: nn.Module, given: Any, looked_up: Tensor) -> None:
        # A rank's loss is a mean over its part of the batch, and gradients of rows are summed.
        if looked_up.requires_grad:
            looked_up.register_hook(lambda grad: grad / ranks.count)  # type: ignore[no-untyped-call]

    made.register_forward_hook(take_mean)
    return made


def memory_of(tables: Tables, ranks: Ranks) -> CacheMemory:
    """Bytes of all tables, wherever they are."""
    return sum(ranks.gather(tables.memory()), CacheMemory())


def hit_rate(tables: Tables, ranks: Ranks) -> float:
    """Share of the lookups in training so far that a cache served, of tables that have one."""
    if isinstance(tables, ParameterTables):
        return 0.0
    kept: list[CachedTable] = list(tables.tables)  # type: ignore[arg-type]
    cached = [i for i, table in enumerate(kept) if table.config.cache_shape()[0]]
    found = ranks.gather(tables.statistics[cached].sum(0).tolist())
    lookups, hits = (sum(column) for column in zip(*found, strict=True))
    return hits / lookups if lookups else 0.0


class SplitTables:
    """The tables' part of a run's state, between ranks that share them and one process.

    Args:
        tables: This rank's.
        ranks: The ranks.
    """

    prefix = "tables."

    def __init__(self, tables: ShardedCachedEmbeddingBags, ranks: Ranks) -> None:
        self._configs = [placed.config for placed in tables.placed]
        self._tables, self._ranks = tables, ranks

    def join(self, model: State, rows: State | None) -> tuple[State, State | None]:
        """From what all ranks have, put together, to what one process would have."""
        model = dict(model)
        for name in _COUNTS:
            found = self._ranks.gather(self._tables.get_buffer(name).cpu())
            model[self.prefix + name] = torch.stack(found).sum(0)
        for index, config in enumerate(self._configs):
            for name in (*_ROWS, *_CACHE):
                key = f"{self.prefix}tables.{index}.{name}"
                if key in model:
                    model[key] = _flat(model[key], config, rows=name in _ROWS)
            if config.policy == "lfu" and (sets := config.cache_shape()[0]):
                # No count is below.
                zeros = torch.zeros(sets, dtype=torch.int32)
                model[f"{self.prefix}tables.{index}.{_FLOORS}"] = zeros
        if rows is None:
            return model, None
        states = {
            index: {name: _flat(t, self._configs[index], rows=True) for name, t in state.items()}
            for index, state in rows["state"].items()
        }
        return model, {**rows, "state": states}

    def share(self, model: State, rows: State | None) -> tuple[State, State | None]:
        """From what one process would have to what this rank loads, which takes its part of it."""
        # Those of a rank begin at zero.
        dropped = [n for n in model if n.startswith(self.prefix) and n.endswith(f".{_FLOORS}")]
        for index, placed in enumerate(self._tables.placed):
            if placed.rank not in (None, self._ranks.rank):
                elsewhere = f"{self.prefix}tables.{index}."
                dropped += [name for name in model if name.startswith(elsewhere)]
        model = {name: value for name, value in model.items() if name not in dropped}
        if self._ranks.rank > 0:
            # What is counted is added up over the ranks.
            for name in (self.prefix + name for name in _COUNTS):
                model[name] = torch.zeros_like(model[name])
        return model, rows


def _flat(tensor: Tensor, config: EmbeddingTable, *, rows: bool) -> Tensor:
    """A tensor of a split table, by residue and round, as the rows or places of a whole one."""
    flat = tensor.flatten(0, 1)
    # What fills up the last round holds nothing.
    return flat[: config.num_embeddings].clone() if rows else flat

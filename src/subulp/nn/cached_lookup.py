"""Lookups in embedding tables that update their own rows in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..numerics import random_bits
from ..ops.embedding import calls
from ..ops.embedding.job import Lookups, Table, TableUpdate
from ..ops.row_protocols import RowRule
from .cached_table import CachedTable, CacheMemory, EmbeddingTable

_MASK = 0xFFFFFFFF


class CachedLookup(nn.Module):
    """Tables that are looked up and updated in one call.

    Args:
        configs: How each table is stored, cached and rounded.
        features: The table of each feature.
        seed: Seed of the initial rows and of rounding; ``None`` follows ``torch.manual_seed``.
        device: Device of the tables.

    Attributes:
        tables: The tables.
        row_optimizer: Set by :class:`subulp.optim.RowSGD` and :class:`subulp.optim.RowAdagrad`.
        steps: Number of updates so far, which random bits and LRU's stamps are counted by; in the
            state dict, with the seed.
    """

    statistics: Tensor
    evicted: Tensor

    def __init__(
        self,
        configs: Sequence[EmbeddingTable],
        features: Sequence[int],
        seed: int | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        if seed is None:
            seed = random_bits.fold_seed(torch.initial_seed())
        if not 0 <= seed <= _MASK:
            raise ValueError(f"seed={seed} is out of range: from 0 to 2**32 - 1")
        self.seed, self.steps = seed, 0
        self.row_optimizer: RowRule | None = None
        self._features = list(features)
        self.tables = nn.ModuleList(CachedTable(config, device) for config in configs)
        count = len(self.tables)
        for name, shape in (("statistics", (count, 2)), ("evicted", (count,))):
            zeros = torch.zeros(shape, dtype=torch.int64, device=device)
            self.register_buffer(name, zeros, persistent=False)
        for stream, table in enumerate(self._tables()):
            # Streams have generators of their own: a table does not depend on those before it.
            generator = torch.Generator().manual_seed((seed + 0x9E3779B9 * stream) & _MASK)
            table.table.fill_uniform(1 / math.sqrt(table.table.rows), generator)

    def _tables(self) -> list[CachedTable]:
        return list(self.tables)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------- optimizer

    @property
    def row_parameters(self) -> Sequence[nn.Parameter]:
        """The stored rows of each table, for the optimizers of rows."""
        return [table.table.codes for table in self._tables()]

    @property
    def row_shapes(self) -> Sequence[tuple[int, int]]:
        """Number of rows, and numbers per row, of each table."""
        return [(table.table.rows, table.table.dim) for table in self._tables()]

    # --------------------------------------------------------------------------------- lookups

    def _lookup(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Sums of bags ``(batch, sum of dims)``, whose backward pass updates the rows."""
        update = self.training and torch.is_grad_enabled()
        with_grad = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        if not (update or with_grad):
            return self._pool(values, offsets, weights, count=False)
        anchor = _anchor(values.device) if update else None
        out: Tensor = _Lookup.apply(anchor, weights, self, values, offsets, update)  # type: ignore[no-untyped-call]
        return out

    def _pool(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None, *, count: bool
    ) -> Tensor:
        lookups = Lookups(self._features, values, offsets, weights)
        statistics = self.statistics if count else torch.zeros_like(self.statistics)
        return calls.pool(self._operands(), lookups, statistics)

    def _operands(self) -> list[Table]:
        return [table.as_op() for table in self._tables()]

    def _weight_grad(self, values: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        lookups = Lookups(self._features, values, offsets, None)
        return calls.weight_grad(self._operands(), lookups, grad)

    def _update(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None, grad: Tensor
    ) -> None:
        optimizer = self.row_optimizer
        if optimizer is None:
            raise RuntimeError(
                "the rows have no optimizer: make one with optim.RowAdagrad(module, lr=) or "
                "optim.RowSGD(module, lr=), or call eval() to leave them as they are"
            )
        calls.update(
            self._operands(),
            [self._update_of(optimizer, stream) for stream in range(len(self.tables))],
            Lookups(self._features, values, offsets, weights),
            grad,
            self.evicted,
            self.seed,
            self.steps + 1,
        )
        self.steps += 1

    def _update_of(self, optimizer: RowRule, stream: int) -> TableUpdate:
        table = self._tables()[stream]
        rows = table.table.codes
        group, device = optimizer.group_of(rows), rows.device
        accumulator = optimizer.accumulator(rows)

        def counters(role: Tensor | None) -> Tensor:
            return _absent(torch.int32, device) if role is None else role

        return TableUpdate(
            counts=counters(table.counts),
            stamps=counters(table.stamps),
            floors=counters(table.floors),
            accumulator=_absent(torch.float32, device) if accumulator is None else accumulator,
            stochastic=table.config.rounding == "stochastic",
            stream=stream,
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group.get("eps", 0.0)),
        )

    # ------------------------------------------------------------------------- what one can ask

    @property
    def hit_rate(self) -> float:
        """Share of the lookups in training that a cache served; 0 before the first."""
        lookups, hits = self.statistics.sum(0).tolist()
        return float(hits / lookups) if lookups else 0.0

    @property
    def hit_rates(self) -> list[float]:
        """:attr:`hit_rate` of each table."""
        return [hits / lookups if lookups else 0.0 for lookups, hits in self.statistics.tolist()]

    @property
    def evictions(self) -> int:
        """Number of rows evicted from the caches."""
        return int(self.evicted.sum())

    @property
    def resident_rows(self) -> int:
        """Number of rows in the caches."""
        return sum(int((table.tags >= 0).sum()) for table in self._tables())

    def reset_statistics(self) -> None:
        """Start counting lookups, hits and evictions from zero."""
        self.statistics.zero_()
        self.evicted.zero_()

    def memory(self) -> CacheMemory:
        """Bytes of all tables, and of the optimizer's state."""
        total = CacheMemory()
        for table in self._tables():
            total += table.memory()
        if self.row_optimizer is not None:
            kept = [self.row_optimizer.accumulator(rows) for rows in self.row_parameters]
            state = sum(t.nbytes for t in kept if t is not None)
            total += CacheMemory(optimizer=state)
        return total

    def flush(self) -> None:
        """Round all cached rows into their tables, as these round, and empty the caches.

        Access counts are kept.
        """
        for stream, table in enumerate(self._tables()):
            table.flush(seed=self.seed, stream=stream, step=self.steps)

    def get_extra_state(self) -> Tensor:
        """Seed and number of updates."""
        return torch.tensor([self.seed, self.steps])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore seed and number of updates."""
        self.seed, self.steps = (int(number) for number in state)


def integers(name: str, index: Tensor, dims: tuple[int, ...] = (1,)) -> Tensor:
    """``index`` as int64.

    Raises:
        ValueError: Its dtype is neither int32 nor int64, or its number of dimensions does not fit.
    """
    if index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {index.dtype}: expected int32 or int64")
    if index.dim() not in dims:
        expected = " or ".join(map(str, dims))
        raise ValueError(f"{name} has {index.dim()} dimensions: expected {expected}")
    return index.to(torch.int64)


def check_weights(weights: Tensor | None, values: Tensor, mode: str | None) -> None:
    """Raise ValueError if there are weights that do not fit."""
    if weights is None:
        return
    if mode != "sum":
        raise ValueError(f"per_sample_weights go with mode='sum', not with mode={mode!r}")
    if weights.shape != values.shape:
        raise ValueError(
            f"per_sample_weights have shape {tuple(weights.shape)}, the row numbers "
            f"{tuple(values.shape)}"
        )
    if weights.dtype != torch.float32:
        raise ValueError(f"per_sample_weights have dtype {weights.dtype}: expected FP32")


# Row numbers have no gradient; with this argument the result of a lookup requires one.
@cache
def _anchor(device: torch.device) -> Tensor:
    return torch.empty(0, device=device, requires_grad=True)


@cache
def _absent(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor | None,
        weights: Tensor | None,
        module: CachedLookup,
        values: Tensor,
        offsets: Tensor,
        update: bool,
    ) -> Tensor:
        ctx.save_for_backward(weights, values, offsets)
        ctx.module, ctx.update = module, update
        return module._pool(values, offsets, weights, count=update)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, values, offsets = ctx.saved_tensors
        module, grad = ctx.module, grad.contiguous()
        grad_weights = None
        if ctx.needs_input_grad[1]:
            grad_weights = module._weight_grad(values, offsets, grad)
        if ctx.update:
            module._update(values, offsets, weights, grad)
        return None, grad_weights, None, None, None, None

"""Lookups in embedding tables that update their own rows in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..ops import look_ahead
from ..ops.embedding import calls, embedding_pool, repeat
from ..ops.embedding.job import Lookups, Table, TableUpdate
from ..ops.graph_breaks import between_graphs
from ..ops.row_protocols import RowRule
from .cached_table import CachedTable, CacheMemory, EmbeddingTable
from .derivatives import check_no_tangent, is_tracing, once_differentiable
from .fixed_dtypes import FixedDtypes
from .module_state import check_state, new_state, read_state
from .row_parameter import RowParameter, rows_that_train
from .seeds import seed_of
from .table_part import TablePart
from .training import check_one_process, inside_backward

_MASK = 0xFFFFFFFF
_LAST_STAMP = 2**31 - 1


class CachedLookup(FixedDtypes):
    """Tables that are looked up and updated in one call.

    Args:
        configs: How each table is stored, cached and rounded.
        features: The table of each feature.
        seed: Seed of the initial rows and of rounding; ``None`` draws one from torch's generator.
        device: Device of the tables.
        parts: Table numbers and the parts of these tables that are kept here, each as a table of
            its own; ``None`` for all tables, whole (default: ``None``).

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
        parts: Sequence[tuple[int, TablePart]] | None = None,
    ) -> None:
        super().__init__()
        self.seed, self.steps = seed_of(seed), 0
        self.row_optimizer: RowRule | None = None
        self._features = list(features)
        self._width = sum(configs[t].embedding_dim for t in features)
        kept = [(t, None) for t in range(len(configs))] if parts is None else parts
        # The parts of a table share its stream: random bits are counted by places in the whole.
        self._streams = tuple(t for t, _ in kept)
        self.tables = nn.ModuleList(CachedTable(configs[t], device, part) for t, part in kept)
        count = len(self.tables)
        for name, shape in (("statistics", (count, 2)), ("evicted", (count,))):
            zeros = torch.zeros(shape, dtype=torch.int64, device=device)
            self.register_buffer(name, zeros, persistent=False)
        self.reset_parameters()
        self.register_load_state_dict_post_hook(_follow_tables)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Be as new: the initial rows of its seed, nothing cached or counted, and no updates.

        As of torch's layers, this gives a module that ``to_empty()`` has moved its values.
        """
        self.steps = 0
        self.statistics.zero_()
        self.evicted.zero_()
        for stream, table in zip(self._streams, self._tables(), strict=True):
            # Streams have generators of their own: a table does not depend on those before it.
            table.reset((self.seed + 0x9E3779B9 * stream) & _MASK)

    def _tables(self) -> list[CachedTable]:
        # Each step asks for them several times, and a module's attributes take long to find.
        return list(self._modules["tables"]._modules.values())  # type: ignore[union-attr,arg-type]

    # ------------------------------------------------------------------------------- optimizer

    @property
    def row_parameters(self) -> Sequence[nn.Parameter]:
        """The stored rows of each table, for the optimizers of rows."""
        return self._codes()

    def _codes(self) -> list[RowParameter]:
        return [table.codes for table in self._tables()]

    def _frozen(self) -> list[bool]:
        try:
            return [rows.frozen for rows in self._codes()]
        except AttributeError:
            return [rows_that_train(rows).frozen for rows in self._codes()]

    def _trains(self, frozen: Sequence[bool]) -> bool:
        """Whether a feature looks up rows of a table that is not frozen."""
        return not any(frozen) or not all(frozen[table] for table in self._features)

    @property
    def row_shapes(self) -> Sequence[tuple[int, int]]:
        """Number of rows, and numbers per row, of each table."""
        return [(table.table.rows, table.table.dim) for table in self._tables()]

    def checked_optimizer(self) -> RowRule:
        """The optimizer of the rows.

        Raises:
            RuntimeError: There is none.
        """
        if self.row_optimizer is None:
            raise RuntimeError(
                "the rows have no optimizer: make one with optim.RowAdagrad(module, lr=) or "
                "optim.RowSGD(module, lr=), or call eval() to leave them as they are"
            )
        return self.row_optimizer

    # --------------------------------------------------------------------------------- lookups

    def _lookup(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Sums of bags ``(batch, sum of dims)``, whose backward pass updates the rows."""
        if torch.compiler.is_exporting():
            return self._exported(values, offsets, weights)
        if is_tracing():
            raise RuntimeError(
                f"torch.jit.trace of a {type(self).__name__}: its kernels leave no trace, and the "
                "program would return what memory holds; use torch.export"
            )
        grads = torch.is_grad_enabled()
        update = self.training and grads and self._trains(self._frozen())
        if update:
            remedy = "Split the tables: nn.ShardedCachedEmbeddingBags(tables, mesh)"
            check_one_process(type(self).__name__, remedy)
        weighs = weights is not None and weights.requires_grad and grads
        if not (update or weighs):
            return self._pool(values, offsets, weights, torch.zeros_like(self.statistics))
        # Counted once: what a backward pass computes again counts when it updates the rows.
        again = inside_backward()
        statistics = torch.zeros_like(self.statistics) if again or not update else self.statistics
        late = statistics if again else None
        if not weighs:
            trained: Tensor = _Trained.apply(  # type: ignore[no-untyped-call]
                anchor(values.device), self, values, offsets, weights, statistics, late
            )
            return trained
        rows = None
        if update:
            shape = (offsets.numel() - 1) // len(self._features), self._width
            given = None if weights is None else weights.detach()
            rows = _Rows.apply(anchor(values.device), self, values, offsets, given, shape, late)  # type: ignore[no-untyped-call]
        out: Tensor = _Lookup.apply(rows, weights, self, values, offsets, statistics)  # type: ignore[no-untyped-call]
        return out

    def _exported(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """The sums as an operator of an exported program."""
        if self.training:
            raise RuntimeError(
                f"torch.export of a {type(self).__name__} in train(): its rows update themselves, "
                "which no exported program does; call eval() first"
            )
        tables = self._operands()
        sums: Tensor = embedding_pool(
            [table.codes for table in tables],
            [table.cache for table in tables],
            [table.tags for table in tables],
            [table.bits for table in tables],
            [table.ways for table in tables],
            [table.mixed for table in tables],
            self._features,
            values,
            offsets,
            weights,
        )[0]
        return sums

    def _pool(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None, statistics: Tensor
    ) -> Tensor:
        lookups = Lookups(self._features, values, offsets, weights)
        key, found = ("pool", id(self)), self._tables()
        stored = repeat.Stored(
            [*(tensor for table in found for tensor in table.stored()), statistics],
            [tuple(self._features), *(table.options() for table in found)],
        )
        if values.is_cpu and (known := repeat.find(key, stored)) is not None:
            return repeat.pool(known, lookups)
        tables = self._operands()
        out = calls.pool(tables, lookups, statistics)
        repeat.remember(key, stored, tables, (), self._features)
        return out

    def _operands(self) -> list[Table]:
        return [table.as_op() for table in self._tables()]

    def _weight_grad(self, values: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        lookups = Lookups(self._features, values, offsets, None)
        return calls.weight_grad(self._operands(), lookups, grad)

    def _update(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None, grad: Tensor
    ) -> None:
        optimizer = self.checked_optimizer()
        unscaled = optimizer.unscaled(grad)
        # Rows may have been frozen since the forward pass.
        codes = self._codes()
        frozen = [p.frozen for p in codes]
        if unscaled is None or not self._trains(frozen):
            return
        lookups = Lookups(self._features, values, offsets, weights)
        if any(frozen):
            lookups, unscaled = self._of_trained(lookups, unscaled)
        self._take_step(optimizer, codes, lookups, unscaled)
        self.steps += 1

    def _take_step(
        self, optimizer: RowRule, codes: list[RowParameter], lookups: Lookups, grad: Tensor
    ) -> None:
        key, tables = ("update", id(self)), self._tables()
        evicted, number = self.evicted, self._next_step()
        groups = optimizer.groups_of(codes)
        accumulators = list(map(optimizer.accumulator, codes, groups))
        tensors = [
            tensor
            for table, total in zip(tables, accumulators, strict=True)
            for tensor in (*table.stored(), *table.policy_state(), total)
            if tensor is not None
        ]
        stored = repeat.Stored(
            [*tensors, evicted],
            [tuple(lookups.features), self._streams, *(table.options() for table in tables)],
        )
        if lookups.values.is_cpu and (known := repeat.find(key, stored)) is not None:
            repeat.update(known, _numbers_of(groups), lookups, grad, self.seed, number)
            return
        operands = self._operands()
        updates = [
            update_of(optimizer, table, group, stream)
            for table, group, stream in zip(tables, groups, self._streams, strict=True)
        ]
        calls.update(operands, updates, lookups, grad, evicted, self.seed, number)
        repeat.remember(key, stored, operands, updates, lookups.features)

    def _next_step(self) -> int:
        """The number of the next update."""
        number = self.steps + 1
        if number > _LAST_STAMP and any(t.policy_state()[1] is not None for t in self._tables()):
            raise RuntimeError(
                f"LRU's time stamps end at {_LAST_STAMP} updates, and this is number {number}: "
                "nothing was updated; flush() the caches and set steps to 0"
            )
        return number

    def _of_trained(self, lookups: Lookups, grad: Tensor) -> tuple[Lookups, Tensor]:
        """The lookups and the gradient without the features of frozen tables."""
        codes, batch = self._codes(), lookups.batch
        trained = [f for f, t in enumerate(lookups.features) if not codes[t].frozen]
        columns = lookups.columns(self._operands())
        own = [slice(f * batch, (f + 1) * batch) for f in trained]
        sizes, starts = lookups.offsets.diff(), lookups.offsets[:-1]
        none = sizes.new_zeros(1)
        ends = torch.cat((none, *(sizes[run] for run in own))).cumsum(0)
        # How far the values of a bag move; those that are left over go to the end, in no bag. On a
        # GPU the host would have to wait before it knew how many these are.
        moves = torch.cat((*(starts[run] for run in own), none)) - ends
        place = torch.arange(lookups.values.numel(), device=ends.device)
        bag = torch.searchsorted(ends[1:], place, right=True)
        # Offsets that do not fit are refused by the update itself.
        source = (place + moves[bag]).clamp_(0, max(place.numel() - 1, 0))
        weights = lookups.weights
        kept = Lookups(
            [lookups.features[f] for f in trained],
            lookups.values[source],
            ends,
            None if weights is None else weights[source],
        )
        return kept, torch.cat([grad[:, columns[f] : columns[f + 1]] for f in trained], 1)

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
        for stream, table in zip(self._streams, self._tables(), strict=True):
            table.flush(seed=self.seed, stream=stream, step=self.steps)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.statistics.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.statistics.is_meta:
            # to_empty() leaves whatever the memory held.
            self.reset_statistics()
        return self

    def get_extra_state(self) -> Tensor:
        """Seed, number of updates, and how the rows are to be read."""
        return new_state(self.seed, self.steps, [t.layout() for t in self._tables()])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore seed and number of updates."""
        self.seed, self.steps, _ = read_state(state)

    # As torch calls it; the last of the others collects errors.
    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        tables = {f"tables.{i}": table for i, table in enumerate(self._tables())}
        faults = check_state(state_dict, prefix, tables)
        others[-1].extend(faults)
        if not faults:
            super()._load_from_state_dict(state_dict, prefix, *others)


def _follow_tables(module: nn.Module, _: object) -> None:
    """Bring what is in no state dict to where ``load_state_dict(assign=True)`` put the tables."""
    assert isinstance(module, CachedLookup)
    device = module.row_parameters[0].device
    for name in ("statistics", "evicted"):
        kept = module.get_buffer(name)
        if kept.device != device:
            moved = torch.zeros_like(kept, device=device) if kept.is_meta else kept.to(device)
            setattr(module, name, moved)


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
    # Of what is so already, torch's function takes 8 µs in the middle of a training step.
    return index if index.dtype == torch.int64 else index.to(torch.int64)


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
    check_no_tangent("per_sample_weights", weights)


# Row numbers have no gradient; with this argument the result of a lookup requires one.
# A new one each time: made inside of a transform of torch.func, it would be of that alone.
def anchor(device: torch.device) -> Tensor:
    """An empty tensor that requires a gradient."""
    return torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)


def update_of(
    optimizer: RowRule, table: CachedTable, group: dict[str, Any], stream: int
) -> TableUpdate:
    """What an update of a table needs beside it.

    Args:
        optimizer: The rule.
        table: The table.
        group: Its options.
        stream: Key word of its random bits.

    Raises:
        ValueError: What the optimizer or the cache's policy keeps does not fit.
    """
    rows = table.codes
    counts, stamps, floors = table.checked_policy_state()
    (lr, weight_decay, eps), device = _numbers(group), rows.device
    accumulator = optimizer.accumulator(rows, group)

    def role(name: str, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor:
        return _absent(dtype, device, name, stream) if tensor is None else tensor

    return TableUpdate(
        counts=role("counts", counts),
        stamps=role("stamps", stamps),
        floors=role("floors", floors),
        accumulator=role("accumulator", accumulator, torch.float32),
        stochastic=table.config.rounding == "stochastic",
        stream=stream,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
    )


def _numbers_of(groups: Sequence[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Learning rate, weight decay and epsilon of each group."""
    # All are mostly the same.
    if all(map(is_, groups, groups[1:])):
        return [_numbers(groups[0])] * len(groups)
    return [_numbers(group) for group in groups]


def _numbers(group: dict[str, Any]) -> tuple[float, float, float]:
    return float(group["lr"]), float(group["weight_decay"]), float(group.get("eps", 0.0))


@cache
def _absent(dtype: torch.dtype, device: torch.device, role: str, stream: int) -> Tensor:
    # One for each role of each table: tensors that come twice are not recognised, see ops.kinds.
    return torch.empty(0, dtype=dtype, device=device)


class _Trained(torch.autograd.Function):
    """A lookup whose weights need no gradient: its backward pass updates the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        module: CachedLookup,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        statistics: Tensor,
        late: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(weights, values, offsets)
        ctx.module, ctx.late = module, late
        return module._pool(values, offsets, weights, statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        _update_rows(ctx, grad)
        return (None,) * 7


class _Rows(torch.autograd.Function):
    """Stands for the rows in a graph: its backward pass updates them.

    A node of its own, so that a backward pass that is only after the gradient of the weights, as
    ``torch.autograd.grad(loss, weights)``, leaves the rows alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        module: CachedLookup,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        shape: tuple[int, int],
        late: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(weights, values, offsets)
        ctx.module, ctx.late = module, late
        # One number, which takes the shape of the gradient.
        return anchor.new_empty(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        _update_rows(ctx, grad)
        return (None,) * 7


# Also of the graph of a compiled backward pass.
@between_graphs
def _update_rows(ctx: Any, grad: Tensor) -> None:
    if look_ahead.is_under_way():
        return
    weights, values, offsets = ctx.saved_tensors
    ctx.module._update(values, offsets, weights, grad.contiguous())
    if ctx.late is not None:
        ctx.module.statistics.add_(ctx.late)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor | None,
        weights: Tensor | None,
        module: CachedLookup,
        values: Tensor,
        offsets: Tensor,
        statistics: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(values, offsets)
        ctx.module = module
        return module._pool(values, offsets, weights, statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, offsets = ctx.saved_tensors
        grad_rows, grad_weights = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        return (
            grad if grad_rows else None,
            ctx.module._weight_grad(values, offsets, grad) if grad_weights else None,
            *(None,) * 4,
        )

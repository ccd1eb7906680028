"""The embedding tables of a recommendation model, split over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import torch
from torch import Tensor

from ..numerics.whole import is_whole
from ..ops import look_ahead
from ..ops.embedding import calls
from ..ops.embedding.faults import check_offsets, index_error, not_finite
from ..ops.embedding.job import TableUpdate
from ..ops.graph_breaks import between_graphs
from .cached_embedding_bag import (
    CachedEmbeddingBags,
    Mode,
    bag_bounds,
    bag_configs,
    bag_means,
    check_mode,
)
from .cached_lookup import CachedLookup, anchor, check_weights, integers, update_of
from .cached_table import CachedTable, EmbeddingTable
from .derivatives import once_differentiable
from .lookup_routes import Slots
from .placement import Placement, place
from .seeds import seed_of
from .shard_state import load_part, load_rows, save_part, save_rows
from .sharded_lookup import (
    Exchange,
    exchange_lookups,
    pool,
    send_gradients,
    weight_gradients,
)
from .table_ranks import TableRanks, digest
from .training import inside_backward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Wire = Literal["fp32", "bf16", "fp16"]

# This process's; the ranks take the first one's.
_MODULES = count()

_WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ShardedCachedEmbeddingBags(CachedLookup):
    """:class:`CachedEmbeddingBags` whose tables are split over the ranks of a mesh.

    Each rank looks up its own part of the batch, of any size. What a step computes has the bits of
    one process that has all tables and the batches of all ranks, in the order of the ranks: the
    mesh and the placement of rows do not show. (The parts of :class:`ColumnWise` are tables of
    their own, on one rank too.)

    All ranks make the same calls: forward and backward passes communicate. What is wrong on one
    rank is an error on all, and nothing is updated.

    ::

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        bags = ShardedCachedEmbeddingBags(tables, mesh)
        optimizer = optim.RowAdagrad(bags, lr=0.01)
        loss(bags(values, lengths)).backward()

    Gradients are summed over the batches of all ranks, as in one process. A loss that is a mean
    over a rank's examples has to be divided by the number of ranks, for ``DistributedDataParallel``
    averages the gradients of dense layers and nothing divides those of rows.

    Args:
        tables: How each table is stored, cached and rounded.
        mesh: A mesh of one dimension with all ranks that have the module; ``None`` for one process
            that has all rows.
        plan: The placement of each table; ``None`` splits the rows of those that take more than a
            rank's even share, and places others whole (default: ``None``).
        narrow_above: Tables of at most this many rows stay in FP32 without a cache (default:
            1000).
        features: The table of each feature; ``None`` for one feature per table (default: ``None``).
        mode: ``"sum"`` or ``"mean"`` over a bag (default: ``"sum"``).
        stacked: The output is ``(batch, features, dim)``; all dims must agree (default: ``False``).
        wire: What sums of rows and gradients of bags travel in: ``"fp32"``, ``"bf16"`` or
            ``"fp16"``. Narrow ones are rounded to nearest on any number of ranks, and the rows of a
            split table travel one by one: bits do not depend on the ranks if ``plan`` is given
            (default: ``"fp32"``).
        seed: Seed of the initial rows and of rounding; ``None`` follows rank 0's
            ``torch.manual_seed`` (default: ``None``).
        device: Device of the tables (default: the mesh's).

    Attributes:
        placed: The parts of the tables; :attr:`tables` has what this rank has of each.
        hit_rate: Of the rows on this rank, as ``hit_rates``, ``evictions``, ``resident_rows`` and
            :meth:`memory`.

    Raises:
        ValueError: An argument is out of range or differs between ranks, or the mesh has several
            dimensions.
    """

    mark: Tensor
    # Those of modules that were pickled earlier.
    _module = _calls = 0

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        mesh: DeviceMesh | None,
        plan: Sequence[Placement] | None = None,
        narrow_above: int = 1000,
        *,
        features: Sequence[int] | None = None,
        mode: Mode = "sum",
        stacked: bool = False,
        wire: Wire = "fp32",
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        configs, features, dims = bag_configs(tables, narrow_above, features, mode, stacked)
        if wire not in _WIRES:
            raise ValueError(f"wire={wire!r} is unknown: use {', '.join(map(repr, _WIRES))}")
        ranks = TableRanks(mesh)
        if mesh is not None:
            device = ranks.device if device is None else torch.device(device)
            if device.type not in (ranks.device.type, "meta"):
                raise ValueError(
                    f"device={device} does not go with a mesh of {mesh.device_type!r}: tables lie "
                    "where the mesh communicates"
                )
        placed = place(configs, plan, ranks.size)
        facts = digest(configs, placed, features, mode, stacked, wire)
        words = ranks.agree([seed_of(seed), seed is None, facts, next(_MODULES)])
        if len({(given, facts) for _, given, facts, _ in words}) > 1 or (
            seed is not None and len({given for given, *_ in words}) > 1
        ):
            raise ValueError("the ranks' arguments differ: pass the same to all, or seed=None")
        parts = [(p.table, p.on(ranks.rank, ranks.size)) for p in placed]
        super().__init__(configs, features, words[0][0], device, parts)
        self.ranks, self.mode, self.stacked, self.wire = ranks, mode, stacked, wire
        self.placed, self._dims, self._configs = placed, dims, configs
        # What the ranks tell modules, and the calls of one, apart by.
        self._module, self._calls = words[0][-1], 0
        # What copies rank 0's buffers to other ranks, as DistributedDataParallel, shows here.
        mark = torch.full((1,), ranks.rank, dtype=torch.int64, device=device)
        self.register_buffer("mark", mark, persistent=False)
        self._slots = Slots.of(features, placed)
        self.register_state_dict_post_hook(_save_parts)  # type: ignore[no-untyped-call]

    @property
    def features(self) -> list[int]:
        """The table of each feature."""
        return list(self._features)

    @between_graphs
    def forward(
        self,
        values: Tensor,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up the bags of this rank's examples, as :meth:`CachedEmbeddingBags.forward`.

        Called by all ranks. A batch may be empty.

        Args:
            values: int32 or int64 ``(count,)`` row numbers of the whole tables: those of the first
                feature, bag by bag, then those of the second, and so on.
            lengths: int32 or int64 ``(features * batch,)``: length of each bag.
            offsets: int32 or int64 ``(features * batch + 1,)``, instead of ``lengths``.
            per_sample_weights: FP32 ``(count,)`` factors of the rows; for ``mode="sum"``.

        Returns:
            FP32 ``(batch, sum of the features' dims)``, or ``(batch, features, dim)`` if
            ``stacked``; zeros for an empty bag.

        Raises:
            ValueError: A shape or dtype does not fit, lengths are negative, or offsets decrease or
                reach too far; on any rank.
            IndexError: A row number is out of range, on any rank.
            RuntimeError: The ranks do not make the same call.
        """
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"torch.export of a {type(self).__name__}: no exported program communicates; "
                "export the CachedEmbeddingBags that unsharded() of a mesh of one rank makes"
            )
        fault, bounds = None, None
        try:
            values = integers("values", values)
            check_mode(self.mode)
            check_weights(per_sample_weights, values, self.mode)
            bounds = bag_bounds(len(self._features), lengths, offsets)
            self._check_values(values, bounds)
            self._check_own()
        except Exception as error:
            fault = error
        out = self._look_up(values, bounds, per_sample_weights, fault)
        assert bounds is not None
        if self.mode == "mean":
            out = bag_means(out, bounds, self._dims)
        shape = out.shape[0], len(self._dims), self._dims[0]
        return out.view(shape) if self.stacked else out

    def _check_own(self) -> None:
        if int(self.mark) != self.ranks.rank:
            raise RuntimeError(
                f"the cache of rank {self.ranks.rank} has been overwritten with that of rank "
                f"{int(self.mark)}, as DistributedDataParallel does with what it wraps: wrap the "
                "dense layers alone, make the tables again and load a checkpoint"
            )

    def _check_values(self, values: Tensor, offsets: Tensor) -> None:
        check_offsets(offsets, values.numel())
        rows = [self._configs[t].num_embeddings for t in self._features]
        batch = (offsets.numel() - 1) // len(rows)
        bounds = offsets[::batch] if batch else offsets.repeat(len(rows) + 1)
        limits = torch.tensor(rows, device=values.device).repeat_interleave(bounds.diff())
        used = values[: limits.numel()]
        bad = (used < 0) | (used >= limits)
        if bool(bad.any()):
            position = int(bad.int().argmax())
            feature = int((bounds <= position).sum()) - 1
            raise index_error(position, int(values[position]), feature, rows[feature])

    def _look_up(
        self,
        values: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        fault: Exception | None,
    ) -> Tensor:
        grads = torch.is_grad_enabled()
        frozen = self._frozen()
        # As in one process, tables that no feature looks up do not count.
        update = self.training and grads and not all(frozen[p] for p in self._slots.parts)
        weighs = weights is not None and weights.requires_grad and grads
        given = None if weights is None else weights.detach()
        self._calls += 1
        call = self._module, self._calls, self.mode
        facts = (*call, self.seed, self.steps, update, weighs, weights is None, frozen, self.wire)
        exchange = exchange_lookups(
            self.ranks,
            self._slots,
            None if fault else values,
            offsets,
            given,
            parts=len(self.placed),
            rows_alone=self.wire != "fp32",
            fault=fault,
            digest=digest(*facts),
        )
        if not (update or weighs):
            return self._sums(exchange, torch.zeros_like(self.statistics))
        again = inside_backward()
        statistics = torch.zeros_like(self.statistics) if again or not update else self.statistics
        sent = [weighs or not of_part for of_part in frozen]
        rows = None
        if update:
            late = statistics if again else None
            rows = _Rows.apply(anchor(values.device), self, exchange, sent, late)  # type: ignore[no-untyped-call]
        out: Tensor = _Lookup.apply(rows, weights, self, exchange, sent, statistics)  # type: ignore[no-untyped-call]
        return out

    def _sums(self, exchange: Exchange, statistics: Tensor) -> Tensor:
        return pool(self.ranks, exchange, self._operands(), statistics, _WIRES[self.wire])

    def refuse(self, fault: Exception) -> NoReturn:
        """Raise on all ranks what is wrong with the lookups of this one, which the others call for.

        Args:
            fault: What is wrong.

        Raises:
            Exception: Of its kind, on every rank.
        """
        none = torch.empty(0, dtype=torch.int64, device=self.statistics.device)
        self._look_up(none, None, None, fault)
        raise fault

    def _check_backward(self, exchange: Exchange) -> None:
        """Raise RuntimeError unless all ranks are in the backward pass of the same call."""
        if any(call != exchange.call for (call,) in self.ranks.agree([exchange.call])):
            raise RuntimeError(
                "the ranks are in the backward passes of different lookups: every rank calls "
                "backward() of the same ones, in the same order; nothing was updated"
            )

    def _gradients(self, exchange: Exchange, grad: Tensor, sent: Sequence[bool]) -> list[Tensor]:
        return send_gradients(self.ranks, exchange, grad, sent, _WIRES[self.wire])

    def _weights(self, exchange: Exchange, grads: Sequence[Tensor], count: int) -> Tensor:
        return weight_gradients(self.ranks, exchange, self._operands(), grads, count)

    def _update_parts(self, exchange: Exchange, sent: Sequence[bool], flat: Tensor) -> None:
        """Update the rows here, if all ranks may."""
        fault, ready, facts = None, None, 0
        updates: list[TableUpdate] = []
        try:
            ready = self._ready(exchange, flat)
            facts = digest(self.steps, self._options(), self.checked_optimizer().factor())
            updates = self._updates()
        except Exception as error:
            fault = error
        words = self.ranks.agree([int(fault is not None), int(ready is None), facts])
        if any(faulty for faulty, _, _ in words):
            self.ranks.raise_faults(fault)
        if any(other != facts for _, _, other in words):
            raise RuntimeError(
                "the ranks' optimizers or gradient scalers have different options, or tables are "
                "frozen on some ranks only: set the same on all; nothing was updated"
            )
        optimizer = self.row_optimizer
        assert optimizer is not None
        if any(skips for _, skips, _ in words):
            # Scalers on all ranks hear of an overflow on one.
            if ready is not None:
                optimizer.unscaled(flat.new_full((1,), torch.inf))
            return
        codes = self._codes()
        if all(codes[p].frozen for p in self._slots.parts):
            return
        assert ready is not None
        number = self._next_step()
        tables = self._operands()
        sizes = [
            (part.bag_ends.numel() - 1) * table.dim if wanted else 0
            for part, table, wanted in zip(exchange.parts, tables, sent, strict=True)
        ]
        for p, grad in enumerate(ready.split_with_sizes(sizes)):
            part = exchange.parts[p]
            if not part.values.numel() or not sent[p] or codes[p].frozen:
                continue
            calls.update(
                [tables[p]],
                [updates[p]],
                part.bags(),
                grad.view(-1, tables[p].dim),
                self.evicted[p : p + 1],
                self.seed,
                number,
            )
        self.steps = number

    def _updates(self) -> list[TableUpdate]:
        """What an update of each part needs beside it: before any has one, for it may not fit."""
        optimizer = self.checked_optimizer()
        groups = optimizer.groups_of(self._codes())
        each = zip(self._tables(), groups, self._streams, strict=True)
        return [update_of(optimizer, *of_part) for of_part in each]

    def _ready(self, exchange: Exchange, flat: Tensor) -> Tensor | None:
        """The gradients to step by; ``None`` if the scaler leaves the step out."""
        optimizer = self.checked_optimizer()
        unscaled = optimizer.unscaled(flat)
        if unscaled is None:
            return None
        if not bool(unscaled.isfinite().all()):
            raise not_finite("gradient", unscaled.shape)
        for part in exchange.parts:
            if part.weights is not None and not bool(part.weights.isfinite().all()):
                raise not_finite("per_sample_weights", part.weights.shape)
        return unscaled

    def _options(self) -> list[tuple[object, ...]]:
        codes, names = self._codes(), ("lr", "weight_decay", "eps", "rowwise")
        groups = self.checked_optimizer().groups_of(codes)
        return [
            (*(None if group.get(n) is None else float(group[n]) for n in names), rows.frozen)
            for group, rows in zip(groups, codes, strict=True)
        ]

    def weight_fp32(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """FP32 rows of a table on every rank, cached rows as they are in the cache.

        Called by all ranks, for the same rows.

        Args:
            index: The table.
            start: First row (default: 0).
            stop: End of the rows (default: all).

        Raises:
            IndexError: There is no such table.
            ValueError: The rows are out of range, or ranks ask for different ones.
        """
        asked = index, start, stop
        if len(set(map(tuple, self.ranks.agree([digest(*asked)])))) > 1:
            raise ValueError(
                f"the ranks ask for different rows, this one for index={index}, start={start}, "
                f"stop={stop}: all ask for the same ones"
            )
        index = self._number(index)
        config = self._configs[index]
        stop = config.num_embeddings if stop is None else stop
        if not 0 <= start <= stop <= config.num_embeddings:
            raise ValueError(
                f"rows {start} to {stop} are out of range: from 0 to {config.num_embeddings}"
            )
        shape = stop - start, config.embedding_dim
        weights = torch.zeros(shape, dtype=torch.float32, device=self.statistics.device)
        for placed, table in zip(self.placed, self._tables(), strict=True):
            if placed.table == index:
                assert table.part is not None
                rows, first = table.part.run(start, stop)
                columns = slice(placed.column, placed.column + placed.dim)
                weights[rows.to(weights.device), columns] = table.weight_slice(
                    first, first + rows.numel()
                )
        # Bits, to which others add zero: sums of numbers would lose the sign of zeros.
        self.ranks.sum(weights.view(torch.int32))
        return weights

    def _number(self, index: int) -> int:
        """The table's number, of one that may be counted from the end."""
        count = len(self._configs)
        if not is_whole(index) or not -count <= index < count:
            raise IndexError(f"there is no table {index!r}: the module has {count}")
        return range(count)[index]

    def load_weights(self, index: int, weights: Tensor, start: int = 0) -> None:
        """Round FP32 rows of a whole table to nearest into its parts here; drop cached copies.

        Called with the same on all ranks; nothing is communicated.

        Args:
            index: The table.
            weights: FP32 ``(count, embedding_dim)``.
            start: First row (default: 0).

        Raises:
            IndexError: There is no such table.
            ValueError: The rows do not fit.
        """
        index = self._number(index)
        config = self._configs[index]
        dim, rows = config.embedding_dim, config.num_embeddings
        if weights.dim() != 2 or weights.shape[1] != dim or weights.dtype != torch.float32:
            raise ValueError(
                f"weights have shape {tuple(weights.shape)} and dtype {weights.dtype}: expected "
                f"FP32 (count, {dim})"
            )
        if not 0 <= start <= start + weights.shape[0] <= rows:
            raise ValueError(
                f"{weights.shape[0]} rows from row {start} on do not fit into a table of {rows}"
            )
        for placed, table in zip(self.placed, self._tables(), strict=True):
            if placed.table == index:
                assert table.part is not None
                own, first = table.part.run(start, start + weights.shape[0])
                columns = slice(placed.column, placed.column + placed.dim)
                table.load(weights[own.to(weights.device), columns], first)

    # ------------------------------------------------------------------------------- state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.mark.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.mark.is_meta:
            self.mark.fill_(self.ranks.rank)
        return self

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        """The state for ``torch.distributed.checkpoint``, of the same meaning on any mesh.

        Split tables are DTensors of the whole; others are plain tensors on the rank that has them.
        See :mod:`.shard_state` for their shapes.
        """
        return super().state_dict(*arguments, **named)

    def unsharded(self) -> CachedEmbeddingBags:
        """A copy for one process without a mesh: same rows, caches, seed and number of updates.

        Raises:
            RuntimeError: Other ranks have some of the rows, or a table is split by columns. (Load a
                checkpoint into a module with ``mesh=None`` first.)
        """
        if self.ranks.size > 1:
            raise RuntimeError(
                f"{self.ranks.size} ranks share the rows: save them by torch.distributed.checkpoint"
                " and load them into a module with mesh=None"
            )
        if len(self.placed) > len(self._configs):
            raise RuntimeError(
                "a table is split by columns, and its parts are tables of their own: unsharded() "
                "would have to round them again"
            )
        whole = CachedEmbeddingBags(
            self._configs,
            0,
            features=self._features,
            mode=self.mode,
            stacked=self.stacked,
            seed=self.seed,
            device="meta",
        ).to_empty(device=self.statistics.device)
        state: dict[str, Any] = {"_extra_state": self.get_extra_state()}
        for i, table in enumerate(self._tables()):
            for name, tensor in table.state_dict().items():
                rows = name in ("table.codes", "counts")
                state[f"tables.{i}.{name}"] = (
                    tensor[: self._configs[i].num_embeddings] if rows else tensor
                )
        whole.load_state_dict(state)
        return whole

    def save_rows(self, rows: Tensor, tensor: Tensor) -> Tensor | None:
        """What an optimizer keeps for each row of a table, as a checkpoint has it.

        Args:
            rows: The stored rows of a part.
            tensor: ``(rows, ...)``.

        Returns:
            The tensor; ``None`` on ranks that have none of the rows of a part that is not split.
        """
        p = next(p for p, codes in enumerate(self._codes()) if codes is rows)
        placed, table = self.placed[p], self._tables()[p]
        if placed.rank not in (None, self.ranks.rank):
            return None
        return save_rows(self.ranks, placed, table, tensor)

    def load_rows(self, rows: Tensor, saved: Tensor | None, own: Tensor) -> Tensor:
        """What this rank has of what :meth:`save_rows` has made, or one process kept.

        Args:
            rows: The stored rows of a part.
            saved: What was saved.
            own: What there is now.
        """
        p = next(p for p, codes in enumerate(self._codes()) if codes is rows)
        if self.placed[p].rank not in (None, self.ranks.rank):
            return own
        return own if saved is None else load_rows(self._tables()[p], saved, own)

    # As torch calls it; the last of the others collects errors.
    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        assert isinstance(state_dict, dict)
        for p, (placed, table) in enumerate(zip(self.placed, self._tables(), strict=True)):
            others[-1].extend(load_part(placed, table, state_dict, f"{prefix}tables.{p}."))
        if others[-1]:
            for table in self._tables():
                table.refuse()
            return
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return (
            f"rank {self.ranks.rank} of {self.ranks.size}, mode={self.mode!r}, wire={self.wire!r}"
        )


def _save_parts(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, _: dict[str, Any]
) -> None:
    assert isinstance(module, ShardedCachedEmbeddingBags)
    for p, (placed, table) in enumerate(zip(module.placed, module.tables, strict=True)):
        assert isinstance(table, CachedTable)
        save_part(module.ranks, placed, table, state, f"{prefix}tables.{p}.")


class _Rows(torch.autograd.Function):
    """Stands for the rows on this rank in a graph: its backward pass updates them.

    A node of its own, as in :mod:`.cached_lookup`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchored: Tensor,
        module: ShardedCachedEmbeddingBags,
        exchange: Exchange,
        sent: Sequence[bool],
        late: Tensor | None,
    ) -> Tensor:
        ctx.module, ctx.exchange, ctx.sent, ctx.late = module, exchange, sent, late
        dims = dict(zip(exchange.slots.parts, exchange.slots.dims, strict=True))
        count = sum(
            (part.bag_ends.numel() - 1) * dims.get(p, 0)
            for p, part in enumerate(exchange.parts)
            if sent[p]
        )
        # One number, which takes the shape of the gradient.
        return anchored.new_empty(()).expand(count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        if look_ahead.is_under_way():
            return (None,) * 5
        ctx.module._update_parts(ctx.exchange, ctx.sent, grad.contiguous())
        if ctx.late is not None:
            ctx.module.statistics.add_(ctx.late)
        return (None,) * 5


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor | None,
        weights: Tensor | None,
        module: ShardedCachedEmbeddingBags,
        exchange: Exchange,
        sent: Sequence[bool],
        statistics: Tensor,
    ) -> Tensor:
        ctx.module, ctx.exchange, ctx.sent = module, exchange, sent
        ctx.count = 0 if weights is None else weights.numel()
        return module._sums(exchange, statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows, grad_weights = ctx.needs_input_grad[:2]
        ctx.module._check_backward(ctx.exchange)
        parts = ctx.module._gradients(ctx.exchange, grad.contiguous(), ctx.sent)
        of_weights = None
        if grad_weights:
            of_weights = ctx.module._weights(ctx.exchange, parts, ctx.count)
        of_rows = torch.cat([part.flatten() for part in parts]) if grad_rows else None
        return of_rows, of_weights, *(None,) * 4

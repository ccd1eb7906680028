"""Embedding bags over narrow rows with an FP32 cache that update themselves: one table or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ..numerics.int_rows import RowRounding
from ..ops.embedding.job import Policy
from ..ops.graph_breaks import between_graphs
from .cached_lookup import CachedLookup, check_weights, integers
from .cached_table import CachedTable, EmbeddingTable, Hash
from .row_table import Storage

Mode = Literal["sum", "mean"]

_MODES = get_args(Mode)


class CachedEmbeddingBag(CachedLookup):
    """``torch.nn.EmbeddingBag`` with narrow rows, and the most used ones in an FP32 cache.

    "Mixed-Precision Embedding Using a Cache", section 3 and Algorithms 1 and 2. A lookup returns
    the cached row where there is one, else the decoded narrow row. In training, the module updates
    the rows of a batch in its own backward pass, in FP32; then a row goes to the cache or is
    rounded back into the table. There is no gradient tensor. Rows change only when a backward pass
    runs: two forward passes before it see the same rows. In ``eval()`` and under ``no_grad``
    nothing changes, not even the cache.

    ::

        bag = CachedEmbeddingBag(num_rows, 64, storage="int4", cache_fraction=0.01)
        optimizer = optim.RowAdagrad(bag, lr=0.01)
        loss(bag(values, offsets)).backward()

    Rows are initialised uniformly in ``[-1 / sqrt(rows), 1 / sqrt(rows))``, as in DLRM, and rounded
    to nearest; :meth:`load_weights` loads others. Updates do not depend on the number of threads.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Numbers per row.
        storage: Format of the rows, see :class:`EmbeddingTable` (default: ``"int8"``).
        cache_fraction: Cached rows as a share of all rows (default: 0.05).
        policy: Eviction policy, ``"lfu"`` or ``"lru"`` (default: ``"lfu"``).
        ways: Rows per set of the cache (default: 32).
        mode: ``"sum"`` or ``"mean"`` over a bag, or ``None`` for one output per row number
            (default: ``"sum"``).
        rounding: ``"stochastic"`` or ``"nearest"`` (default: ``"stochastic"``).
        hash: ``"modulo"`` or ``"mixed"`` (default: ``"modulo"``).
        include_last_offset: ``offsets`` has one more entry, the end of the last bag (default:
            ``False``).
        seed: Seed of the initial rows and of rounding; ``None`` follows ``torch.manual_seed``
            (default: ``None``).
        device: Device of the table (default: torch's).

    Attributes:
        table: The table and its cache, see :class:`.cached_table.CachedTable`.
        hit_rate: Share of the lookups in training that the cache served.
        evictions: Rows evicted from the cache.
        resident_rows: Rows in the cache.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        storage: Storage = "int8",
        cache_fraction: float = 0.05,
        policy: Policy = "lfu",
        ways: int = 32,
        mode: Mode | None = "sum",
        *,
        rounding: RowRounding = "stochastic",
        hash: Hash = "modulo",
        include_last_offset: bool = False,
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_mode(mode, or_none=True)
        if mode is None and include_last_offset:
            raise ValueError("include_last_offset goes with bags: mode=None has none")
        config = EmbeddingTable(
            num_embeddings, embedding_dim, storage, cache_fraction, policy, ways, rounding, hash
        )
        super().__init__([config], [0], seed, device)
        self.mode, self.include_last_offset = mode, include_last_offset

    @property
    def table(self) -> CachedTable:
        """The table and its cache."""
        return self._tables()[0]

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return self.table.config.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Numbers per row."""
        return self.table.config.embedding_dim

    # Row numbers are checked, and rows updated, outside compiled graphs.
    @between_graphs
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up bags of rows.

        Args:
            input: int32 or int64 row numbers: ``(count,)`` with ``offsets``, or ``(bags, length)``;
                with ``mode=None`` any shape.
            offsets: int32 or int64 ``(bags,)``, the start of each bag; with
                ``include_last_offset`` one entry more.
            per_sample_weights: FP32 factors of the rows, of the shape of ``input``; for
                ``mode="sum"``. Their gradient is computed from the rows at the time of the backward
                pass.

        Returns:
            FP32 ``(bags, embedding_dim)``, zeros for an empty bag; with ``mode=None``
            ``(*input.shape, embedding_dim)``.

        Raises:
            ValueError: A shape or dtype does not fit, or offsets decrease or reach too far.
            IndexError: A row number is out of range.
        """
        check_mode(self.mode, or_none=True)
        check_weights(per_sample_weights, input, self.mode)
        if self.mode is None:
            if offsets is not None:
                raise ValueError("offsets are given, and mode=None has no bags: leave them out")
            values = integers("input", input, tuple(range(input.dim() + 1))).reshape(-1)
            bounds = torch.arange(values.numel() + 1, device=values.device)
            rows = self._lookup(values, bounds, None)
            return rows.view(*input.shape, self.embedding_dim)
        values, bounds = self._bags(input, offsets)
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        out = self._lookup(values, bounds, weights)
        if self.mode == "mean":
            out = out / bounds.diff().clamp(min=1).unsqueeze(1)
        return out

    def _bags(self, input: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        values = integers("input", input, (1, 2))
        if values.dim() == 2:
            if offsets is not None:
                raise ValueError(
                    "offsets are given, and a 2-D input has one bag per row: omit them"
                )
            bags, length = values.shape
            bounds = torch.arange(bags + 1, device=values.device) * length
            return values.reshape(-1), bounds
        if offsets is None:
            raise ValueError("a 1-D input needs offsets, the start of each bag")
        offsets = integers("offsets", offsets)
        if self.include_last_offset:
            if offsets.numel() < 1:
                raise ValueError("offsets are empty: include_last_offset needs at least one")
        else:
            offsets = torch.cat((offsets, offsets.new_full((1,), values.numel())))
        return values, offsets

    def access_counts(self) -> Tensor:
        """Lookups of each row in training so far: int32 ``(num_embeddings,)``.

        Raises:
            RuntimeError: Only the policy ``"lfu"`` with a cache counts them.
        """
        return self.table.access_counts()

    def weight_fp32(self, start: int = 0, stop: int | None = None) -> Tensor:
        """FP32 rows ``start`` to ``stop``, cached rows as they are in the cache (default: all)."""
        return self.table.weight_slice(start, self.num_embeddings if stop is None else stop)

    def load_weights(self, weights: Tensor, start: int = 0) -> None:
        """Round FP32 rows to nearest into the table; their cached copies are dropped.

        Called slice by slice, it fills a table too large for an FP32 copy.

        Args:
            weights: FP32 ``(count, embedding_dim)``.
            start: First row (default: 0).

        Raises:
            ValueError: The rows do not fit.
        """
        self.table.load(weights, start)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"


def check_mode(mode: str | None, *, or_none: bool = False) -> None:
    """Raise ValueError if a way to pool bags, which may be set later too, is unknown.

    Args:
        mode: The way.
        or_none: Whether there may be none (default: ``False``).
    """
    if mode not in _MODES and not (or_none and mode is None):
        choices = "'sum', 'mean' or None" if or_none else "'sum' or 'mean'"
        raise ValueError(f"mode={mode!r} is unknown: use {choices}")


def bag_configs(
    tables: Sequence[EmbeddingTable],
    narrow_above: int,
    features: Sequence[int] | None,
    mode: str,
    stacked: bool,
) -> tuple[list[EmbeddingTable], list[int], list[int]]:
    """Tables as they are kept, the table of each feature, and its dim.

    The arguments are those of :class:`CachedEmbeddingBags`.

    Raises:
        ValueError: An argument is out of range, or dims differ that must agree.
    """
    if not tables:
        raise ValueError("tables is empty: pass at least one EmbeddingTable")
    check_mode(mode)
    features = list(range(len(tables))) if features is None else list(features)
    if not features or not all(0 <= t < len(tables) for t in features):
        raise ValueError(f"features={features} must name tables from 0 to {len(tables) - 1}")
    dims = [tables[t].embedding_dim for t in features]
    if stacked and len(set(dims)) > 1:
        raise ValueError(f"stacked=True needs equal dims, the features have {dims}")
    configs = [
        replace(config, storage="fp32", cache_fraction=0.0)
        if config.num_embeddings <= narrow_above
        else config
        for config in tables
    ]
    return configs, features, dims


def bag_bounds(features: int, lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Where the bags of so many features begin, and the end: int64.

    Raises:
        ValueError: Not one of the two is given, or it does not fit.
    """
    if (lengths is None) == (offsets is None):
        raise ValueError("pass either lengths or offsets of the bags")
    if lengths is not None:
        lengths = integers("lengths", lengths)
        if lengths.numel() % features:
            raise ValueError(
                f"{lengths.numel()} lengths do not divide into the bags of {features} features"
            )
        # The operator of an exported program checks the offsets when it runs, and so do kernels of
        # GPUs, for which the host would wait.
        if not (torch.compiler.is_exporting() or lengths.is_cuda) and bool((lengths < 0).any()):
            raise ValueError(f"lengths have a negative entry: {int(lengths.min())}")
        return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    assert offsets is not None
    offsets = integers("offsets", offsets)
    if offsets.numel() < 1 or (offsets.numel() - 1) % features:
        raise ValueError(
            f"{offsets.numel()} offsets do not divide into the bags of {features} features: "
            "expected features * batch + 1"
        )
    return offsets


def bag_means(sums: Tensor, bounds: Tensor, dims: Sequence[int]) -> Tensor:
    """Sums of bags over the bags' sizes; an empty bag's are zeros.

    Args:
        sums: FP32 ``(batch, sum of dims)``.
        bounds: Where bags begin, as of :func:`bag_bounds`.
        dims: Of each feature.
    """
    sizes = bounds.diff().clamp(min=1).view(len(dims), -1, 1)
    # Dims from the host: a tensor of them would be copied to a GPU, which the host would wait for.
    parts = [size.expand(-1, dim) for size, dim in zip(sizes, dims, strict=True)]
    return sums / torch.cat(parts, dim=1)


class CachedEmbeddingBags(CachedLookup):
    """The embedding tables of a recommendation model; see :class:`CachedEmbeddingBag`.

    ::

        bags = CachedEmbeddingBags([EmbeddingTable(rows, 16, "int8") for rows in sizes])
        optimizer = optim.RowAdagrad(bags, lr=0.01)
        vectors = bags(values, lengths)             # (batch, len(sizes) * 16)

    Args:
        tables: How each table is stored, cached and rounded.
        narrow_above: Tables of at most this many rows stay in FP32 without a cache, as in the paper
            (default: 1000).
        features: The table of each feature; several may share one. ``None`` for one feature per
            table, in order (default: ``None``).
        mode: ``"sum"`` or ``"mean"`` over a bag (default: ``"sum"``).
        stacked: The output is ``(batch, features, dim)``; all dims must agree (default: ``False``).
        seed: Seed of the initial rows and of rounding; ``None`` follows ``torch.manual_seed``
            (default: ``None``).
        device: Device of the tables (default: torch's).

    Raises:
        ValueError: An argument is out of range, or dims differ that must agree.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        narrow_above: int = 1000,
        *,
        features: Sequence[int] | None = None,
        mode: Mode = "sum",
        stacked: bool = False,
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        configs, features, dims = bag_configs(tables, narrow_above, features, mode, stacked)
        super().__init__(configs, features, seed, device)
        self.mode, self.stacked, self._dims = mode, stacked, dims

    @property
    def features(self) -> list[int]:
        """The table of each feature."""
        return list(self._features)

    # Row numbers are checked, and rows updated, outside compiled graphs.
    @between_graphs
    def forward(
        self,
        values: Tensor,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up the bags of all features; the layout is TorchRec's ``KeyedJaggedTensor``.

        Args:
            values: int32 or int64 ``(count,)`` row numbers: those of the first feature, bag by bag,
                then those of the second, and so on.
            lengths: int32 or int64 ``(features * batch,)``: length of each bag.
            offsets: int32 or int64 ``(features * batch + 1,)``: start of each bag, and the end;
                instead of ``lengths``.
            per_sample_weights: FP32 ``(count,)`` factors of the rows; for ``mode="sum"``. Their
                gradient is computed from the rows at the time of the backward pass.

        Returns:
            FP32 ``(batch, sum of the features' dims)``, or ``(batch, features, dim)`` if
            ``stacked``; zeros for an empty bag.

        Raises:
            ValueError: A shape or dtype does not fit, lengths are negative, or offsets decrease or
                reach too far.
            IndexError: A row number is out of range.
        """
        values = integers("values", values)
        check_mode(self.mode)
        check_weights(per_sample_weights, values, self.mode)
        bounds = bag_bounds(len(self._features), lengths, offsets)
        out = self._lookup(values, bounds, per_sample_weights)
        if self.mode == "mean":
            out = bag_means(out, bounds, self._dims)
        shape = out.shape[0], len(self._dims), self._dims[0]
        return out.view(shape) if self.stacked else out

    def table(self, index: int) -> CachedTable:
        """A table and its cache."""
        return self._tables()[index]

    def access_counts(self, index: int) -> Tensor:
        """Lookups of each row of a table in training so far: int32 ``(rows,)``.

        Raises:
            RuntimeError: Only the policy ``"lfu"`` with a cache counts them.
        """
        return self.table(index).access_counts()

    def weight_fp32(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """FP32 rows of a table, cached rows as they are in the cache (default: all)."""
        table = self.table(index)
        return table.weight_slice(start, table.table.rows if stop is None else stop)

    def load_weights(self, index: int, weights: Tensor, start: int = 0) -> None:
        """Round FP32 rows to nearest into a table; their cached copies are dropped.

        Raises:
            ValueError: The rows do not fit.
        """
        self.table(index).load(weights, start)

"""Many embedding tables of narrow rows with FP32 caches, looked up in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from .bags import check_weights, integers
from .cached_embedding_bag import Mode
from .cached_table import CachedTable, EmbeddingTable
from .cached_tables import CachedTables


class CachedEmbeddingBags(CachedTables):
    """The embedding tables of a recommendation model; see :class:`CachedEmbeddingBag`.

    ::

        bags = CachedEmbeddingBags([EmbeddingTable(rows, 16, "int8") for rows in sizes])
        optimizer = optim.RowAdagrad(bags, lr=0.01)
        vectors = bags(values, lengths)             # (batch, len(sizes) * 16)

    Args:
        tables: How each table is stored, cached and rounded.
        narrow_above: Tables of at most so many rows stay in FP32 without a cache, as in the paper
            (default: 1000).
        features: The table of each feature; several may share one. ``None`` for a feature a table,
            in their order (default: ``None``).
        mode: ``"sum"`` or ``"mean"`` over a bag (default: ``"sum"``).
        stacked: The output is ``(batch, features, dim)``; all dims must agree (default: ``False``).
        seed: Of the initial rows and of rounding; ``None`` follows ``torch.manual_seed`` (default:
            ``None``).
        device: Where the tables lie (default: torch's).

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
        if not tables:
            raise ValueError("there are no tables: give at least one")
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} is unknown: use 'sum' or 'mean'")
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
        super().__init__(configs, features, seed, device)
        self.mode, self.stacked, self._dims = mode, stacked, dims

    @property
    def features(self) -> list[int]:
        """The table of each feature."""
        return list(self._features)

    # Row numbers are checked and rows updated outside of compiled graphs.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
            lengths: int32 or int64 ``(features * batch,)``: row numbers of each bag.
            offsets: int32 or int64 ``(features * batch + 1,)``: where each bag begins, and the end;
                instead of ``lengths``.
            per_sample_weights: FP32 ``(count,)``, factors of the rows; for ``mode="sum"``. Their
                gradient is computed with the rows at the time of the backward pass.

        Returns:
            FP32 ``(batch, sum of the features' dims)``, or ``(batch, features, dim)`` if
            ``stacked``; zeros for an empty bag.

        Raises:
            ValueError: A shape or dtype does not fit, lengths are negative, or offsets decrease or
                reach too far.
            IndexError: A row number is out of range.
        """
        values = integers("values", values)
        check_weights(per_sample_weights, values, self.mode)
        bounds = self._bounds(lengths, offsets)
        out = self._lookup(values, bounds, per_sample_weights)
        if self.mode == "mean":
            sizes = bounds.diff().clamp(min=1).view(len(self._features), -1)
            dims = torch.tensor(self._dims, device=values.device)
            out = out / sizes.t().repeat_interleave(dims, dim=1)
        return out.view(out.shape[0], len(self._dims), -1) if self.stacked else out

    def _bounds(self, lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
        if (lengths is None) == (offsets is None):
            raise ValueError("give lengths or offsets of the bags, one of them")
        features = len(self._features)
        if lengths is not None:
            lengths = integers("lengths", lengths)
            if lengths.numel() % features:
                raise ValueError(
                    f"{lengths.numel()} lengths do not divide into the bags of {features} features"
                )
            if bool((lengths < 0).any()):
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
        """Round FP32 rows to nearest into a table; what was cached of them goes.

        Raises:
            ValueError: The rows do not fit.
        """
        self.table(index).load(weights, start)

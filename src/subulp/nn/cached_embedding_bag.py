"""One embedding table of narrow rows with an FP32 cache, which updates itself."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..numerics.int_rows import RowRounding
from ..ops.embedding.job import Policy
from .bags import check_weights, integers
from .cached_table import CachedTable, EmbeddingTable, Hash
from .cached_tables import CachedTables
from .row_table import Storage

Mode = Literal["sum", "mean"]


class CachedEmbeddingBag(CachedTables):
    """``torch.nn.EmbeddingBag`` in narrow rows, the most used ones in an FP32 cache.

    "Mixed-Precision Embedding Using a Cache", section 3 and Algorithms 1 and 2. A lookup returns
    the cached row where there is one, else the decoded narrow row. In training the module updates
    the rows of a batch in its own backward pass: in FP32, then the row goes to the cache or is
    rounded back into the table. There is no gradient tensor. Every backward pass updates when it
    runs: of two forward passes before it, both see the rows as they were. In ``eval()`` and under
    ``no_grad`` nothing changes, the cache included.

    ::

        bag = CachedEmbeddingBag(num_rows, 64, storage="int4", cache_fraction=0.01)
        optimizer = optim.RowAdagrad(bag, lr=0.01)
        loss(bag(values, offsets)).backward()

    Rows begin uniform in ``[-1 / sqrt(rows), 1 / sqrt(rows))``, as in DLRM, rounded to nearest; see
    :meth:`load_weights` for others. Updates are the same for any number of threads.

    Args:
        num_embeddings: Rows.
        embedding_dim: Numbers of a row.
        storage: See :class:`EmbeddingTable`, and so are the next five (default: ``"int8"``).
        cache_fraction: Cached rows as a share of the rows (default: 0.05).
        policy: ``"lfu"`` or ``"lru"`` (default: ``"lfu"``).
        ways: Rows of a set (default: 32).
        mode: ``"sum"`` or ``"mean"`` over a bag, or ``None`` for one output a row number (default:
            ``"sum"``).
        rounding: ``"stochastic"`` or ``"nearest"`` (default: ``"stochastic"``).
        hash: ``"modulo"`` or ``"mixed"`` (default: ``"modulo"``).
        include_last_offset: ``offsets`` have one more entry, the end of the last bag (default:
            ``False``).
        seed: Of the initial rows and of rounding; ``None`` follows ``torch.manual_seed`` (default:
            ``None``).
        device: Where the table lies (default: torch's).

    Attributes:
        table: The table and its cache, see :class:`.cached_table.CachedTable`.
        hit_rate: Share of the lookups in training that the cache served.
        evictions: Rows that had to leave the cache.
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
        if mode is not None and mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} is unknown: use 'sum', 'mean' or None")
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
        """Rows."""
        return self.table.config.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Numbers of a row."""
        return self.table.config.embedding_dim

    # Row numbers are checked and rows updated outside of compiled graphs.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
            offsets: int32 or int64 ``(bags,)``: where each bag begins; one entry more with
                ``include_last_offset``.
            per_sample_weights: FP32 of the shape of ``input``, factors of the rows; for
                ``mode="sum"``. Their gradient is computed with the rows at the time of the backward
                pass.

        Returns:
            FP32 ``(bags, embedding_dim)``, zeros for an empty bag; with ``mode=None``
            ``(*input.shape, embedding_dim)``.

        Raises:
            ValueError: A shape or dtype does not fit, or offsets decrease or reach too far.
            IndexError: A row number is out of range.
        """
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
                raise ValueError("offsets are given, and a 2-D input has a bag a row: omit them")
            bags, length = values.shape
            bounds = torch.arange(bags + 1, device=values.device) * length
            return values.reshape(-1), bounds
        if offsets is None:
            raise ValueError("a 1-D input needs offsets: where each bag begins")
        offsets = integers("offsets", offsets)
        if self.include_last_offset:
            if offsets.numel() < 1:
                raise ValueError("offsets are empty: include_last_offset needs at least one")
        else:
            offsets = torch.cat((offsets, offsets.new_tensor([values.numel()])))
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
        """Round FP32 rows to nearest into the table; what was cached of them goes.

        Slice by slice this fills a table of which no FP32 copy could exist.

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

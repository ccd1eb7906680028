"""A batch of a classifier, which on a mesh all ranks bring a part of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .ranks import Ranks
from .row_table import RowTable
from .top_k import TopK

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of embeddings, by the number that ranks compare; others come after these."""


@dataclass(frozen=True)
class HeadBatch:
    """The embeddings of all ranks and their labels.

    Attributes:
        x: FP32 ``(batch, dim)``, the ranks' parts in their order.
        instances: int64 ``(pairs,)``, instances of positive pairs, counted over all ranks.
        rows: Their rows of the whole table, ascending; no pair is there twice.
        counts: Number of instances of each rank; ``None`` in one process.
        trains: Whether the rows are to be updated.
        gradient: Whether the gradient of ``x`` is wanted, on any rank.
    """

    x: Tensor
    instances: Tensor
    rows: Tensor
    counts: Sequence[int] | None
    trains: bool
    gradient: bool


def dtype_number(x: Tensor) -> int:
    """The number of a dtype, in :data:`DTYPES` or after."""
    return DTYPES.index(x.dtype) if x.dtype in DTYPES else len(DTYPES)


def wide(embeddings: Tensor) -> Tensor:
    """Embeddings in FP32, with the signs that they have."""
    return embeddings.detach().float().resolve_neg()


def gathered(ranks: Ranks | None, embeddings: Tensor, counts: Sequence[int]) -> Tensor:
    """The embeddings of all ranks in FP32; they travel as they are."""
    if ranks is None:
        return wide(embeddings)
    return wide(ranks.gather(embeddings.detach().resolve_neg(), counts))


def new_batch(
    ranks: Ranks | None,
    embeddings: Tensor,
    pairs: tuple[Tensor, Tensor],
    sizes: Sequence[Sequence[int]],
    flags: dict[str, Any],
) -> HeadBatch:
    """The batch of all ranks.

    Args:
        ranks: The ranks; ``None`` in one process.
        embeddings: This rank's ``(count, dim)``.
        pairs: Instances and rows of this rank's positive pairs, int64.
        sizes: Number of instances and of pairs of each rank.
        flags: The last two fields of :class:`HeadBatch`.
    """
    counts = [count for count, *_ in sizes]
    total = max(1, sum(counts))
    instances, rows = pairs
    if ranks is None:
        codes = rows * total + instances
    else:
        before = sum(counts[: ranks.rank])
        codes = ranks.gather(rows * total + instances + before, [count for _, count, *_ in sizes])
    codes = torch.unique(codes)
    x = gathered(ranks, embeddings, counts)
    return HeadBatch(x, codes % total, codes // total, None if ranks is None else counts, **flags)


def merged(ranks: Ranks, best: TopK, counts: Sequence[int], k: int) -> TopK:
    """The k highest scores of this rank's instances, of those that all ranks have found.

    Args:
        ranks: The ranks.
        best: What this rank's labels give for the instances of all ranks.
        counts: Number of instances of each rank.
        k: Number of scores to keep.
    """
    own = counts[ranks.rank]
    expected = [own] * ranks.size
    scores = ranks.exchange(best.scores, counts, expected).view(ranks.size, own, k)
    labels = ranks.exchange(best.labels, counts, expected).view(ranks.size, own, k)
    found = TopK(own, k, best.scores.device)
    for theirs in zip(scores, labels, strict=True):
        found.merge(*theirs)
    return found


def weights_of(table: RowTable, ranks: Ranks, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """FP32 weights of rows of the whole table, remainders added: ``(counts[rank], dim)``.

    Args:
        table: The rows.
        ranks: Those that share it.
        rows: What this rank wants, int64 ``(counts[rank],)``.
        counts: How many rows each rank wants.
    """
    asked = ranks.gather(rows, counts).split(list(counts))  # type: ignore[no-untyped-call]
    mine = [theirs[table.shards.owners(theirs) == ranks.rank] for theirs in asked]
    owners = table.shards.owners(rows)
    received = ranks.exchange(
        table.gather(table.shards.places(ranks.rank, torch.cat(mine))),
        [theirs.shape[0] for theirs in mine],
        torch.bincount(owners, minlength=ranks.size).tolist(),
    )
    found = torch.empty_like(received)
    found[owners.argsort(stable=True)] = received
    return found

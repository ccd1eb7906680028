"""Tables of narrow rows with an FP32 cache: bags looked up, and updated in the backward pass.

The operators, for compiled and exported graphs; each one is a function of :mod:`.calls`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import calls
from .job import Job, Lookups, Table, TableUpdate

__all__ = [
    "Job",
    "Lookups",
    "Table",
    "TableUpdate",
    "embedding_pool",
    "embedding_update",
    "embedding_weight_grad",
]


def make_tables(
    codes: Sequence[Tensor],
    caches: Sequence[Tensor],
    tags: Sequence[Tensor],
    bits: Sequence[int],
    ways: Sequence[int],
    mixed: Sequence[bool],
) -> list[Table]:
    """Tables from the lists that a schema takes."""
    return [Table(*each) for each in zip(codes, caches, tags, bits, ways, mixed, strict=True)]


@torch.library.custom_op("subulp::embedding_pool", mutates_args=())
def embedding_pool(
    codes: Sequence[Tensor],
    caches: Sequence[Tensor],
    tags: Sequence[Tensor],
    bits: Sequence[int],
    ways: Sequence[int],
    mixed: Sequence[bool],
    features: Sequence[int],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sums of bags of rows of many tables.

    With ``fetch`` the FP32 row in the cache if it is resident, else the decoded one of the table,
    it equals, for each feature ``f`` and bag ``b``, in this order and in FP32::

        out[b, columns of f] = sum(fetch(table of f, values[k]) * weights[k] for k in the bag)

    Args:
        codes: Stored rows of each table; for this and the next five see :class:`.job.Table`.
        caches: Cached rows.
        tags: Which rows are cached.
        bits: Bits of an integer; 0 for floating-point rows.
        ways: Rows of a set.
        mixed: Whether a hash chooses the sets.
        features: Table of each feature; for this and the next three see :class:`.job.Lookups`.
        values: Row numbers.
        offsets: Where each bag begins.
        weights: Factor of each row, or ``None``.

    Returns:
        FP32 ``(batch, sum of the features' dims)``; and int64 ``(tables, 2)``: lookups, and cache
        hits.

    Raises:
        ValueError: Shapes or dtypes do not fit, or offsets decrease or reach too far.
        IndexError: A row number is out of range.
    """
    tables = make_tables(codes, caches, tags, bits, ways, mixed)
    statistics = torch.zeros(len(tables), 2, dtype=torch.int64, device=values.device)
    out = calls.pool(tables, Lookups(features, values, offsets, weights), statistics)
    return out, statistics


@embedding_pool.register_fake
def _(
    codes: Sequence[Tensor],
    caches: Sequence[Tensor],
    tags: Sequence[Tensor],
    bits: Sequence[int],
    ways: Sequence[int],
    mixed: Sequence[bool],
    features: Sequence[int],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch = (offsets.shape[0] - 1) // len(features)
    width = sum(caches[t].shape[1] for t in features)
    out = torch.empty(batch, width, dtype=torch.float32, device=values.device)
    return out, torch.empty(len(codes), 2, dtype=torch.int64, device=values.device)


@torch.library.custom_op("subulp::embedding_weight_grad", mutates_args=())
def embedding_weight_grad(
    codes: Sequence[Tensor],
    caches: Sequence[Tensor],
    tags: Sequence[Tensor],
    bits: Sequence[int],
    ways: Sequence[int],
    mixed: Sequence[bool],
    features: Sequence[int],
    values: Tensor,
    offsets: Tensor,
    grad: Tensor,
) -> Tensor:
    """Gradient of the weights of :func:`embedding_pool`.

    The product of a bag's gradient and the fetched row, summed in the order of
    :func:`.rows.row_sum`; 0 for values that belong to no bag.

    Args:
        codes: Stored rows of each table; this and the next eight are those of
            :func:`embedding_pool`.
        caches: Cached rows.
        tags: Which rows are cached.
        bits: Bits of an integer.
        ways: Rows of a set.
        mixed: Whether a hash chooses the sets.
        features: Table of each feature.
        values: Row numbers.
        offsets: Where each bag begins.
        grad: FP32 ``(batch, sum of the features' dims)``, contiguous.

    Returns:
        FP32 tensor of the shape of ``values``.

    Raises:
        ValueError: Shapes or dtypes do not fit, or offsets decrease or reach too far.
        IndexError: A row number is out of range.
    """
    tables = make_tables(codes, caches, tags, bits, ways, mixed)
    return calls.weight_grad(tables, Lookups(features, values, offsets, None), grad)


@embedding_weight_grad.register_fake
def _(
    codes: Sequence[Tensor],
    caches: Sequence[Tensor],
    tags: Sequence[Tensor],
    bits: Sequence[int],
    ways: Sequence[int],
    mixed: Sequence[bool],
    features: Sequence[int],
    values: Tensor,
    offsets: Tensor,
    grad: Tensor,
) -> Tensor:
    return torch.empty(values.shape, dtype=torch.float32, device=values.device)


@torch.library.custom_op(
    "subulp::embedding_update",
    mutates_args=(
        "codes",
        "caches",
        "tags",
        "counts",
        "stamps",
        "floors",
        "accumulators",
        "evictions",
    ),
)
def embedding_update(
    codes: Sequence[Tensor],
    caches: Sequence[Tensor],
    tags: Sequence[Tensor],
    counts: Sequence[Tensor],
    stamps: Sequence[Tensor],
    floors: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    evictions: Tensor,
    bits: Sequence[int],
    ways: Sequence[int],
    mixed: Sequence[bool],
    stochastic: Sequence[bool],
    streams: Sequence[int],
    lrs: Sequence[float],
    weight_decays: Sequence[float],
    eps: Sequence[float],
    seed: int,
    step: int,
    features: Sequence[int],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    grad: Tensor,
) -> None:
    """One training step of the looked-up rows: "Mixed-Precision Embedding", Algorithm 2.

    In each set of a table, for every row ``i`` that was looked up, in ascending order::

        g = sum(grad[bag of k] * weights[k] for k where values[k] == i)   # see below
        count[i] += lookups of i                          # LFU; LRU: its stamp becomes the step
        x = fetch(i)
        g = g + x * weight_decay                          # unless that is 0
        x = x - g * lr                                    # SGD
        acc[i] += g * g; x = x - g * lr / (sqrt(acc[i]) + eps)            # Adagrad
        acc[i] += mean(g * g); x = x - g * (lr / (sqrt(acc[i]) + eps))    # row-wise Adagrad

    and ``x`` stays in the cache if it was there, or takes a free way of its set. If there is none,
    let ``j`` be the resident with the lowest priority (count or stamp; the first way among equals).
    If the priority of ``i`` is higher (or the policy is LRU and the cache direct-mapped), ``j`` is
    evicted: it is rounded into the table, and ``x`` takes its way. Otherwise ``x`` bypasses the
    cache and is rounded into the table. A row's gradients are summed in the order of ``k``, in
    spans of :data:`.job.GRADIENT_SPAN`, whose sums are summed in their order. A mean sums in the
    order of :func:`.rows.row_sum`. Each operation is rounded to FP32.

    Args:
        codes: Stored rows of each table. ``caches``, ``tags``, ``bits``, ``ways``, ``mixed``,
            ``features``, ``values``, ``offsets`` and ``weights`` too are those of
            :func:`embedding_pool`.
        caches: Cached rows.
        tags: Which rows are cached.
        counts: LFU's counts; for this and the next three see :class:`.job.TableUpdate`.
        stamps: LRU's time stamps.
        floors: LFU's lower bounds of a set's counts.
        accumulators: Adagrad's sums of squares.
        evictions: int64 ``(tables,)``; the number of evicted rows is added.
        bits: Bits of an integer.
        ways: Rows of a set.
        mixed: Whether a hash chooses the sets.
        stochastic: Whether rows that leave FP32 are rounded stochastically.
        streams: Philox key words.
        lrs: Learning rates.
        weight_decays: Weight decays.
        eps: Adagrad's epsilons.
        seed: Philox key word.
        step: Number of the step, from 1.
        features: Table of each feature.
        values: Row numbers.
        offsets: Where each bag begins.
        weights: Factor of each row, or ``None``.
        grad: FP32 ``(batch, sum of the features' dims)``, contiguous.

    Raises:
        ValueError: Shapes or dtypes do not fit, offsets decrease or reach too far, or a cache holds
            rows that its table does not have.
        IndexError: A row number is out of range.
        FloatingPointError: The gradient or the weights are not finite; nothing was updated.
    """
    tables = make_tables(codes, caches, tags, bits, ways, mixed)
    lookups = Lookups(features, values, offsets, weights)
    roles = (counts, stamps, floors, accumulators, stochastic, streams, lrs, weight_decays, eps)
    updates = [TableUpdate(*each) for each in zip(*roles, strict=True)]
    calls.update(tables, updates, lookups, grad, evictions, seed, step)


@embedding_update.register_fake
def _(*arguments: object, **named: object) -> None:
    """Nothing is returned, and no tensor changes its shape."""

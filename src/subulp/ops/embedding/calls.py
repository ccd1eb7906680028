"""The passes over embedding tables: arguments checked, the backend run.

The operators in :mod:`subulp.ops.embedding` are these functions with their dataclasses as lists,
for a schema has no dataclasses. Modules call them directly: see :mod:`subulp.ops` for why.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import backend
from .job import Job, Lookups, Table, TableUpdate


def pool(tables: Sequence[Table], lookups: Lookups, statistics: Tensor) -> Tensor:
    """See :func:`subulp.ops.embedding.embedding_pool`; the statistics are added."""
    _check(tables, lookups)
    job = Job("pool", tables, lookups, statistics=statistics)
    result: Tensor = backend.run("embedding", job)
    return result


def weight_grad(tables: Sequence[Table], lookups: Lookups, grad: Tensor) -> Tensor:
    """See :func:`subulp.ops.embedding.embedding_weight_grad`."""
    _check(tables, lookups, grad)
    result: Tensor = backend.run("embedding", Job("weight-grad", tables, lookups, grad))
    return result


def update(
    tables: Sequence[Table],
    updates: Sequence[TableUpdate],
    lookups: Lookups,
    grad: Tensor,
    evictions: Tensor,
    seed: int,
    step: int,
) -> None:
    """See :func:`subulp.ops.embedding.embedding_update`."""
    _check(tables, lookups, grad)
    job = Job("update", tables, lookups, grad, None, updates, evictions, seed, step)
    backend.run("embedding", job)


def _check(tables: Sequence[Table], lookups: Lookups, grad: Tensor | None = None) -> None:
    for i, table in enumerate(tables):
        if table.cache.dtype != torch.float32 or table.tags.dtype != torch.int32:
            raise ValueError(
                f"table {i} has a cache of {table.cache.dtype} and tags of {table.tags.dtype}: "
                "expected FP32 and int32; leave the dtypes of the module as they are"
            )
        if table.cache.shape[0] != table.tags.shape[0] or table.tags.shape[0] % table.ways:
            raise ValueError(
                f"table {i} has {table.cache.shape[0]} cached rows and {table.tags.shape[0]} tags: "
                f"expected whole sets of {table.ways}"
            )
    values, offsets, weights = lookups.values, lookups.offsets, lookups.weights
    if values.dtype != torch.int64 or offsets.dtype != torch.int64:
        raise ValueError(
            f"values and offsets have the dtypes {values.dtype} and {offsets.dtype}: expected int64"
        )
    features = len(lookups.features)
    if not features or (offsets.numel() - 1) % features or offsets.numel() < 1:
        raise ValueError(
            f"{offsets.numel()} offsets do not divide into the bags of {features} features: "
            "expected features * batch + 1"
        )
    if weights is not None and (weights.shape != values.shape or weights.dtype != torch.float32):
        raise ValueError(
            f"weights have shape {tuple(weights.shape)} and dtype {weights.dtype}: expected FP32 "
            f"{tuple(values.shape)}"
        )
    expected = (lookups.batch, lookups.columns(tables)[-1])
    if grad is not None and (grad.shape != expected or grad.dtype != torch.float32):
        raise ValueError(
            f"grad has shape {tuple(grad.shape)} and dtype {grad.dtype}: expected FP32 {expected}"
        )

"""The passes over embedding tables: arguments checked, the backend run.

The operators in :mod:`subulp.ops.embedding` are these functions with their dataclasses as lists,
for a schema has no dataclasses. Modules call them directly: see :mod:`subulp.ops` for why.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...numerics.int_rows import row_bytes
from .. import backend
from ..kinds import Remembered
from ..pointers import are_plain
from .job import MAX_WAYS, Job, Lookups, Table, TableUpdate, table_tensors

_WORD = 2**32

_checked: Remembered[bool] = Remembered()


def pool(tables: Sequence[Table], lookups: Lookups, statistics: Tensor) -> Tensor:
    """See :func:`subulp.ops.embedding.embedding_pool`; the statistics are added."""
    _check_tables(tables, (), lookups)
    check_lookups(lookups, len(tables))
    check_role("statistics", statistics, torch.int64, (len(tables), 2), lookups)
    job = Job("pool", tables, lookups, statistics=statistics)
    result: Tensor = backend.run("embedding", job)
    return result


def weight_grad(tables: Sequence[Table], lookups: Lookups, grad: Tensor) -> Tensor:
    """See :func:`subulp.ops.embedding.embedding_weight_grad`."""
    _check_tables(tables, (), lookups)
    check_lookups(lookups, len(tables))
    check_grad(grad, lookups, lookups.columns(tables)[-1])
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
    if len(updates) != len(tables):
        raise ValueError(f"there are {len(updates)} updates for {len(tables)} tables: one for each")
    _check_tables(tables, updates, lookups)
    check_lookups(lookups, len(tables))
    check_grad(grad, lookups, lookups.columns(tables)[-1])
    check_step(evictions, len(tables), lookups, seed, step)
    job = Job("update", tables, lookups, grad, None, updates, evictions, seed, step)
    backend.run("embedding", job)


def check_lookups(lookups: Lookups, tables: int) -> None:
    """Refuse lookups that do not fit together, or to so many tables."""
    values, offsets, weights = lookups.values, lookups.offsets, lookups.weights
    if values.dtype != torch.int64 or offsets.dtype != torch.int64:
        raise ValueError(
            f"values and offsets have the dtypes {values.dtype} and {offsets.dtype}: expected int64"
        )
    if values.dim() != 1 or offsets.dim() != 1 or offsets.device != values.device:
        raise ValueError(
            f"values and offsets have shapes {tuple(values.shape)} and {tuple(offsets.shape)} on "
            f"{values.device} and {offsets.device}: expected (count,) and (bags + 1,) on one device"
        )
    features, bounds = lookups.features, offsets.shape[0]
    if not features or (bounds - 1) % len(features) or bounds < 1:
        raise ValueError(
            f"{bounds} offsets do not divide into the bags of {len(features)} features: "
            "expected features * batch + 1"
        )
    if min(features) < 0 or max(features) >= tables:
        raise ValueError(
            f"features={list(features)} are out of range: tables from 0 to {tables - 1}"
        )
    if weights is not None:
        check_role("weights", weights, torch.float32, values.shape, lookups)


def check_grad(grad: Tensor, lookups: Lookups, width: int) -> None:
    """Refuse a gradient that is not that of so many columns."""
    check_role("grad", grad, torch.float32, (lookups.batch, width), lookups)


def check_step(evictions: Tensor, tables: int, lookups: Lookups, seed: int, step: int) -> None:
    """Refuse what else an update of so many tables takes."""
    check_role("evictions", evictions, torch.int64, (tables,), lookups)
    check_words(seed, step)


def check_words(seed: int, step: int) -> None:
    """Refuse a seed or a step that is no word of a random number's address."""
    if not (isinstance(seed, int) and 0 <= seed < _WORD and 0 < step < _WORD):
        raise ValueError(
            f"seed={seed} and step={step} are out of range: expected words of 32 bits, steps from 1"
        )


def _check_tables(
    tables: Sequence[Table], updates: Sequence[TableUpdate], lookups: Lookups
) -> None:
    """Check tables, unless their like have been: they are many, and to look at each takes time."""
    tensors = table_tensors(tables, updates)
    own = tuple((t.bits, t.ways, t.mixed, t.part) for t in tables)
    words = tuple((u.stochastic, u.stream) for u in updates)
    whose = id(tables[0].tags) if tables else 0
    key = (whose, lookups.values.device, own, words)
    if _checked.get(key, tensors):
        return
    for i, table in enumerate(tables):
        _check_table(i, table, lookups)
    if updates:
        _check_updates(tables, updates, lookups)
    # Others are refused where addresses are read, and must be looked at there each time.
    if are_plain(tensors):
        _checked.put(key, tensors, True)


def _check_table(i: int, table: Table, lookups: Lookups) -> None:
    if table.cache.dtype != torch.float32 or table.tags.dtype != torch.int32:
        raise ValueError(
            f"table {i} has a cache of {table.cache.dtype} and tags of {table.tags.dtype}: "
            "expected FP32 and int32; leave the dtypes of the module as they are"
        )
    ways, places = table.ways, table.tags.shape
    cached = tuple(table.cache.shape)
    if not 1 <= ways <= MAX_WAYS or len(cached) != 2 or not cached[1] or len(places) != 1:
        raise ValueError(
            f"table {i} has ways={ways}, a cache of shape {cached} and tags of shape "
            f"{tuple(places)}: expected 1 to {MAX_WAYS} ways, (places, dim) with a dim of 1 or "
            "more, and (places,)"
        )
    if table.cache.shape[0] != places[0] or places[0] % ways:
        raise ValueError(
            f"table {i} has {table.cache.shape[0]} cached rows and {places[0]} tags: expected "
            f"whole sets of {ways}"
        )
    width = row_bytes(table.dim, table.bits) if table.bits else table.dim
    if (
        table.codes.dim() != 2
        or table.codes.shape[1] != width
        or (table.bits and table.codes.dtype != torch.uint8)
    ):
        raise ValueError(
            f"table {i} has codes of shape {tuple(table.codes.shape)} and {table.codes.dtype}: "
            f"expected {width} numbers a row for {table.storage} and a cache of {table.dim}"
        )
    for tensor in (table.codes, table.cache, table.tags):
        if tensor.device != lookups.values.device:
            raise ValueError(
                f"table {i} lies on {tensor.device} and the row numbers on "
                f"{lookups.values.device}: move one to the other's device"
            )


def _check_updates(
    tables: Sequence[Table], updates: Sequence[TableUpdate], lookups: Lookups
) -> None:
    for i, (table, update) in enumerate(zip(tables, updates, strict=True)):
        rows, places = table.rows, table.sets * table.ways
        if not 0 <= update.stream < _WORD:
            raise ValueError(f"stream={update.stream} of table {i} is no word of 32 bits")
        for name, tensor, count in (
            ("counts", update.counts, rows),
            ("stamps", update.stamps, places),
            ("floors", update.floors, table.sets),
        ):
            if tensor.numel():
                check_role(f"{name} of table {i}", tensor, torch.int32, (count,), lookups)
        if update.counts.numel() and table.sets and not update.floors.numel():
            raise ValueError(f"table {i} has counts and no floors: LFU keeps both")
        total = update.accumulator
        if total.numel():
            shape = (rows,) if total.dim() == 1 else (rows, table.dim)
            check_role(f"accumulator of table {i}", total, torch.float32, shape, lookups)


def check_role(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], lookups: Lookups
) -> None:
    """Refuse a tensor of another dtype, of another shape, or on another device than the lookups."""
    device = lookups.values.device
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype} on {tensor.device}: "
            f"expected {dtype} {tuple(shape)} on {device}"
        )

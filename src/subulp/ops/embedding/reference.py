"""Embedding ops in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...numerics import ieee
from ...numerics.ieee import as_fp32
from . import rows as stored
from .faults import check_finite, check_tags, check_values
from .job import (
    BYPASS_SLOT,
    COUNT_LIMIT,
    EMPTY,
    EVICT_SLOT,
    GRADIENT_SPAN,
    Job,
    Table,
    TableUpdate,
)


def run(job: Job) -> Tensor | None:
    """Run ``job``."""
    check_values(job)
    if job.kind == "pool":
        return _pool(job)
    if job.kind == "weight-grad":
        return _weight_grad(job)
    check_finite(job)
    check_tags(job)
    for t in range(len(job.tables)):
        _update_table(job, t)
    return None


def _positions(job: Job, feature: int) -> slice:
    batch = job.lookups.batch
    first, last = job.lookups.offsets[[feature * batch, (feature + 1) * batch]].tolist()
    return slice(first, last)


def _pool(job: Job) -> Tensor:
    looked = job.lookups
    assert job.statistics is not None
    batch, columns = looked.batch, looked.columns(job.tables)
    out = torch.zeros(batch, columns[-1], dtype=torch.float32, device=job.device)
    for feature, t in enumerate(looked.features):
        at = _positions(job, feature)
        rows = looked.values[at]
        places = stored.find(job.tables[t], rows)
        job.statistics[t, 0] += len(rows)
        job.statistics[t, 1] += (places >= 0).sum()
        values = stored.fetch(job.tables[t], rows, places)
        if looked.weights is not None:
            values = values * looked.weights[at].unsqueeze(1)
        bounds = looked.offsets[feature * batch : (feature + 1) * batch + 1] - at.start
        out[:, columns[feature] : columns[feature + 1]] = _sums(
            bounds[:-1], bounds.diff(), values.__getitem__, job.tables[t].dim
        )
    return out


def _sums(starts: Tensor, lengths: Tensor, terms: Callable[[Tensor], Tensor], dim: int) -> Tensor:
    """Sums of runs of terms, each in its order: FP32 ``(runs, dim)``."""
    total = torch.zeros(len(starts), dim, dtype=torch.float32, device=starts.device)
    for i in range(int(lengths.max()) if len(starts) else 0):
        longer = lengths > i
        total[longer] += terms(starts[longer] + i)
    return total


def _spans(starts: Tensor, lengths: Tensor, terms: Callable[[Tensor], Tensor], dim: int) -> Tensor:
    """:func:`_sums` of spans of terms, and then of the spans."""
    spans = (lengths + (GRADIENT_SPAN - 1)) // GRADIENT_SPAN
    first = spans.cumsum(0) - spans
    run = torch.repeat_interleave(spans)
    before = (torch.arange(len(run), device=run.device) - first[run]) * GRADIENT_SPAN
    sizes = (lengths[run] - before).clamp(max=GRADIENT_SPAN)
    return _sums(first, spans, _sums(starts[run] + before, sizes, terms, dim).__getitem__, dim)


def _gradients(job: Job, feature: int, at: slice) -> Tensor:
    """The gradient of each looked-up row of a feature, without its weight."""
    assert job.grad is not None
    batch, columns = job.lookups.batch, job.lookups.columns(job.tables)
    bounds = job.lookups.offsets[feature * batch : (feature + 1) * batch + 1]
    bags = torch.repeat_interleave(torch.arange(batch, device=job.device), bounds.diff())
    return job.grad[:, columns[feature] : columns[feature + 1]][bags]


def _weight_grad(job: Job) -> Tensor:
    result = torch.zeros(job.lookups.values.shape, dtype=torch.float32, device=job.device)
    for feature, t in enumerate(job.lookups.features):
        at = _positions(job, feature)
        rows = job.lookups.values[at]
        values = stored.fetch(job.tables[t], rows, stored.find(job.tables[t], rows))
        result[at] = stored.row_sum(_gradients(job, feature, at) * values)
    return result


# -------------------------------------------------------------------------------------- update


def _update_table(job: Job, t: int) -> None:
    table, looked = job.tables[t], job.lookups
    rows, grads = [], []
    for feature in [f for f, mine in enumerate(looked.features) if mine == t]:
        at = _positions(job, feature)
        rows.append(looked.values[at])
        grad = _gradients(job, feature, at)
        if looked.weights is not None:
            grad = grad * looked.weights[at].unsqueeze(1)
        grads.append(grad)
    if not rows or not sum(map(len, rows)):
        return
    values, terms = torch.cat(rows), torch.cat(grads)
    order = torch.argsort(values, stable=True)
    unique, lengths = torch.unique_consecutive(values[order], return_counts=True)
    starts = lengths.cumsum(0) - lengths
    merged = _spans(starts, lengths, lambda i: terms[order[i]], table.dim)
    # Rows of one set go one after the other; rows of different sets are independent.
    turn = torch.zeros_like(unique)
    if table.sets:
        turn = _turns(stored.set_of(unique, table.sets, mixed=table.mixed))
    for i in range(int(turn.max()) + 1):
        now = turn == i
        _update_rows(job, t, unique[now], lengths[now], merged[now])


def _turns(sets: Tensor) -> Tensor:
    """How many earlier entries have the same set."""
    order = torch.argsort(sets, stable=True)
    lengths = torch.unique_consecutive(sets[order], return_counts=True)[1]
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    turns = torch.empty_like(sets)
    turns[order] = torch.arange(len(sets), device=sets.device) - starts
    return turns


def _update_rows(job: Job, t: int, rows: Tensor, lookups: Tensor, grad: Tensor) -> None:
    """Update rows that belong to different sets."""
    table, update = job.tables[t], job.updates[t]
    places = stored.find(table, rows)
    x = _optimize(update, rows, stored.fetch(table, rows, places), grad)
    if update.counts.numel():
        total = update.counts[rows] + lookups
        update.counts[rows] = total.clamp(max=COUNT_LIMIT).to(torch.int32)
    if not table.sets:
        _encode(job, t, rows, x, BYPASS_SLOT)
        return
    resident = places >= 0
    places, evicts, bypasses = _place(job, table, update, rows, places)
    assert job.evictions is not None
    job.evictions[t] += evicts.sum()
    old = table.tags[places].long()
    for slot, when in ((EVICT_SLOT, old > rows), (BYPASS_SLOT, old < rows)):
        leaves = evicts & when
        _encode(job, t, old[leaves], table.cache[places[leaves]], slot)
    _encode(job, t, rows[bypasses], x[bypasses], BYPASS_SLOT)
    stays = ~bypasses
    table.cache[places[stays]] = x[stays]
    table.tags[places[stays & ~resident]] = rows[stays & ~resident].to(torch.int32)
    if update.stamps.numel():
        update.stamps[places[stays]] = job.step


def _optimize(update: TableUpdate, rows: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    lr, decay, eps = (as_fp32(v) for v in (update.lr, update.weight_decay, update.eps))
    if decay != 0.0:
        grad = grad + x * decay
    if update.rule == "sgd":
        return x - grad * lr
    squares = grad * grad
    if update.rule == "adagrad":
        total = update.accumulator[rows] + squares
        update.accumulator[rows] = total
        return x - (grad * lr) / (ieee.sqrt(total) + eps)
    total = update.accumulator[rows] + stored.row_sum(squares) / float(x.shape[1])
    update.accumulator[rows] = total
    factor = torch.full_like(total, lr) / (ieee.sqrt(total) + eps)
    return x - grad * factor.unsqueeze(1)


def _place(
    job: Job, table: Table, update: TableUpdate, rows: Tensor, places: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The places of rows in the cache, which of them evict a row, and which bypass the cache."""
    first = stored.set_of(rows, table.sets, mixed=table.mixed) * table.ways
    ways = first.unsqueeze(1) + torch.arange(table.ways, device=rows.device)
    free = table.tags[ways] == EMPTY
    if update.counts.numel():
        priority = update.counts[table.tags[ways].clamp(min=0).long()]
        own = update.counts[rows]
    elif update.stamps.numel():
        priority = update.stamps[ways]
        own = torch.full_like(rows, job.step)
    else:  # Direct-mapped LRU: the current row always wins.
        priority = torch.zeros_like(ways)
        own = torch.ones_like(rows)
    priority = torch.where(free, torch.iinfo(torch.int32).min, priority)
    victim = priority.argmin(1)
    absent = places < 0
    has_free = free.any(1)
    least = priority.gather(1, victim.unsqueeze(1)).squeeze(1)
    wins = own > least
    places = torch.where(absent, first + victim, places)
    return places, absent & ~has_free & wins, absent & ~has_free & ~wins


def _encode(job: Job, t: int, rows: Tensor, values: Tensor, slot: int) -> None:
    if rows.numel():
        stored.encode(
            job.tables[t],
            rows,
            values,
            stochastic=job.updates[t].stochastic,
            seed=job.seed,
            stream=job.updates[t].stream,
            step=job.step,
            slot=slot,
        )

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Lookups in Triton: a program pools some bags of a feature, or has the gradient of their weights.

The bags lie side by side, and their lookups are taken in turns, ``AHEAD`` of each bag at a time:
the tags of all bags' sets are one load, and so are their rows. Each bag's rows are added in the
order of its lookups, whatever bags are beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton import launch
from ..triton.faults import report
from .triton_rows import also, constant, entry, fetch_each, find, row_sums, table_at


@triton.jit(do_not_specialize=launch.VARYING)
def lookup_kernel(
    tables,
    features,
    values,
    offsets,
    weights,
    grad,
    out,
    statistics,
    words,
    found,
    count,
    batch,
    width,
    LAYOUT: tl.constexpr,
    FORMATS: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BAGS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    parts = tl.cdiv(batch, BAGS)
    feature, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    number, column = tl.load(features + 2 * feature), tl.load(features + 2 * feature + 1)
    table = table_at(tables, number)
    rows, dim = entry(table, "rows"), entry(table, "dim")
    if ALIGNED:
        dim, column = tl.multiple_of(dim, 4), tl.multiple_of(column, 4)
        width = tl.multiple_of(width, 4)
        tl.multiple_of(entry(table, "stride"), 4)
    instance = part.to(tl.int64) * BAGS + tl.arange(0, BAGS)
    bag = feature.to(tl.int64) * batch + instance
    first = tl.load(offsets + bag, mask=instance < batch, other=0)
    last = tl.load(offsets + bag + 1, mask=instance < batch, other=0)
    bad = (first < 0) | (last < first) | (last > count) | ((bag == 0) & (first != 0))
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        which = tl.min(tl.where(bad, bag, 1 << 62), axis=0)
        begins, ends = tl.load(offsets + which), tl.load(offsets + which + 1)
        report(words, found, constant("BAD_OFFSETS"), which, begins, ends, count)
    last = tl.where(bad, first, last)

    element = tl.arange(0, BLOCK)[None, :]
    inside = element < dim
    here = (instance < batch)[:, None] & inside
    at = instance[:, None] * width + column + element
    total = tl.zeros((BAGS, BLOCK), tl.float32)
    if not POOL:
        total = tl.load(grad + at, mask=here, other=0.0)
    total = tl.where(bad[:, None], float("nan"), total)
    hits = first * 0
    # The first lookup of each bag whose row does not exist.
    unknown = hits + count
    for start in range(0, tl.max(last - first, axis=0), AHEAD):
        looked, places, row_of = (), (), ()
        for i in tl.static_range(AHEAD):
            k = first + start + i
            row = tl.load(values + k, mask=k < last, other=0)
            exists = (row >= 0) & (row < rows)
            unknown = tl.minimum(unknown, tl.where(exists | (k >= last), count, k))
            # Of what does not exist nothing is read.
            row_of = also(row_of, tl.where(exists & (k < last), row, -1))
            looked = also(looked, k)
        for i in tl.static_range(AHEAD):
            places = also(places, find(table, row_of[i], WAYS))
        x = fetch_each(table, row_of, places, element, inside, FORMATS, AHEAD, ALIGNED)
        for i in tl.static_range(AHEAD):
            k = looked[i]
            hits += tl.where(places[i] >= 0, 1, 0)
            of_row = tl.where(((row_of[i] < 0) & (k < last))[:, None], float("nan"), x[i])
            if POOL:
                if WEIGHTED:
                    weight = tl.load(weights + k, mask=k < last, other=0.0)
                    of_row = of_row * weight[:, None]
                # No sum is -0, so that a zero beyond a bag's end changes none.
                total += of_row
            else:
                tl.store(out + k, row_sums(total * of_row, BAGS, BLOCK), mask=k < last)
    position = tl.min(unknown, axis=0)
    if position < count:
        value = tl.load(values + position)
        report(words, found, constant("BAD_VALUE"), position, value, feature, rows)
    if POOL:
        tl.store(out + at, total, mask=here)
        tl.atomic_add(statistics + 2 * number, tl.sum(last - first, axis=0))
        tl.atomic_add(statistics + 2 * number + 1, tl.sum(hits, axis=0))

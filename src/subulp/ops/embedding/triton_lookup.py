# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Lookups in Triton: a program pools a bag, or computes the gradient of its weights."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton import launch
from ..triton.faults import report
from .triton_rows import constant, entry, fetch, find, row_sum, table_at


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
):
    bag = tl.program_id(0).to(tl.int64)
    feature = bag // batch
    number, column = tl.load(features + 2 * feature), tl.load(features + 2 * feature + 1)
    table = table_at(tables, number)
    rows, dim = entry(table, "rows"), entry(table, "dim")
    element = tl.arange(0, BLOCK)
    inside = element < dim
    first, last = tl.load(offsets + bag), tl.load(offsets + bag + 1)
    at = bag % batch * width + column + element
    hits = first * 0
    total = tl.zeros((BLOCK,), tl.float32)
    if not POOL:
        total = tl.load(grad + at, mask=inside, other=0.0)
    if (first < 0) | (last < first) | (last > count) | ((bag == 0) & (first != 0)):
        report(words, found, constant("BAD_OFFSETS"), bag, first, last, count)
        total = tl.full((BLOCK,), float("nan"), tl.float32)
        last = first
    for k in range(first, last):
        row = tl.load(values + k)
        x = tl.full((BLOCK,), float("nan"), tl.float32)
        if (row >= 0) & (row < rows):
            place = find(table, row, WAYS)
            x = fetch(table, row, place, element, inside, FORMATS, BLOCK)
            hits += (place >= 0).to(tl.int64)
        else:
            report(words, found, constant("BAD_VALUE"), k, row, feature, rows)
        if POOL:
            if WEIGHTED:
                x = x * tl.load(weights + k)
            total += x
        else:
            tl.store(out + k, row_sum(total * x, BLOCK))
    if POOL:
        tl.store(out + at, total, mask=inside)
        tl.atomic_add(statistics + 2 * number, last - first)
        tl.atomic_add(statistics + 2 * number + 1, hits)

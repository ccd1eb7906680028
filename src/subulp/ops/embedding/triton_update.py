# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""One training step of looked-up rows in Triton, for all tables together.

``order_kernel`` checks every number and makes the keys by which lookups are sorted: by table, set
and row (see :func:`.triton_rows.bases`). ``spans_kernel`` sums the gradients of rows that many
lookups share, span by span. ``update_kernel`` then updates the rows of a set one by one, in their
order; different sets are independent. It changes nothing if a fault was found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton import launch
from ..triton.faults import report
from .triton_rows import (
    constant,
    count_of,
    entry,
    entry_at,
    fetch,
    look,
    name_at,
    real,
    reals_of,
    row_sum,
    rule_code,
    set_of,
    store_row,
    table_at,
    words_of,
)

POSITIONS = 256
"""Lookups, and numbers of the gradient, that a program checks at a time."""

PLACES = 8
"""Sorted lookups of a program; it updates the sets that begin among them."""

_AHEAD = 4


@triton.constexpr_function
def ahead():
    """Gradients that are on their way together."""
    return _AHEAD


@triton.constexpr_function
def unused():
    """Key of a lookup that no bag has: after all others."""
    return 2**63 - 1


@triton.jit(do_not_specialize=launch.VARYING)
def order_kernel(
    tables,
    features,
    values,
    offsets,
    grad,
    weights,
    keys,
    grad_at,
    words,
    found,
    count,
    bags,
    batch,
    width,
    search,
    LAYOUT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    # What the lanes need, computed once for all loops, would fill registers.
    for start in tl.range(program * BLOCK, bags, programs * BLOCK, disable_licm=True):
        bag = start + lane
        here = bag < bags
        first = tl.load(offsets + bag, mask=here, other=0)
        last = tl.load(offsets + bag + 1, mask=here, other=0)
        bad = (first < 0) | (last < first) | (last > count) | ((bag == 0) & (first != 0))
        if tl.max((bad & here).to(tl.int32), axis=0) > 0:
            which = tl.min(tl.where(bad & here, bag, bags), axis=0)
            begins, ends = tl.load(offsets + which), tl.load(offsets + which + 1)
            report(words, found, constant("BAD_OFFSETS"), which, begins, ends, count)

    used = tl.minimum(tl.load(offsets + bags), count)
    for start in tl.range(program * BLOCK, count, programs * BLOCK, disable_licm=True):
        k = start + lane
        here = k < used
        # The last bag that begins at k or before.
        low, high = k * 0, k * 0 + bags
        for _ in range(search):
            middle = (low + high) // 2
            begins = tl.load(offsets + middle, mask=here, other=0) <= k
            low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
        feature = tl.where(here, low, 0) // batch
        table = tl.load(features + 2 * feature, mask=here, other=0)
        row = tl.load(values + k, mask=here, other=0)
        rows = tl.load(entry_at(tables, table, "rows"), mask=here, other=1)
        bad = here & ((row < 0) | (row >= rows))
        if tl.max(bad.to(tl.int32), axis=0) > 0:
            at = tl.min(tl.where(bad, k, count), axis=0)
            its = tl.sum(tl.where(k == at, feature, 0), axis=0)
            limit = tl.sum(tl.where(k == at, rows, 0), axis=0)
            report(words, found, constant("BAD_VALUE"), at, tl.load(values + at), its, limit)
        sets = tl.load(entry_at(tables, table, "sets"), mask=here, other=0)
        mixed = tl.load(entry_at(tables, table, "mixed"), mask=here, other=0)
        base = tl.load(entry_at(tables, table, "base"), mask=here, other=0)
        key = base + set_of(row, sets, mixed) * rows + row
        tl.store(keys + k, tl.where(here, key, unused()), mask=k < count)
        column = tl.load(features + 2 * feature + 1, mask=here, other=0)
        tl.store(grad_at + k, low % batch * width + column, mask=here)
        if WEIGHTED:
            weight = tl.load(weights + k, mask=k < count, other=0.0)
            if tl.max((tl.abs(weight) < float("inf")).to(tl.int32) ^ 1, axis=0) > 0:
                report(words, found, constant("BAD_WEIGHTS"), count, 0, 0, 0)

    # Without bags a batch of one is given, and there is no gradient.
    size = tl.where(bags > 0, batch, 0).to(tl.int64) * width
    for start in tl.range(program * BLOCK, size, programs * BLOCK, disable_licm=True):
        g = tl.load(grad + start + lane, mask=start + lane < size, other=0.0)
        if tl.max((tl.abs(g) < float("inf")).to(tl.int32) ^ 1, axis=0) > 0:
            report(words, found, constant("BAD_GRADIENT"), batch, width, 0, 0)


@triton.jit
def table_of(tables, count, key):
    """The table that a key belongs to."""
    low, high = key * 0, key * 0 + count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(entry_at(tables, middle, "base")) <= key:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def first_of(keys, key, at):
    """Where a key's run begins among sorted ones, at or before ``at``."""
    low, high = at * 0, at
    while low < high:
        middle = (low + high) // 2
        if tl.load(keys + middle) < key:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def end_of(keys, key, at, count):
    """Where a key's run that ``at`` belongs to ends."""
    lane = tl.arange(0, 32)
    same = tl.load(keys + at + lane, mask=at + lane < count, other=unused()) == key
    end = at + tl.sum(same.to(tl.int64), axis=0)
    if end - at == 32:
        high = end * 0 + count
        while end < high:
            middle = (end + high) // 2
            if tl.load(keys + middle) == key:
                end = middle + 1
            else:
                high = middle
    return end


@triton.jit
def sum_span(
    grad,
    grad_at,
    weights,
    order,
    begin,
    end,
    dim,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of some sorted lookups, summed in their order."""
    element = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(tl.cdiv(end - begin, ahead())):
        for i in tl.static_range(ahead()):
            place = begin + step * ahead() + i
            here = place < end
            position = tl.load(order + place, mask=here, other=0)
            at = tl.load(grad_at + position, mask=here, other=0)
            g = tl.load(grad + at + element, mask=element < tl.where(here, dim, 0), other=0.0)
            if WEIGHTED:
                g = g * tl.load(weights + position, mask=here, other=0.0)
            # No sum is -0, so that a zero beyond the end changes none.
            total += g
    return total


@triton.jit(do_not_specialize=launch.VARYING)
def spans_kernel(
    tables,
    table_count,
    keys,
    order,
    grad,
    grad_at,
    weights,
    sums,
    found,
    count,
    LAYOUT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    window = tl.program_id(0).to(tl.int64)
    start = window * SPAN
    key = tl.load(keys + start)
    before = tl.load(keys + start - 1, mask=start > 0, other=-1)
    if (before == key) & (key != unused()) & (tl.load(found) == 0):
        run = first_of(keys, key, start)
        # Of every row, one span at most begins in a window, but for its first, which is summed
        # where the row is updated.
        begin = run + tl.cdiv(start - run, SPAN) * SPAN
        lane = tl.arange(0, SPAN)
        same = tl.load(keys + begin + lane, mask=begin + lane < count, other=unused()) == key
        end = begin + tl.sum(same.to(tl.int64), axis=0)
        if begin < end:
            element = tl.arange(0, BLOCK)
            dim = tl.load(entry_at(tables, table_of(tables, table_count, key), "dim"))
            total = sum_span(grad, grad_at, weights, order, begin, end, dim, WEIGHTED, BLOCK)
            tl.store(sums + window * BLOCK + element, total)


@triton.jit(do_not_specialize=launch.VARYING)
def update_kernel(
    tables,
    table_count,
    keys,
    order,
    grad,
    grad_at,
    weights,
    sums,
    evictions,
    words,
    found,
    step,
    count,
    LAYOUT: tl.constexpr,
    FORMATS: tl.constexpr,
    RULES: tl.constexpr,
    RANDOM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    SPAN: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * PLACES
    # Nothing is updated where something was wrong.
    last = tl.where(tl.load(found) == 0, tl.minimum(first + PLACES, count), first)
    # What rows need of lanes, computed once for all of them, would fill registers.
    for at in tl.range(first, last, disable_licm=True):
        key = tl.load(keys + at)
        if key != unused():
            number = table_of(tables, table_count, key)
            base = tl.load(entry_at(tables, number, "base"))
            rows = tl.load(entry_at(tables, number, "rows"))
            cached = tl.load(entry_at(tables, number, "sets")) > 0
            before = tl.where(at > 0, tl.load(keys + tl.maximum(at - 1, 0)), -1)
            # Keys of a set, or else of a row, are those from ``lowest`` on and below ``highest``.
            size = tl.where(cached, rows, 1)
            lowest = base + (key - base) // size * size
            highest = lowest + size
            if before < lowest:
                start = at
                while (key < highest) & (start < count):
                    end = end_of(keys, key, start, count)
                    element = tl.arange(0, BLOCK)
                    dim = tl.load(entry_at(tables, number, "dim"))
                    inside = element < dim
                    in_span = tl.minimum(end, start + SPAN)
                    g = sum_span(
                        grad, grad_at, weights, order, start, in_span, dim, WEIGHTED, BLOCK
                    )
                    for span in range(start + SPAN, end, SPAN):
                        g += tl.load(sums + span // SPAN * BLOCK + element)
                    update_row(
                        # Read anew: registers would hold them while the gradient is summed.
                        table_at(tables, number),
                        evictions + number,
                        (key - base) % rows,
                        g,
                        end - start,
                        words,
                        found,
                        step,
                        element,
                        inside,
                        FORMATS,
                        RULES,
                        RANDOM,
                        WAYS,
                        BLOCK,
                    )
                    # The next row may be the one that left.
                    tl.debug_barrier()
                    start = end
                    key = tl.load(keys + start, mask=start < count, other=unused())


@triton.jit
def update_row(
    table,
    evictions,
    row,
    g,
    lookups,
    words,
    found,
    step,
    element,
    inside,
    FORMATS: tl.constexpr,
    RULES: tl.constexpr,
    RANDOM: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's turn: see :func:`subulp.ops.embedding.embedding_update`."""
    place, set_first, tag = look(table, row, WAYS)
    x = fetch(table, row, place, element, inside, FORMATS, BLOCK)
    x = optimize(table, row, x, g, element, inside, RULES, BLOCK)

    policy, rows = entry(table, "policy"), entry(table, "rows")
    dim, ways = entry(table, "dim"), entry(table, "ways")
    counts = words_of(entry(table, "counts"))
    own = step.to(tl.int64)
    if policy == constant("LFU"):
        own = tl.minimum(tl.load(counts + row).to(tl.int64) + lookups, constant("COUNT_LIMIT"))
        # Other threads than the one that stores it have read it.
        tl.debug_barrier()
        tl.store(counts + row, own.to(tl.int32))
    # What leaves FP32: this row, or the one whose place it takes.
    leaves, leaving, slot = place < 0, row, row * 0 + constant("BYPASS_SLOT")
    value = x
    sets = entry(table, "sets")
    if sets > 0:
        cache = reals_of(entry(table, "cache"))
        way = tl.arange(0, WAYS)
        tags = words_of(entry(table, "tags"))
        stamps = words_of(entry(table, "stamps"))
        priority = (way * 0).to(tl.int64) - 1
        if policy == constant("LFU"):
            known = (tag >= 0) & (tag < rows)
            priority = tl.load(counts + tag, mask=known, other=0).to(tl.int64)
        elif policy == constant("LRU"):
            priority = tl.load(stamps + set_first + way, mask=way < ways, other=0).to(tl.int64)
        priority = tl.where(tag == constant("EMPTY"), -2, priority)
        priority = tl.where(way < ways, priority, 1 << 62)
        least = tl.min(priority, axis=0)
        victim = tl.min(tl.where(priority == least, way, WAYS), axis=0)
        old = tl.sum(tl.where(way == victim, tag, 0), axis=0).to(tl.int64)
        absent = place < 0
        full = least > -2
        unknown = ((tag < 0) | (tag >= rows)) & (way < ways)
        strange = absent & full & (tl.max(unknown.to(tl.int32), axis=0) > 0)
        if strange:
            report(words, found, constant("BAD_TAGS"), row, 0, 0, 0)
        enters = absent & (own > least) & (strange == 0)
        evicts = enters & full
        leaves = absent & (full | (enters == 0))
        if enters:
            place = set_first + victim
        if evicts:
            value = tl.load(cache + place * dim + element, mask=inside, other=0.0)
            leaving = old
            slot = tl.where(old > row, constant("EVICT_SLOT"), constant("BYPASS_SLOT")).to(tl.int64)
            tl.atomic_add(evictions, 1)
        tl.debug_barrier()
        if place >= 0:
            tl.store(cache + place * dim + element, x, mask=inside)
            tl.store(tags + place, row.to(tl.int32))
            if policy == constant("LRU"):
                tl.store(stamps + place, step.to(tl.int32))
    if leaves:
        store_row(table, leaving, value, step, slot, element, inside, FORMATS, RANDOM, BLOCK)


@triton.jit
def optimize(table, row, x, g, element, inside, RULES: tl.constexpr, BLOCK: tl.constexpr):
    """The row with its gradient applied."""
    lr, decay, eps = real(table, "lr"), real(table, "weight_decay"), real(table, "eps")
    if decay != 0.0:
        g = g + x * decay
    result = x
    for i in tl.static_range(count_of(RULES)):
        if entry(table, "rule") == rule_code(name_at(RULES, i)):
            result = step_of(table, row, x, g, lr, eps, element, inside, name_at(RULES, i), BLOCK)
    return result


@triton.jit
def step_of(table, row, x, g, lr, eps, element, inside, RULE: tl.constexpr, BLOCK: tl.constexpr):
    """The row after a rule's step."""
    accumulator, dim = reals_of(entry(table, "accumulator")), entry(table, "dim")
    if RULE == "sgd":
        result = x - g * lr
    elif RULE == "adagrad":
        at = accumulator + row * dim + element
        total = tl.load(at, mask=inside, other=0.0) + g * g
        tl.store(at, total, mask=inside)
        result = x - tl.div_rn(g * lr, tl.sqrt_rn(total) + eps)
    else:
        mean = tl.div_rn(row_sum(tl.where(inside, g * g, 0.0), BLOCK), dim.to(tl.float32))
        total = tl.load(accumulator + row) + mean
        # Other threads than the one that stores it have read it.
        tl.debug_barrier()
        tl.store(accumulator + row, total)
        result = x - g * tl.div_rn(lr, tl.sqrt_rn(total) + eps)
    return result

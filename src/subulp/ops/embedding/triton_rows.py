# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rows of many tables in Triton: found, read and written by what one table of numbers says of each.

A kernel gets ``tables``, int64 with a row for each table of the job: addresses, sizes and codes, by
the names of :data:`COLUMNS`. Which of the job's formats a table has is known when the kernel runs;
which formats there are, when it is compiled: their names, separated by commas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import triton
import triton.language as tl

from ...numerics.metrics import LANES
from ...numerics.random_bits import MIX, MIX_LAST
from ..triton import codec, int_rows, launch, random_bits
from .faults import Fault
from .job import (
    BYPASS_SLOT,
    COUNT_LIMIT,
    EMPTY,
    EVICT_SLOT,
    GRADIENT_SPAN,
    Job,
    Table,
    TableUpdate,
    Update,
)

POLICIES = ("last", "lfu", "lru")
"""Of a full set: the current row always wins, or the one with more accesses, or the later one."""

_RULES = {name: code for code, name in enumerate(get_args(Update))}

_ROLES = ("codes", "cache", "tags", "counts", "stamps", "accumulator")
COLUMNS = (
    *_ROLES,
    *("base", "rows", "dim", "stride", "sets", "ways", "mixed", "format", "policy", "rule"),
    *("stochastic", "key", "lr", "weight_decay", "eps"),
    *("period", "first", "taken", "whole_dim", "whole_column"),
)
"""Of the table of numbers. ``base``: where the table's keys begin, see :func:`bases`; the update's
FP32 numbers are their patterns."""

_PLACES = {name: place for place, name in enumerate(COLUMNS)}
_CONSTANTS = {
    "LANES": LANES,
    "COUNT_LIMIT": COUNT_LIMIT,
    "BYPASS_SLOT": BYPASS_SLOT,
    "EVICT_SLOT": EVICT_SLOT,
    "EMPTY": EMPTY,
    "SPAN": GRADIENT_SPAN,
    "LFU": POLICIES.index("lfu"),
    "LRU": POLICIES.index("lru"),
    **{fault.name: fault.value for fault in Fault},
}
LAYOUT = launch.layout(_PLACES, _CONSTANTS, _RULES)
"""A constexpr argument of every kernel, see :func:`subulp.ops.triton.launch.layout`."""


def numbers(job: Job, addresses: np.ndarray, formats: Sequence[str]) -> np.ndarray:
    """The table of numbers.

    Args:
        job: Its tables, and their updates if it has any.
        addresses: int64 ``(tables, 6)``: of codes, cache and tags, and of an update's counts,
            stamps and accumulator; 0 for what is not there.
        formats: The job's, see :func:`formats_of`.
    """
    rows = []
    for t, (table, base) in enumerate(zip(job.tables, bases(job), strict=False)):
        place, stride = table.place, table.codes.shape[1] * table.codes.itemsize
        of_update: tuple[int, ...] = (0,) * 7
        if job.updates:
            of_update = _of_update(job.updates[t], table, job.seed)
        rows.append(
            (
                *(base, table.rows, table.dim, stride, table.sets, table.ways, table.mixed),
                *(formats.index(table.storage.name), *of_update),
                *(place.period, place.first, place.taken, place.dim, place.column),
            )
        )
    return np.concatenate((addresses, np.array(rows, dtype=np.int64)), axis=1)


def _of_update(update: TableUpdate, table: Table, seed: int) -> tuple[int, ...]:
    policy = "lfu" if update.counts.numel() else "lru" if update.stamps.numel() else "last"
    stochastic = update.stochastic and table.storage.name != "fp32"
    # As signed numbers: their bits count.
    key = np.array(update.stream << 32 | seed, dtype=np.uint64).view(np.int64)
    reals = np.array([update.lr, update.weight_decay, update.eps], dtype=np.float32)
    patterns = reals.view(np.int32).tolist()
    return POLICIES.index(policy), _RULES[update.rule], stochastic, int(key), *patterns


def bases(job: Job) -> list[int]:
    """Where the keys of each table begin, and the end of all.

    A row's key is its set's number times the table's rows, plus its own: ascending keys are the
    order in which rows of a set take their turns, set by set and table by table.
    """
    found = [0]
    for table in job.tables:
        found.append(found[-1] + max(table.sets, 1) * table.rows)
    return found


def formats_of(job: Job) -> list[str]:
    """The names of the formats that tables have."""
    return sorted({table.storage.name for table in job.tables})


# -------------------------------------------------------------------------------- what is constant


@triton.constexpr_function
def count_of(names):
    """How many names there are, which commas separate."""
    return len(names.split(","))


@triton.constexpr_function
def name_at(names, i):
    """The i-th."""
    return names.split(",")[i]


@triton.constexpr_function
def rule_code(name):
    """The number of an optimizer's rule in the table of numbers."""
    return _RULES[name]


@triton.constexpr_function
def int_bits(fmt):
    """Bits of an integer; 0 for a floating-point format."""
    return int(fmt[3:]) if fmt.startswith("int") else 0


@triton.constexpr_function
def random_bits_of(fmt):
    """Random bits that rounding an element draws."""
    return 32 if int_bits(fmt) else codec.random_width(fmt)


@triton.constexpr_function
def mix_rounds():
    """Multiplications of :func:`subulp.numerics.random_bits.mix`."""
    return len(MIX)


@triton.constexpr_function
def mix_shift(i):
    """Its i-th shift."""
    return MIX[i][0] if i < len(MIX) else MIX_LAST


@triton.constexpr_function
def mix_factor(i):
    """Its i-th factor."""
    return MIX[i][1]


@triton.constexpr_function
def constant(name):
    """A constant of the cache or of rows of integers, by its name."""
    return _CONSTANTS[name]


@triton.constexpr_function
def columns():
    """Columns of the table of numbers."""
    return len(_PLACES)


@triton.constexpr_function
def column(name):
    """A column of the table of numbers."""
    return _PLACES[name]


@triton.jit
def also(found, x):
    """A tuple, and one more."""
    return found + (x,)  # noqa: RUF005


@triton.jit
def entry_at(tables, table, NAME: tl.constexpr):
    """Where a number of a table lies, or of each of several."""
    return tables + table * columns() + column(NAME)


@triton.jit
def table_at(tables, table):
    """All numbers of a table, for :func:`entry`."""
    found = ()
    for i in tl.static_range(columns()):
        found = also(found, tl.load(tables + table * columns() + i))
    return found


@triton.jit
def entry(table, NAME: tl.constexpr):
    """A number of a table."""
    return table[column(NAME)]


@triton.jit
def real(table, NAME: tl.constexpr):
    """An FP32 number of a table."""
    return entry(table, NAME).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def reals_of(address, ALIGNED: tl.constexpr = False):
    """FP32 numbers at an address; ``ALIGNED``: a multiple of 16."""
    typed = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(typed, 16) if ALIGNED else typed


@triton.jit
def words_of(address):
    """int32 numbers at an address."""
    return address.to(tl.pointer_type(tl.int32))


# ------------------------------------------------------------------------------------------- sets


@triton.jit
def set_of(row, sets, mixed):
    """See :func:`.rows.set_of`, in the width of ``row``; 0 for a table without a cache."""
    h = row.to(tl.uint32)
    for i in tl.static_range(mix_rounds()):
        h = (h ^ (h >> mix_shift(i))) * mix_factor(i)
    h = h ^ (h >> mix_shift(mix_rounds()))
    return tl.where(mixed != 0, h.to(row.dtype), row) % tl.maximum(sets, 1).to(row.dtype)


@triton.jit
def find(table, row, WAYS: tl.constexpr):
    """Where each of some rows lies in its table's cache, int64, or -1; also of a row of -1.

    The tags of all their sets are one load, rows by ways, and are looked through together.
    """
    sets, ways = entry(table, "sets"), entry(table, "ways")
    # A tag has 31 bits, and so have the rows of a table with a cache: they are divided in 32.
    first = set_of(row.to(tl.uint32), sets, entry(table, "mixed")).to(tl.int64) * ways
    way = tl.arange(0, WAYS)[None, :]
    there = (row >= 0)[:, None] & (way < tl.where(sets > 0, ways, 0))
    tags = words_of(entry(table, "tags")) + first[:, None] + way
    tag = tl.load(tags, mask=there, other=constant("EMPTY"))
    found = tl.min(tl.where(there & (tag == row.to(tl.int32)[:, None]), way, WAYS), axis=1)
    return tl.where(found < WAYS, first + found, -1)


@triton.jit
def look(table, row, WAYS: tl.constexpr):
    """Where a row lies or -1, the first place of its set, and the set's tags; all int64 but these.

    Without a cache the place is -1.
    """
    sets = entry(table, "sets")
    place, first = row * 0 - 1, row * 0
    tag = tl.full((WAYS,), constant("EMPTY"), tl.int32)
    if sets > 0:
        ways = entry(table, "ways")
        first = set_of(row, sets, entry(table, "mixed")) * ways
        way = tl.arange(0, WAYS)
        tags = words_of(entry(table, "tags")) + first
        tag = tl.load(tags + way, mask=way < ways, other=constant("EMPTY"))
        found = tl.min(tl.where(tag.to(tl.int64) == row, way, WAYS), axis=0)
        place = tl.where(found < WAYS, first + found, place)
    return place, first, tag


# ------------------------------------------------------------------------------------------- rows


@triton.jit
def fetch(table, row, place, element, inside, FORMATS: tl.constexpr, BLOCK: tl.constexpr):
    """FP32 row, zeros beyond its end: from a place in the cache, or from the table."""
    x = tl.zeros((BLOCK,), tl.float32)
    if place >= 0:
        cached = reals_of(entry(table, "cache")) + place * entry(table, "dim")
        x = tl.load(cached + element, mask=inside, other=0.0)
    else:
        at = entry(table, "codes") + row * entry(table, "stride")
        fmt = entry(table, "format")
        for i in tl.static_range(count_of(FORMATS)):
            if fmt == i:
                x = decode(at, element, inside, name_at(FORMATS, i))
    return x


@triton.jit
def fetch_each(
    table,
    row,
    place,
    element,
    inside,
    FORMATS: tl.constexpr,
    AHEAD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """FP32 rows of several lookups of some bags: zeros beyond a row's end, and for a row of -1.

    Args:
        table: Their table.
        row: For each of ``AHEAD`` lookups the bags' rows, int64.
        place: The same of where they lie, see :func:`find`.
        element: Places of a row, (1, places).
        inside: Which of them there are.
        FORMATS: Of all tables.
        AHEAD: Lookups of a bag.
        ALIGNED: Whether four elements are one load, see :func:`.triton.is_aligned`.

    Returns:
        For each lookup (bags, places).
    """
    fmt, cached, x = entry(table, "format"), (), ()
    cache, dim = reals_of(entry(table, "cache"), ALIGNED), entry(table, "dim")
    # Masks instead of branches: the loads of all rows are under way before one is waited for.
    for i in tl.static_range(AHEAD):
        at = cache + place[i][:, None] * dim
        there = (place[i] >= 0)[:, None] & inside
        cached = also(cached, tl.load(at + element, mask=there, other=0.0))
        x = also(x, tl.zeros(there.shape, tl.float32))
    for f in tl.static_range(count_of(FORMATS)):
        if fmt == f:
            x = stored_each(table, row, place, element, inside, name_at(FORMATS, f), AHEAD, ALIGNED)
    found = ()
    for i in tl.static_range(AHEAD):
        found = also(found, tl.where((place[i] >= 0)[:, None], cached[i], x[i]))
    return found


@triton.jit
def stored_each(
    table,
    row,
    place,
    element,
    inside,
    FORMAT: tl.constexpr,
    AHEAD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """:func:`fetch_each` of rows that are not in the cache, from a table of a format."""
    found = ()
    for i in tl.static_range(AHEAD):
        there = ((row[i] >= 0) & (place[i] < 0))[:, None]
        x = decode_each(table, row[i][:, None], there, element, inside, FORMAT, ALIGNED)
        found = also(found, x)
    return found


@triton.jit
def decode(at, element, inside, FORMAT: tl.constexpr):
    """The FP32 row that is stored at an address."""
    if int_bits(FORMAT):
        x = int_rows.decode(at.to(tl.pointer_type(tl.uint8)), element, inside, int_bits(FORMAT))
    else:
        x = codec.value(
            tl.load(codes_of(at, FORMAT) + element, mask=inside, other=0).to(tl.uint32), FORMAT
        )
    return x


@triton.jit
def decode_each(table, row, there, element, inside, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Some FP32 rows of a table, (rows, 1), and zeros where there is none."""
    codes = entry(table, "codes")
    if int_bits(FORMAT):
        typed = codes.to(tl.pointer_type(tl.uint8))
        if ALIGNED:
            typed = tl.multiple_of(typed, 16)
        at = typed + row * entry(table, "stride")
        x = int_rows.decode_each(at, there, element, inside, int_bits(FORMAT), ALIGNED)
    else:
        at = codes_of(codes, FORMAT, ALIGNED) + row * entry(table, "dim")
        code = tl.load(at + element, mask=there & inside, other=0)
        x = codec.value(code.to(tl.uint32), FORMAT)
    return x


@triton.jit
def codes_of(address, FORMAT: tl.constexpr, ALIGNED: tl.constexpr = False):
    """Codes of a floating-point format at an address; ``ALIGNED``: a multiple of 16."""
    if codec.width(FORMAT) == 32:
        typed = address.to(tl.pointer_type(tl.uint32))
    elif codec.width(FORMAT) == 16:
        typed = address.to(tl.pointer_type(tl.uint16))
    else:
        typed = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(typed, 16) if ALIGNED else typed


@triton.jit
def store_row(
    table,
    row,
    x,
    step,
    slot,
    element,
    inside,
    FORMATS: tl.constexpr,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round an FP32 row into its table; ``RANDOM``: some tables round stochastically."""
    at = entry(table, "codes") + row * entry(table, "stride")
    fmt = entry(table, "format")
    for i in tl.static_range(count_of(FORMATS)):
        if fmt == i:
            if RANDOM:
                if entry(table, "stochastic") != 0:
                    index = first_element(table, row) + element
                    key = entry(table, "key").to(tl.uint64)
                    bits = random_bits.draw_at(
                        index,
                        key,
                        step.to(tl.uint32),
                        slot.to(tl.uint32),
                        random_bits_of(name_at(FORMATS, i)),
                    )
                    encode(at, x, bits, element, inside, name_at(FORMATS, i), True, BLOCK)
                else:
                    encode(at, x, 0, element, inside, name_at(FORMATS, i), False, BLOCK)
            else:
                encode(at, x, 0, element, inside, name_at(FORMATS, i), False, BLOCK)


@triton.jit
def first_element(table, row):
    """See :meth:`.job.Part.element`."""
    period, taken = entry(table, "period"), entry(table, "taken")
    whole = row // taken * period + entry(table, "first") + row % taken
    return whole * entry(table, "whole_dim") + entry(table, "whole_column")


@triton.jit
def encode(
    at,
    x,
    bits,
    element,
    inside,
    FORMAT: tl.constexpr,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round an FP32 row to an address."""
    if int_bits(FORMAT):
        q, scale, bias = int_rows.quantise(x, bits, inside, int_bits(FORMAT), RANDOM)
        to = at.to(tl.pointer_type(tl.uint8))
        int_rows.store(to, q, scale, bias, inside, int_bits(FORMAT), BLOCK)
    else:
        code = codec.stochastic(x, bits, FORMAT) if RANDOM else codec.nearest(x, FORMAT)
        to = codes_of(at, FORMAT) + element
        tl.store(to, code.to(to.dtype.element_ty), mask=inside)


@triton.jit
def row_sum(x, BLOCK: tl.constexpr):
    """The sum of a row in the order of :func:`.rows.row_sum`."""
    parts = tl.reshape(x, (BLOCK // constant("LANES"), constant("LANES")))
    part = tl.arange(0, BLOCK // constant("LANES"))[:, None]
    lanes = tl.zeros((constant("LANES"),), tl.float32)
    for i in tl.static_range(BLOCK // constant("LANES")):
        # One of the terms is not zero: no order shows.
        lanes += tl.sum(tl.where(part == i, parts, 0.0), axis=0)
    # A sum of two has one order.
    eight = tl.sum(tl.reshape(lanes, (2, 8)), axis=0)
    four = tl.sum(tl.reshape(eight, (2, 4)), axis=0)
    two = tl.sum(tl.reshape(four, (2, 2)), axis=0)
    return tl.sum(two, axis=0)


@triton.jit
def row_sums(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`row_sum` of each of some rows."""
    parts: tl.constexpr = BLOCK // constant("LANES")
    each = split_all(tl.permute(tl.reshape(x, (ROWS, parts, constant("LANES"))), (0, 2, 1)), parts)
    lanes = tl.zeros((ROWS, constant("LANES")), tl.float32)
    for i in tl.static_range(parts):
        lanes += each[i]
    eight = tl.sum(tl.reshape(lanes, (ROWS, 2, 8)), axis=1)
    four = tl.sum(tl.reshape(eight, (ROWS, 2, 4)), axis=1)
    two = tl.sum(tl.reshape(four, (ROWS, 2, 2)), axis=1)
    return tl.sum(two, axis=1)


@triton.jit
def split_all(x, COUNT: tl.constexpr):
    """The slices of (rows, lanes, count), in their order."""
    if COUNT == 1:
        found = (tl.reshape(x, (x.shape[0], x.shape[1])),)
    else:
        halves = tl.reshape(x, (x.shape[0], x.shape[1], 2, COUNT // 2))
        low, high = tl.split(tl.permute(halves, (0, 1, 3, 2)))
        found = split_all(low, COUNT // 2) + split_all(high, COUNT // 2)
    return found

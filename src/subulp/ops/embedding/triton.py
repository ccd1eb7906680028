# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Embedding ops in Triton: a program pools a bag, or updates the rows of a set one by one.

Tables are launched one by one: those of other storages are other kernels.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.ieee import as_fp32
from ...numerics.int_rows import PARAMETER_BYTES
from ...numerics.metrics import LANES
from ...numerics.random_bits import MIX, MIX_LAST
from ..triton import codec, launch, random_bits
from . import rows as stored
from .job import (
    BYPASS_SLOT,
    COUNT_LIMIT,
    EVICT_SLOT,
    Job,
    Table,
    TableUpdate,
    check_finite,
    check_tags,
    check_values,
)

_CONSTANTS = {
    "LANES": LANES,
    "PARAMETER_BYTES": PARAMETER_BYTES,
    "COUNT_LIMIT": COUNT_LIMIT,
    "BYPASS_SLOT": BYPASS_SLOT,
    "EVICT_SLOT": EVICT_SLOT,
}

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def run(job: Job) -> Tensor | None:
    """Run ``job``.

    Raises:
        ValueError: Offsets do not fit, or a cache holds rows that its table does not have.
        IndexError: A row number is out of range.
        RuntimeError: The kernels do not run on the device of the tables.
    """
    launch.check_device(update_kernel, job.device)
    scope = torch.cuda.device(job.device) if job.device.type == "cuda" else contextlib.nullcontext()
    with scope:
        check_values(job)
        if job.kind == "update":
            check_finite(job)
            check_tags(job)
            for t in range(len(job.tables)):
                _update_table(job, t)
            return None
        return _look_up(job)


# ---------------------------------------------------------------------------------------- lookups


def _look_up(job: Job) -> Tensor:
    """Pool the bags, or compute the gradient of their weights."""
    looked, device = job.lookups, job.device
    columns, batch = looked.columns(job.tables), looked.batch
    pools = job.kind == "pool"
    # The weights' gradient takes the same argument and leaves it alone.
    statistics = torch.zeros(len(job.tables), 2, dtype=torch.int64, device=device)
    if pools:
        assert job.statistics is not None
        statistics = job.statistics
        out = torch.empty(batch, columns[-1], dtype=torch.float32, device=device)
    else:
        assert job.grad is not None
        out = torch.zeros(looked.values.shape, dtype=torch.float32, device=device)
    for feature, t in enumerate(looked.features if batch else ()):
        table = job.tables[t]
        place = [columns[feature], columns[-1], feature * batch]
        lookup_kernel[(batch,)](
            *_table_arguments(table),
            looked.values,
            looked.offsets,
            looked.values if looked.weights is None else looked.weights,
            out if pools else job.grad,
            out,
            statistics[t],
            torch.tensor([*_shape(table), *place], dtype=torch.int64, device=device),
            **_table_options(table),
            POOL=pools,
            WEIGHTED=looked.weights is not None,
            enable_fp_fusion=False,
        )
    return out


def _table_arguments(table: Table) -> tuple[Tensor, Tensor, Tensor]:
    return table.codes.view(_WORDS[table.codes.dtype.itemsize]), table.cache, table.tags


def _shape(table: Table) -> list[int]:
    return [table.dim, table.codes.shape[1], table.sets, table.ways]


def _place(table: Table) -> list[int]:
    place = table.place
    return [place.period, place.first, place.taken, place.dim, place.column]


def _table_options(table: Table) -> dict[str, Any]:
    return {
        "FORMAT": table.storage.name,
        "CACHED": table.sets > 0,
        "MIXED": table.mixed,
        "WAYS": table.ways,
        "BLOCK": max(LANES, triton.next_power_of_2(table.dim)),
        "num_warps": 1 if table.dim <= 128 else 4,
    }


# ----------------------------------------------------------------------------------------- update


def _update_table(job: Job, t: int) -> None:
    table, update, looked = job.tables[t], job.updates[t], job.lookups
    assert job.grad is not None
    assert job.evictions is not None
    order = _order(job, t)
    if order is None:
        return
    positions, grad_at, run_rows, run_starts, segments = order
    key = update.stream << 32 | job.seed
    # The key as a signed number: its bits count.
    key -= (key >> 63) << 64
    reals = [as_fp32(v) for v in (update.lr, update.weight_decay, update.eps)]
    update_kernel[(segments.numel() - 1,)](
        *_table_arguments(table),
        update.counts,
        update.stamps,
        update.accumulator,
        job.evictions[t : t + 1],
        job.grad,
        table.tags if looked.weights is None else looked.weights,
        positions,
        grad_at,
        run_rows,
        run_starts,
        segments,
        torch.tensor(
            [*_shape(table), key, job.step, *_place(table)], dtype=torch.int64, device=job.device
        ),
        torch.tensor(reals, dtype=torch.float32, device=job.device),
        **update_options(table, update, weighted=looked.weights is not None),
        enable_fp_fusion=False,
    )


def update_options(table: Table, update: TableUpdate, *, weighted: bool) -> dict[str, Any]:
    """Constexpr arguments and compiler options of an update."""
    policy = "lfu" if update.counts.numel() else "lru" if update.stamps.numel() else "last"
    return _table_options(table) | {
        "POLICY": policy,
        "RULE": update.rule,
        "RANDOM": update.stochastic and table.storage.name != "fp32",
        "DECAY": update.weight_decay != 0.0,
        "WEIGHTED": weighted,
    }


def _order(job: Job, t: int) -> tuple[Tensor, ...] | None:
    """The table's lookups by set, row and position.

    Returns:
        int64 tensors: positions; where each one's gradient begins; the row of each run of equal
        rows; where runs begin among the positions, and the end; where sets begin among the runs,
        and the end. ``None`` without lookups.
    """
    table, looked, batch = job.tables[t], job.lookups, job.lookups.batch
    columns = looked.columns(job.tables)
    positions, grads = [], []
    for feature in [f for f, mine in enumerate(looked.features) if mine == t]:
        bounds = looked.offsets[feature * batch : (feature + 1) * batch + 1]
        bags = torch.arange(batch, device=job.device) * columns[-1] + columns[feature]
        first, last = bounds[[0, -1]].tolist()
        positions.append(torch.arange(first, last, device=job.device))
        grads.append(torch.repeat_interleave(bags, bounds.diff()))
    if not positions or not sum(map(len, positions)):
        return None
    position, grad_at = torch.cat(positions), torch.cat(grads)
    rows = looked.values[position]
    sets = stored.set_of(rows, table.sets, mixed=table.mixed) if table.sets else rows
    order = torch.argsort(sets * table.rows + rows, stable=True)
    rows, sets = rows[order], sets[order]
    run_rows, run_starts = _runs(rows)
    segments = _runs(sets[run_starts[:-1]])[1]
    return position[order], grad_at[order], run_rows, run_starts, segments


def _runs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The value of each run, and where runs begin, with the end."""
    found, lengths = torch.unique_consecutive(values, return_counts=True)
    return found, torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def compile_lookup(capability: int, table: Table, *, pool: bool) -> Any:
    """Compile the kernel of lookups ahead of time, see :func:`.launch.compile_for`."""
    types = _table_types(table) | {"values": "*i64", "offsets": "*i64", "weights": "*fp32"}
    types |= {"grad": "*fp32", "out": "*fp32", "statistics": "*i64", "numbers": "*i64"}
    options = _table_options(table) | {"POOL": pool, "WEIGHTED": pool}
    return launch.compile_for(lookup_kernel, capability, types, **options)


def compile_update(capability: int, table: Table, update: TableUpdate) -> Any:
    """Compile the kernel of updates ahead of time."""
    types = _table_types(table) | {"counts": "*i32", "stamps": "*i32", "accumulator": "*fp32"}
    types |= {"evictions": "*i64", "grad": "*fp32", "weights": "*fp32"}
    orders = ("positions", "grad_at", "run_rows", "run_starts", "segments", "numbers")
    types |= dict.fromkeys(orders, "*i64") | {"reals": "*fp32"}
    options = update_options(table, update, weighted=True)
    return launch.compile_for(update_kernel, capability, types, **options)


def _table_types(table: Table) -> dict[str, str]:
    word = {1: "*u8", 2: "*i16", 4: "*i32"}[table.codes.dtype.itemsize]
    return {"codes": word, "cache": "*fp32", "tags": "*i32"}


# ----------------------------------------------------------------------------------------- kernels


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


@triton.jit
def lookup_kernel(
    codes,
    cache,
    tags,
    values,
    offsets,
    weights,
    grad,
    out,
    statistics,
    numbers,
    FORMAT: tl.constexpr,
    CACHED: tl.constexpr,
    MIXED: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    dim, stride, sets = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    column, width, first_bag = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    bag = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    inside = element < dim
    first = tl.load(offsets + first_bag + bag)
    last = tl.load(offsets + first_bag + bag + 1)
    at = bag * width + column + element
    hits = first * 0
    total = tl.zeros((BLOCK,), tl.float32)
    if not POOL:
        total = tl.load(grad + at, mask=inside, other=0.0)
    for k in range(first, last):
        row = tl.load(values + k)
        place = find(tags, row, sets, CACHED, MIXED, WAYS)
        x = fetch(codes, cache, row, place, dim, stride, element, inside, FORMAT, BLOCK)
        hits += (place >= 0).to(tl.int64)
        if POOL:
            if WEIGHTED:
                x = x * tl.load(weights + k)
            total += x
        else:
            tl.store(out + k, row_sum(total * x, BLOCK))
    if POOL:
        tl.store(out + at, total, mask=inside)
        tl.atomic_add(statistics, last - first)
        tl.atomic_add(statistics + 1, hits)


@triton.jit
def update_kernel(
    codes,
    cache,
    tags,
    counts,
    stamps,
    accumulator,
    evictions,
    grad,
    weights,
    positions,
    grad_at,
    run_rows,
    run_starts,
    segments,
    numbers,
    reals,
    FORMAT: tl.constexpr,
    CACHED: tl.constexpr,
    MIXED: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    POLICY: tl.constexpr,
    RULE: tl.constexpr,
    RANDOM: tl.constexpr,
    DECAY: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    dim, stride, sets = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    key, step = tl.load(numbers + 4).to(tl.uint64), tl.load(numbers + 5)
    lr, decay, eps = tl.load(reals), tl.load(reals + 1), tl.load(reals + 2)
    element = tl.arange(0, BLOCK)
    inside = element < dim
    segment = tl.program_id(0)
    for r in range(tl.load(segments + segment), tl.load(segments + segment + 1)):
        row = tl.load(run_rows + r)
        first, last = tl.load(run_starts + r), tl.load(run_starts + r + 1)
        g = tl.zeros((BLOCK,), tl.float32)
        for e in range(first, last):
            term = tl.load(grad + tl.load(grad_at + e) + element, mask=inside, other=0.0)
            if WEIGHTED:
                term = term * tl.load(weights + tl.load(positions + e))
            g += term
        place = find(tags, row, sets, CACHED, MIXED, WAYS)
        x = fetch(codes, cache, row, place, dim, stride, element, inside, FORMAT, BLOCK)

        if DECAY:
            g = g + x * decay
        if RULE == "sgd":
            x = x - g * lr
        elif RULE == "adagrad":
            at = accumulator + row * dim + element
            total = tl.load(at, mask=inside, other=0.0) + g * g
            tl.store(at, total, mask=inside)
            x = x - tl.div_rn(g * lr, tl.sqrt_rn(total) + eps)
        else:
            mean = tl.div_rn(row_sum(tl.where(inside, g * g, 0.0), BLOCK), dim.to(tl.float32))
            total = tl.load(accumulator + row) + mean
            # Other threads than the one that stores it have read it.
            tl.debug_barrier()
            tl.store(accumulator + row, total)
            x = x - g * tl.div_rn(lr, tl.sqrt_rn(total) + eps)

        own = step
        if POLICY == "lfu":
            own = tl.minimum(
                tl.load(counts + row).to(tl.int64) + (last - first), constant("COUNT_LIMIT")
            )
            tl.debug_barrier()
            tl.store(counts + row, own.to(tl.int32))
        # What leaves FP32: this row, or the one whose place it takes.
        leaves, leaving, slot = place < 0, row, row * 0
        value = x
        if CACHED:
            way = tl.arange(0, WAYS)
            set_first = set_of(row, sets, MIXED) * WAYS
            tag = tl.load(tags + set_first + way)
            if POLICY == "lfu":
                priority = tl.load(counts + tag, mask=tag >= 0, other=0).to(tl.int64)
            elif POLICY == "lru":
                priority = tl.load(stamps + set_first + way).to(tl.int64)
            else:
                priority = (way * 0).to(tl.int64) - 1
            priority = tl.where(tag < 0, -2, priority)
            least = tl.min(priority, axis=0)
            victim = tl.min(tl.where(priority == least, way, WAYS), axis=0)
            old = tl.sum(tl.where(way == victim, tag, 0), axis=0).to(tl.int64)
            enters = (place < 0) & (own > least)
            evicts = enters & (least > -2)
            leaves = (place < 0) & ((least > -2) | (own <= least))
            if enters:
                place = set_first + victim
            if evicts:
                value = tl.load(cache + place * dim + element, mask=inside, other=0.0)
                leaving = old
                slot = tl.where(old > row, constant("EVICT_SLOT"), constant("BYPASS_SLOT")).to(
                    tl.int64
                )
                tl.atomic_add(evictions, 1)
            tl.debug_barrier()
            if place >= 0:
                tl.store(cache + place * dim + element, x, mask=inside)
                tl.store(tags + place, row.to(tl.int32))
                if POLICY == "lru":
                    tl.store(stamps + place, step.to(tl.int32))
        if leaves:
            index = first_element(leaving, numbers + 6) + element
            bits = random(index, key, step, slot, random_bits_of(FORMAT), RANDOM)
            encode(codes, leaving, value, bits, dim, stride, element, inside, FORMAT, RANDOM, BLOCK)
        # The next row may be the one that left.
        tl.debug_barrier()


@triton.jit
def first_element(row, place):
    """See :meth:`.job.Part.element`."""
    period, first, taken = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    whole = row // taken * period + first + row % taken
    return whole * tl.load(place + 3) + tl.load(place + 4)


@triton.jit
def set_of(row, sets, MIXED: tl.constexpr):
    """See :func:`.rows.set_of`."""
    if MIXED:
        h = row.to(tl.uint32)
        for i in tl.static_range(mix_rounds()):
            h = (h ^ (h >> mix_shift(i))) * mix_factor(i)
        row = (h ^ (h >> mix_shift(mix_rounds()))).to(tl.int64)
    return row % sets


@triton.jit
def find(tags, row, sets, CACHED: tl.constexpr, MIXED: tl.constexpr, WAYS: tl.constexpr):
    """Where a row lies in the cache, int64, or -1."""
    place = row * 0 - 1
    if CACHED:
        first = set_of(row, sets, MIXED) * WAYS
        way = tl.arange(0, WAYS)
        match = tl.load(tags + first + way).to(tl.int64) == row
        found = tl.min(tl.where(match, way, WAYS), axis=0)
        place = tl.where(found < WAYS, first + found, place)
    return place


@triton.jit
def fetch(
    codes,
    cache,
    row,
    place,
    dim,
    stride,
    element,
    inside,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """FP32 row, zeros beyond its end."""
    x = tl.zeros((BLOCK,), tl.float32)
    if place >= 0:
        x = tl.load(cache + place * dim + element, mask=inside, other=0.0)
    else:
        at = codes + row * stride
        if int_bits(FORMAT):
            place_in_byte = (element * int_bits(FORMAT)) % 8
            byte = tl.load(
                at + constant("PARAMETER_BYTES") + element * int_bits(FORMAT) // 8,
                mask=inside,
                other=0,
            )
            q = (byte.to(tl.int32) >> place_in_byte) & ((1 << int_bits(FORMAT)) - 1)
            x = q.to(tl.float32) * unaligned(at) + unaligned(at + 4)
            x = tl.where(inside, x, 0.0)
        else:
            code = tl.load(at + element, mask=inside, other=0).to(tl.uint32)
            x = codec.value(code & ((1 << codec.width(FORMAT)) - 1), FORMAT)
    return x


@triton.jit
def unaligned(at):
    """FP32 number at any byte."""
    byte = tl.arange(0, 4)
    word = tl.sum(tl.load(at + byte).to(tl.uint32) << (byte * 8).to(tl.uint32), axis=0)
    return word.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def encode(
    codes,
    row,
    x,
    bits,
    dim,
    stride,
    element,
    inside,
    FORMAT: tl.constexpr,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round an FP32 row into the table."""
    at = codes + row * stride
    if int_bits(FORMAT):
        encode_integers(at, x, bits, dim, inside, int_bits(FORMAT), RANDOM, BLOCK)
    else:
        code = codec.stochastic(x, bits, FORMAT) if RANDOM else codec.nearest(x, FORMAT)
        tl.store(at + element, code.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def encode_integers(
    at, x, bits, dim, inside, BITS: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr
):
    """See :func:`subulp.numerics.int_rows.encode`."""
    top: tl.constexpr = (1 << BITS) - 1
    per_byte: tl.constexpr = 8 // BITS
    magnitude = tl.where(inside, codec.magnitude_of(x), 0)
    bias = tl.min(tl.where(inside, x, float("inf")), axis=0) + 0.0
    span = tl.max(tl.where(inside, x, float("-inf")), axis=0) - bias
    valid = (tl.max(magnitude, axis=0) < 0x7F800000) & (span < float("inf"))
    scale = tl.div_rn(span, top * 1.0)
    used = valid & (scale > 0.0)
    scale = tl.where(used, scale, 0.0)
    t = tl.div_rn(x - bias, tl.where(used, scale, 1.0))
    t = tl.where(inside & used & (t > 0.0), t, 0.0)
    # Adding 1.5 * 2^23 leaves no fraction bits: rounded to nearest even, the integer lowest.
    shifted = t + 12582912.0
    q = (shifted.to(tl.uint32, bitcast=True) - 0x4B400000).to(tl.int32)
    if RANDOM:
        whole = shifted - 12582912.0
        above = whole > t
        below = tl.where(above, whole - 1.0, whole)
        u = (bits >> 8).to(tl.float32) * 5.9604644775390625e-8
        q = q - above.to(tl.int32) + (t - below > u).to(tl.int32)
    q = tl.where(inside, tl.minimum(q, top), 0)
    shift = (tl.arange(0, BLOCK) % per_byte) * BITS
    packed = tl.sum(tl.reshape(q << shift, (BLOCK // per_byte, per_byte)), axis=1)
    byte = tl.arange(0, BLOCK // per_byte)
    tl.store(
        at + constant("PARAMETER_BYTES") + byte, packed.to(tl.uint8), mask=byte * per_byte < dim
    )
    nan = tl.where(valid, 0, 0x7FC00000).to(tl.uint32)
    scale_bits = tl.where(valid, scale.to(tl.uint32, bitcast=True), nan)
    bias_bits = tl.where(valid, bias.to(tl.uint32, bitcast=True), nan)
    which = tl.arange(0, 8)
    word = tl.where(which < 4, scale_bits, bias_bits) >> ((which % 4) * 8).to(tl.uint32)
    tl.store(at + which, (word & 255).to(tl.uint8))


@triton.jit
def random(index, key, step, slot, WIDTH: tl.constexpr, RANDOM: tl.constexpr):
    """Bits of scattered elements, see :func:`subulp.numerics.random_bits.draw_at`; else nothing."""
    bits = index.to(tl.uint32)
    if RANDOM:
        bits = random_bits.draw_at(index, key, step.to(tl.uint32), slot.to(tl.uint32), WIDTH)
    return bits


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

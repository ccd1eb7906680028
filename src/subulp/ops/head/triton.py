# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Head step in Triton: the gradient product and the update of a block of rows in one kernel.

ELMO, algorithm 1, ``fuse_update``: weights are read, stepped and written where the product of logit
gradients and inputs has just been summed up, so that no gradient of them reaches memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import Format
from ...numerics.ieee import as_fp32
from ...numerics.int_rows import IntFormat
from ..triton import codec, launch, random_bits, tuning
from ..triton.choices import Configuration
from ..triton.faults import record
from . import HeadJob, fp8, tiles, triton_integers, triton_logistic, triton_rows
from .triton_dropout import factor_of, kept_at

TILE_BYTES = 256 * 1024 * 1024
"""Bytes of a tile's decoded weights: on a GPU, tiles bound memory and need not fit a cache."""

BLOCK_BATCH = 16
"""Instances whose gradients are summed at once: an order of the sums, which no configuration
changes."""

_SMALL: tuning.Table = (
    # Fewer elements a thread leave registers to the random bits.
    {"BLOCK_LABELS": 64, "BLOCK_DIM": 64, "num_warps": 8},
    {"BLOCK_LABELS": 64, "BLOCK_DIM": 32, "num_warps": 4, **launch.registers(255)},
    {"BLOCK_LABELS": 128, "BLOCK_DIM": 32, "num_warps": 8},
    {"BLOCK_LABELS": 64, "BLOCK_DIM": 32, "num_warps": 8},
)
_LARGE: tuning.Table = (
    {"BLOCK_LABELS": 128, "BLOCK_DIM": 64, "num_warps": 8},
    {"BLOCK_LABELS": 64, "BLOCK_DIM": 128, "num_warps": 8},
)


def configurations(flags: Mapping[str, Any]) -> tuning.Table:
    """Sizes of the part of the rows that a program updates.

    With fewer than 64 labels or four warps, or with more than eight of these, some GPUs multiply on
    other units, which add in another order.

    Args:
        flags: The other constexpr arguments.
    """
    # Each element draws bits of its own, whose registers larger parts do not leave.
    draws = flags["DROPOUT"] or (flags["RANDOM"] and not flags["ALIGNED"])
    return _SMALL if draws else _SMALL + _LARGE


MOST = 1 << 17
"""Heads with more labels, dimensions or instances are measured as one of so many."""

_MOST_ELEMENTS = 1 << 26


def run(job: HeadJob) -> None:
    """Run ``job``: the operations of :func:`.tiles.run`, with narrow operands in memory.

    No row is updated where a fault was found that the host has not raised yet, see
    :mod:`subulp.ops.triton.faults`.

    Raises:
        RuntimeError: The kernels do not run on the device of the rows, or a CUDA graph is being
            captured, which would replay the learning rate that rows step with now.
    """
    launch.check_device(update_kernel, job.device)
    if job.train:
        launch.refuse_capture(job.device)
    narrow = job.products != "fp32"
    wide = torch.bfloat16 if narrow else torch.float32
    operands = {} if job.operands is None else job.operands
    x, x_logits = _inputs(job, wide, operands)
    loss = tiles.exact_loss(job)
    size = min(max(1, TILE_BYTES // (wide.itemsize * job.dim)), job.chunk_rows)
    of_tile = torch.empty(job.x.shape, dtype=torch.float32, device=job.device)
    for place in tiles.Place.all_of(job, size):
        rows = job.rows[place.start : place.stop]
        address = _address(job, place.start)
        units = x_logits.dtype == torch.float8_e4m3fn
        weight, stored, scale = _weights(job, rows, place, address, wide, codes=units)
        factor = scale
        if stored is not None:
            logits = fp8.unit_logits(stored, x_logits, operands["scales"])[:, : job.x.shape[0]]
            factor = 1.0
        else:
            logits = _mm(weight, x_logits.t())
        g = None
        if job.train or job.gradient:
            g = torch.empty(logits.shape, dtype=wide, device=job.device) if narrow else logits
        terms = triton_logistic.run(
            logits[place.own],
            job.positive_labels,
            job.positive_instances,
            job.first_label + place.start,
            job.gain,
            gradient=g,
            loss=loss is not None,
            narrow=narrow,
            scale=factor,
            before=place.before,
        )
        if loss is not None and terms is not None:
            loss.add(terms)
        if g is None:
            continue
        # Not addmm: a product that starts from a large sum rounds each of its terms to it.
        _mm(g.t(), weight, of_tile)
        if job.train and isinstance(job.format, IntFormat) and rows.shape[0]:
            gradient = _mm(g[place.own], x)
            triton_integers.step(job, place.start, rows, gradient, address, of_tile)
            continue
        job.grad_x.add_(of_tile, alpha=scale)
        if job.train and not isinstance(job.format, IntFormat):
            fused_update(job, place.start, rows, g[place.own], x, address)
    if loss is not None and loss is not job.loss:
        loss.flush()


def _weights(
    job: HeadJob,
    rows: Tensor,
    place: tiles.Place,
    address: Tensor,
    wide: torch.dtype,
    *,
    codes: bool,
) -> tuple[Tensor, Tensor | None, float]:
    """A tile as the products take it, as it is stored if ``codes``, and the factor of its sums."""
    if isinstance(job.format, IntFormat):
        return triton_integers.decoded(job, rows, place, address), None, 1.0
    decoded = partial(triton_rows.decoded, rows, place, address, wide)
    if job.train and job.dropout != 0.0:
        return *decoded(scale=job.scale, dropout=job.dropout), 1.0
    # Without their scale, a power of two.
    if place.whole:
        return rows.to(wide), rows if codes else None, job.scale
    return *decoded(codes=codes), job.scale


def _inputs(job: HeadJob, wide: torch.dtype, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The inputs as the update takes them, and as the logits do; once for all chunks of a step."""
    if "x" not in kept:
        kept["x"] = kept["logits"] = job.x.to(wide)
        # Weights scaled by dropout are no numbers of E4M3.
        drops = job.train and job.dropout != 0.0
        if job.products == "fp8" and fp8.units_for(job.device, job.dim) and not drops:
            kept["logits"] = fp8.unit_inputs(job.x)
            kept["scales"] = fp8.scales(job.scale, job.device)
        elif job.products == "fp8":
            # Numbers of E4M3 are BF16's, whose units multiply them as well.
            kept["logits"] = fp8.inputs(job.x).to(wide)
    return kept["x"], kept["logits"]


def _mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The product, summed in FP32: FP32."""
    if out is None:
        out = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    # CPUs have no product with sums wider than its factors.
    return torch.mm(a.float(), b.float(), out=out)


def fused_update(
    job: HeadJob, first: int, rows: Tensor, g: Tensor, x: Tensor, address: Tensor
) -> None:
    """``rows -= lr * (g @ x + weight_decay * rows)``, rounded, in place.

    Args:
        job: The chunk's step.
        first: The rows' place in the chunk.
        rows: ``(labels, dim)`` stored values.
        g: FP32 or BF16 ``(labels, batch)``, the gradient of the logits.
        x: The inputs, of the dtype of ``g``.
        address: Of the random bits of the first row, see :func:`_address`.
    """
    labels, dim = rows.shape
    flags = flags_of(job, job.random.offset + first * dim, precise=job.precise > first)
    precise = min(max(job.precise - first, 0), labels)
    # Without a remainder any pointer does: it is not read.
    remainder = g if job.remainder is None or not precise else job.remainder[first:]
    numbers = as_fp32(job.lr), as_fp32(job.weight_decay), job.scale, 1.0 / job.scale
    found = record(job.device).found

    def run(configuration: Configuration, rows: Tensor, remainder: Tensor) -> None:
        labels = rows.shape[0]
        on_gpu = job.device.type == "cuda"
        with torch.cuda.device(job.device) if on_gpu else contextlib.nullcontext():
            grid = (
                triton.cdiv(labels, configuration["BLOCK_LABELS"]),
                triton.cdiv(dim, configuration["BLOCK_DIM"]),
            )
            update_kernel[grid](
                rows.view(codec.WORDS[rows.dtype.itemsize]),
                *(remainder, g, x, min(precise, labels), labels, dim, job.x.shape[0]),
                *(*numbers, factor_of(job.dropout), address, found),
                **flags,
                **configuration,
                enable_fp_fusion=False,
            )

    def scratch() -> tuning.Run:
        some = max(1, _MOST_ELEMENTS // dim)
        if dim * min(some, labels) * 4 > tuning.share_of_memory(job.device):
            raise tuning.TooLargeError
        return partial(run, rows=rows[:some].clone(), remainder=remainder[:some].clone())

    sizes = {"labels": labels, "dim": dim, "batch": job.x.shape[0]}
    named = flags | {"g": g.dtype}
    named |= {name: tuning.rounded(size, MOST) for name, size in sizes.items()}
    configuration = tuning.choose(
        "update_kernel of heads", configurations(flags), named, job.device, scratch
    )
    run(configuration, rows, remainder)


def _address(job: HeadJob, first: int) -> Tensor:
    """Key, step and offset of the random bits of rows, and which of them keep a weight: int64.

    In memory: the width of a scalar argument depends on its value.
    """
    key = np.array(job.random.stream << 32 | job.random.seed, dtype=np.uint64).view(np.int64)
    offset, least = job.random.offset + first * job.dim, round(job.dropout * 2**32)
    numbers = np.array([int(key), job.random.step, offset, least], dtype=np.int64)
    return launch.upload(job.device, numbers)[0]


def flags_of(job: HeadJob, offset: int, *, precise: bool) -> dict[str, Any]:
    """Constexpr arguments of a launch, but for its configuration.

    Args:
        job: The chunk's step.
        offset: Where the random bits of the first row begin.
        precise: Whether some of the rows have a remainder.
    """
    assert isinstance(job.format, Format)
    name = codec.name_of(job.format)
    return {
        "FORMAT": name,
        "RANDOM": job.rounding == "stochastic" and name != "fp32",
        "DECAY": job.weight_decay != 0.0,
        # Every row begins with a new counter of the random bits.
        "ALIGNED": job.dim % 8 == 0 and offset % 8 == 0,
        "PRECISE": precise,
        "DROPOUT": job.dropout != 0.0,
        # The interpreter takes BF16 numbers for integers.
        "UNITS": isinstance(update_kernel, triton.JITFunction),
        "BLOCK_BATCH": BLOCK_BATCH,
    }


def compile_for(
    target: launch.Target, job: HeadJob, configuration: Configuration | None = None
) -> Any:
    """Compile the update of all of a job's rows ahead of time, see :func:`.launch.compile_for`."""
    word = {1: "*u8", 2: "*i16", 4: "*i32"}[job.rows.dtype.itemsize]
    operand = "*fp32" if job.products == "fp32" else "*bf16"
    arguments: dict[str, str | int] = {"rows": word, "g": operand, "x": operand}
    # Without a remainder the gradient takes its place.
    arguments["remainder"] = "*bf16" if job.precise else operand
    arguments |= {"precise": job.precise, "labels": job.rows.shape[0], "dim": job.dim}
    arguments["batch"] = job.x.shape[0]
    arguments |= dict.fromkeys(("lr", "weight_decay", "scale", "unit", "factor"), "fp32")
    arguments |= {"address": "*i64", "found": "*i32"}
    options = flags_of(job, job.random.offset, precise=job.precise > 0)
    options |= configuration or configurations(options)[0]
    return launch.compile_for(update_kernel, target, arguments, **options)


@triton.jit
def update_kernel(
    rows,
    remainder,
    g,
    x,
    precise,
    labels,
    dim,
    batch,
    lr,
    weight_decay,
    scale,
    unit,
    factor,
    address,
    found,
    FORMAT: tl.constexpr,
    RANDOM: tl.constexpr,
    DECAY: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISE: tl.constexpr,
    DROPOUT: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_LABELS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
):
    label = tl.program_id(0) * BLOCK_LABELS + tl.arange(0, BLOCK_LABELS)
    place = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    gradient = tl.zeros((BLOCK_LABELS, BLOCK_DIM), tl.float32)
    for start in range(0, batch, BLOCK_BATCH):
        instance = start + tl.arange(0, BLOCK_BATCH)
        g_block = tl.load(
            g + label[:, None].to(tl.int64) * batch + instance[None, :],
            mask=(label < labels)[:, None] & (instance < batch)[None, :],
            other=0.0,
        )
        x_block = tl.load(
            x + instance[:, None].to(tl.int64) * dim + place[None, :],
            mask=(instance < batch)[:, None] & (place < dim)[None, :],
            other=0.0,
        )
        if not UNITS:
            g_block, x_block = g_block.to(tl.float32), x_block.to(tl.float32)
        gradient = tl.dot(g_block, x_block, gradient, input_precision="ieee")

    at = label[:, None].to(tl.int64) * dim + place[None, :]
    # Nothing is stored where something was found.
    allowed = tl.where(tl.load(found) == 0, labels, 0)
    inside = (label < allowed)[:, None] & (place < dim)[None, :]
    theta = codec.stored_value(tl.load(rows + at, mask=inside, other=0), FORMAT)
    if DROPOUT:
        gradient = gradient * kept_at(at, factor, address)
    # A stored value is 1 / scale of its weight, and so is its gradient's step.
    of_stored = gradient * unit
    if DECAY:
        of_stored = of_stored + theta * weight_decay
    wide = theta - of_stored * lr
    if RANDOM:
        first = tl.program_id(1) * BLOCK_DIM
        key, step = tl.load(address).to(tl.uint64), tl.load(address + 1).to(tl.uint32)
        bits = row_bits(
            tl.load(address + 2) + label[:, None].to(tl.int64) * dim + first,
            key,
            step,
            codec.random_width(FORMAT),
            ALIGNED,
            BLOCK_LABELS,
            BLOCK_DIM,
        )
        new = codec.stochastic(wide, bits, FORMAT)
    else:
        new = codec.nearest(wide, FORMAT)
    if PRECISE:
        # Rows with a remainder step as what both stand for, and keep what rounding takes away.
        kept = inside & (label < precise)[:, None]
        low = tl.load(remainder + at, mask=kept, other=0.0).to(tl.float32)
        weight = theta * scale + low
        if DECAY:
            gradient = gradient + weight * weight_decay
        weight = weight - gradient * lr
        nearest = codec.nearest(weight * unit, FORMAT)
        half = codec.nearest(weight - codec.value(nearest, FORMAT) * scale, "bf16").to(tl.uint16)
        tl.store(remainder + at, half.to(tl.bfloat16, bitcast=True), mask=kept)
        new = tl.where(kept, nearest, new)
    tl.store(rows + at, codec.word(new, FORMAT).to(rows.dtype.element_ty), mask=inside)


@triton.jit
def row_bits(
    first,
    key,
    step,
    width: tl.constexpr,
    aligned: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Random bits, uint32 (rows, columns), of runs of elements that begin at ``first`` (rows, 1).

    ``aligned``: every run begins with a new counter, which then serves 4 or 8 elements.
    """
    if aligned:
        per_counter: tl.constexpr = 128 // width
        counter = first // per_counter + tl.arange(0, columns // per_counter)[None, :]
        words = random_bits.of_counters(counter, key, step, width)
        bits = tl.reshape(words, (rows, columns))
    else:
        index = first + tl.arange(0, columns)[None, :]
        bits = random_bits.draw_at(index, key, step, 0, width)
    return bits

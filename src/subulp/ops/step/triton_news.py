# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What is new in each step, in Triton: the table that kernels read, and who fills it on the device.

The host fills the table and uploads it. A step that may be captured in a CUDA graph has it filled
by a launch of its own, which counts the step: the same operations on the same FP64 numbers, so the
same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import launch
from .counts import Counts, corrections
from .job import GOLDEN, NEWS, THIRD, StepJob

BLOCK = 128
"""Tensors per block: one for each thread of four warps."""

NEW_COLUMNS = {name: i for i, name in enumerate(NEWS)}
_COLUMNS = {name: i for i, name in enumerate(("step", "fresh"))}
_INTEGERS = (
    *("count", "biases_count", "roots_count"),
    *("rate_high", "rate_low", "factor_high", "factor_low"),
)


def run(job: StepJob) -> tuple[Tensor, Tensor]:
    """Count a step, and compute what is new in it.

    Args:
        job: The step; its counters are incremented.

    Returns:
        The table: int32, a row for each tensor; and what the programs of
        :mod:`.triton_scales` leave for each other, int32 ``(count, 2)``, without rows if no states
        are scaled.
    """
    assert job.counts is not None
    counts, device, count = job.counts, job.device, len(job.params)
    steps = launch.addresses(counts.steps, count)
    fresh = np.array(counts.fresh or [False] * count, dtype=np.int64)
    table = np.stack((steps, fresh), axis=1)
    programs, tensors = launch.kept(device, table, _tables, counts.held)
    biases, roots, lengths = _corrections(counts, device)
    lr = None
    if isinstance(counts.lr, Tensor):
        lr = counts.lr
        # The group may be given another one, and the graph goes on reading this one.
        counts.held.keep(device, (lr,))
    news = torch.empty(count, len(NEWS), dtype=torch.int32, device=device)
    scaled = 0 if job.scaling is None else count
    progress = torch.empty(scaled, 2, dtype=torch.int32, device=device)
    rate = 0.0 if lr is not None else float(counts.lr)
    integers = count, *lengths, *_halves(rate), *_halves(counts.weight_decay)
    args = programs, tensors, biases, roots, lr, news, progress if scaled else None, *integers
    launch.launch(counts_kernel, device, *args, **_options(job))
    return news, progress


def compile_for(target: launch.Target, job: StepJob) -> Any:
    """Compile the kernel that ``run`` would launch."""
    assert job.counts is not None
    types = {"programs": "*i64", "tensors": "*i64", "news": "*i32"}
    types |= dict.fromkeys(_INTEGERS, "i32")
    rate = {torch.float32: "*fp32", torch.float64: "*fp64"}
    lr = job.counts.lr
    optional = {
        "biases": "*fp64" if job.counts.betas else None,
        "roots": "*fp32" if job.counts.betas else None,
        "lr": rate[lr.dtype] if isinstance(lr, Tensor) else None,
        "progress": None if job.scaling is None else "*i32",
    }
    types |= {name: given for name, given in optional.items() if given is not None}
    absent = {name: None for name, given in optional.items() if given is None}
    return launch.compile_for(counts_kernel, target, types, **_options(job), **absent)


def _tables(table: np.ndarray) -> tuple[np.ndarray, ...]:
    return launch.plan(np.array([len(table)]), BLOCK), table


def _corrections(
    counts: Counts, device: torch.device
) -> tuple[Tensor | None, Tensor | None, tuple[int, int]]:
    """Tables of the bias corrections on ``device``, and their lengths."""
    if counts.betas is None:
        return None, None, (0, 0)
    tables = corrections(*counts.betas)
    biases, roots = counts.held.find(
        device,
        ("corrections", device, counts.betas),
        lambda: tuple(launch.upload(device, *tables)),
        large="the bias corrections",
    )
    return biases, roots, (len(tables[0]), len(tables[1]))


def _halves(number: float) -> tuple[int, int]:
    """The upper and the lower half of an FP64 number, which is no type of an argument."""
    low, high = np.array([number], dtype="<f8").view("<i4").tolist()
    return high, low


def _options(job: StepJob) -> dict[str, Any]:
    assert job.counts is not None
    return {
        "ADAM": job.counts.betas is not None,
        "RATE": isinstance(job.counts.lr, Tensor),
        "SCALED": job.scaling is not None,
        "GOLDEN": GOLDEN,
        "THIRD": THIRD,
        "LAYOUT": launch.layout(_COLUMNS, NEW_COLUMNS),
        "BLOCK": BLOCK,
        "num_warps": 4,
    }


@triton.constexpr_function
def new_columns():
    """Columns of the table of what is new."""
    return len(NEW_COLUMNS)


@triton.constexpr_function
def new_column(name):
    """A column of the table of what is new."""
    return NEW_COLUMNS[name]


@triton.constexpr_function
def columns():
    """Columns of the table of tensors."""
    return len(_COLUMNS)


@triton.constexpr_function
def column(name):
    """A column of the table of tensors."""
    return _COLUMNS[name]


@triton.jit(do_not_specialize=_INTEGERS)
def counts_kernel(
    programs,
    tensors,
    biases,
    roots,
    lr,
    news,
    progress,
    count,
    biases_count,
    roots_count,
    rate_high,
    rate_low,
    factor_high,
    factor_low,
    ADAM: tl.constexpr,
    RATE: tl.constexpr,
    SCALED: tl.constexpr,
    GOLDEN: tl.constexpr,
    THIRD: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _, first, end = launch.work(programs)
    rate = tl.load(lr).to(tl.float64) if RATE else whole(rate_high, rate_low)
    for index in tl.range(first, end):
        tensor = index * BLOCK + tl.arange(0, BLOCK)
        inside = tensor < count
        row = tensors + tensor * columns()
        address = tl.load(row + column("step"), mask=inside, other=0)
        counter = address.to(tl.pointer_type(tl.float32))
        t = tl.load(counter, mask=inside, other=0.0) + 1.0
        tl.store(counter, t, mask=inside)
        step = t.to(tl.int64)

        new = news + tensor * new_columns()
        if ADAM:
            # In FP64, rounded once.
            bias = tl.load(biases + place(step, biases_count), mask=inside, other=1.0)
            root = tl.load(roots + place(step, roots_count), mask=inside, other=1.0)
            put(new, "step_size", (rate / bias).to(tl.float32), inside)
            put(new, "inv_sqrt_bias2", root, inside)
            decay = (rate * whole(factor_high, factor_low)).to(tl.float32)
        else:
            put(new, "step_size", tl.zeros((BLOCK,), tl.float32) + rate.to(tl.float32), inside)
            put(new, "inv_sqrt_bias2", tl.full((BLOCK,), 1.0, tl.float32), inside)
            decay = 0.0
        put(new, "decay", tl.zeros((BLOCK,), tl.float32) + decay, inside)
        fresh = tl.load(row + column("fresh"), mask=inside, other=0)
        put(new, "first", ((step == 1) | (fresh != 0)).to(tl.uint32), inside)
        number = step.to(tl.uint32)
        put(new, "step", number, inside)
        put(new, "fast_dither", number * GOLDEN, inside)
        put(new, "slow_dither", number * GOLDEN + THIRD, inside)
        put(new, "extra_dither", number * GOLDEN + 2 * THIRD, inside)
        if SCALED:
            tl.store(progress + tensor * 2, 0, mask=inside)
            tl.store(progress + tensor * 2 + 1, 0, mask=inside)


@triton.jit
def whole(high, low):
    """An FP64 number from its halves."""
    return ((high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)).to(
        tl.float64, bitcast=True
    )


@triton.jit
def place(step, length):
    """Where a table has what belongs to a step; its last entry is that of all later ones."""
    return tl.minimum(tl.maximum(step, 1), length) - 1


@triton.jit
def put(new, name: tl.constexpr, number, inside):
    """Write a word of each row."""
    tl.store(new + new_column(name), number.to(tl.int32, bitcast=True), mask=inside)

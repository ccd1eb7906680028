# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Scales of FP8 states in Triton: the numbers of :mod:`.scales`, computed where the gradients lie.

One launch for all tensors. Its programs leave the largest gradients of their blocks in one place;
a tensor's last one to arrive finds the largest of all there, computes the scales, and updates the
running maximum. The step, launched after it, reads the scales alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import format_of
from ..triton import codec, launch
from . import triton_storage as storage
from .job import StepJob
from .scales import AMAX_MEMORY, FAST_HEADROOM, MOST, SCALES, SLOW_HEADROOM, Scaling, exponent_of

BLOCK = 4096
"""Elements per block: 32 for each thread of four warps."""

STRIP = 512
"""Elements of what is read through masks: four for each thread."""

_COLUMNS = {name: i for i, name in enumerate(("numel", "whole", "grad", "amax", "programs"))}
SCALE_COLUMNS = {name: i for i, name in enumerate(SCALES)}


def progress(job: StepJob) -> np.ndarray:
    """What the programs of a launch leave for each other, before it: int32 ``(count, 2)``.

    The largest code of a tensor, and how many of its programs have arrived. Nothing, if no states
    are scaled.
    """
    return np.zeros((0 if job.scaling is None else len(job.params), 2), dtype=np.int32)


def run(job: StepJob, there: Tensor) -> Tensor | None:
    """Compute the scales of a job's states, and update its running maxima.

    Args:
        job: The step.
        there: Its :func:`progress` on the device; the launch uses it up.

    Returns:
        FP32 ``(count, 5)``, what :data:`.scales.SCALES` name; ``None`` if no states are scaled.
    """
    scaling = job.scaling
    if scaling is None:
        return None
    count = len(job.params)
    grads = launch.addresses(job.grads, count)
    # What is given is not looked for: each tensor has one program, without elements.
    given = None if scaling.found is None else scaling.found.to(job.device).contiguous()
    numel = np.array([g.numel() if given is None else 0 for g in job.grads], dtype=np.int64)
    whole = np.where(grads % launch.ALIGNMENT == 0, numel // BLOCK, 0)
    amaxes = launch.addresses(scaling.amaxes, count)
    table = np.stack((numel, whole, grads, amaxes), axis=1)
    held = None if job.counts is None else job.counts.held
    programs, tensors = launch.kept(job.device, table, _tables, held)
    scales = torch.empty(count, len(SCALES), dtype=torch.float32, device=job.device)
    args = (programs, tensors, there, given, scales)
    launch.launch(scales_kernel, job.device, *args, **_options(job, scaling))
    return scales


def compile_for(target: launch.Target, job: StepJob) -> Any:
    """Compile the kernel that ``run`` would launch."""
    assert job.scaling is not None
    types = {"programs": "*i64", "tensors": "*i64", "progress": "*i32", "scales": "*fp32"}
    options = _options(job, job.scaling)
    if job.scaling.found is None:
        options["given"] = None
    else:
        types["given"] = "*fp32"
    return launch.compile_for(scales_kernel, target, types, **options)


def _tables(table: np.ndarray) -> tuple[np.ndarray, ...]:
    # A tensor without elements has a program too: its running maximum fades like all others.
    programs = launch.plan(np.maximum(table[:, 0], 1), BLOCK)
    count = np.bincount(programs[:, 0], minlength=len(table))
    return programs, np.concatenate((table, count[:, None]), axis=1)


def _options(job: StepJob, scaling: Scaling) -> dict[str, Any]:
    second = scaling.slow_power == 2
    return {
        "GRAD": format_of(job.grads[0].dtype).name,
        "GIVEN": scaling.found is not None,
        "MEMORY": AMAX_MEMORY,
        "MOST": MOST,
        "FAST": exponent_of(FAST_HEADROOM),
        "SLOW": exponent_of(SLOW_HEADROOM if second else FAST_HEADROOM),
        "POWER": scaling.slow_power,
        "LEAST": exponent_of(scaling.least),
        "LAYOUT": launch.layout(_COLUMNS, SCALE_COLUMNS),
        "BLOCK": BLOCK,
        "STRIP": STRIP,
        "num_warps": 4,
    }


@triton.constexpr_function
def columns():
    """Columns of the table of tensors."""
    return len(_COLUMNS)


@triton.constexpr_function
def column(name):
    """A column of the table of tensors."""
    return _COLUMNS[name]


@triton.constexpr_function
def scale_columns():
    """Columns of the table of scales."""
    return len(SCALE_COLUMNS)


@triton.constexpr_function
def scale_column(name):
    """A column of the table of scales."""
    return SCALE_COLUMNS[name]


@triton.jit
def scale(scales, tensor, name: tl.constexpr, scaled: tl.constexpr):
    """A scale of a tensor's states, by its name in :data:`.scales.SCALES`; 1 if they have none."""
    return tl.load(scales + tensor * scale_columns() + scale_column(name)) if scaled else 1.0


@triton.jit
def scales_kernel(
    programs,
    tensors,
    progress,
    given,
    scales,
    GRAD: tl.constexpr,
    GIVEN: tl.constexpr,
    MEMORY: tl.constexpr,
    MOST: tl.constexpr,
    FAST: tl.constexpr,
    SLOW: tl.constexpr,
    POWER: tl.constexpr,
    LEAST: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):
    tensor, first, end = launch.work(programs)
    numel = entry(tensors, tensor, "numel")
    amax = entry(tensors, tensor, "amax").to(tl.pointer_type(tl.float32))
    largest = progress + tensor * 2
    if GIVEN:
        is_last = True
    else:
        grad, whole = entry(tensors, tensor, "grad"), entry(tensors, tensor, "whole")
        code = storage.largest_code(grad, numel, first, whole, end, GRAD, BLOCK, STRIP)
        # An order of codes, not of arrival. Whoever arrives releases what it has left before.
        tl.atomic_max(largest, code.to(tl.int32))
        is_last = tl.atomic_add(largest + 1, 1) + 1 == entry(tensors, tensor, "programs")
    if is_last:
        if GIVEN:
            now = tl.load(given + tensor)
        else:
            now = codec.value(tl.atomic_max(largest, 0).to(tl.uint32), GRAD)
        before = tl.load(amax)
        # In FP64, rounded once. A maximum that is not finite leaves the running one alone.
        faded = before.to(tl.float64) * tl.full((), MEMORY, tl.float64)
        newest = now.to(tl.float64)
        after = tl.where(faded < newest, newest, faded).to(tl.float32)
        after = tl.where(codec.magnitude_of(now) < 0x7F800000, after, before)
        # Other threads than the one that writes have read it.
        tl.debug_barrier()
        tl.store(amax, after)
        old, new = unit(before, MOST), unit(after, MOST)
        fast, slow = FAST - new, SLOW - POWER * new
        row = scales + tensor * scale_columns()
        tl.store(row + scale_column("fast_decode"), two_to(old - FAST))
        tl.store(row + scale_column("fast_encode"), two_to(fast))
        tl.store(row + scale_column("slow_decode"), two_to(POWER * old - SLOW))
        tl.store(row + scale_column("slow_encode"), two_to(slow))
        tl.store(row + scale_column("slow_floor"), two_to(LEAST - slow) if POWER == 2 else 0.0)


@triton.jit
def entry(tensors, tensor, name: tl.constexpr):
    """A number of a tensor."""
    return tl.load(tensors + tensor * columns() + column(name))


@triton.jit
def unit(amax, most: tl.constexpr):
    """Exponent of the power of two at or below a running maximum, int32; 0 for zero."""
    magnitude = codec.magnitude_of(amax).to(tl.int32)
    exponent = tl.where(magnitude < 0x7F800000, (magnitude >> 23) - 127, -1)
    # Of subnormal numbers it is too large, but below the least either way.
    exponent = tl.minimum(tl.maximum(exponent, -most), most)
    return tl.where(magnitude == 0, 0, exponent)


@triton.jit
def two_to(exponent):
    """A power of two from 2**-149 on, FP32."""
    subnormal = 1 << tl.minimum(tl.maximum(exponent + 149, 0), 22)
    pattern = tl.where(exponent < -126, subnormal, (exponent + 127) << 23)
    return pattern.to(tl.float32, bitcast=True)

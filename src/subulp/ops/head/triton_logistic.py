# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The gradient of the loss from the logits in Triton: the sequence of numerics/logistic.py.

One launch: a program takes some rows, each from its first element to its last. Its positives'
logits are read before the others' gradients replace them, and their gradients written after that.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.ieee import as_fp32
from ..triton import launch

BLOCK = 128
"""Rows of a program, and positives that it takes at a time."""


def run(
    logits: Tensor,
    rows: Tensor,
    columns: Tensor,
    first: int,
    gain: float,
    *,
    gradient: Tensor | None,
    loss: bool,
    narrow: bool,
    scale: float = 1.0,
    before: int = 0,
) -> Tensor | None:
    """As :func:`.logistic.logistic_`; positives outside of the matrix are left out.

    Args:
        logits: FP32 or BF16 ``(height, width)``, rows of which are runs of memory.
        rows: int64 ``(count,)``, ascending, counted from ``first``, of the positives.
        columns: int64 ``(count,)``, of the positives.
        first: Number of the first row.
        gain: Factor on the gradient.
        gradient: Contiguous FP32 or BF16 tensor of at least as many rows, of which those of the
            logits may be the logits themselves; overwritten, with zeros in rows that are not
            theirs. ``None`` to compute none.
        loss: Whether to compute the losses.
        narrow: Whether to round the logits, and what they become, to BF16.
        scale: A power of two that the logits are to be multiplied by (default: 1).
        before: Rows of the gradient before those of the logits (default: none).
    """
    launch.check_device(logistic_kernel, logits.device)
    height, width = logits.shape
    count, device = rows.numel(), logits.device
    assert logits.stride(1) == 1 or width == 1
    assert gradient is None or gradient.is_contiguous()
    size = height if gradient is None else gradient.shape[0]
    if size == 0 or width == 0:
        return torch.zeros(height + count, dtype=torch.float64, device=device) if loss else None
    terms = torch.empty(height + count if loss else 0, dtype=torch.float64, device=device)
    kept = torch.empty(count, dtype=torch.float32, device=device)
    scope = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with scope:
        logistic_kernel[(triton.cdiv(size, BLOCK),)](
            *(logits, logits if gradient is None else gradient, terms, kept, rows, columns, count),
            *(first, height, width, logits.stride(0), before, size, as_fp32(gain), scale),
            **_options(gradient=gradient is not None, loss=loss, narrow=narrow),
            enable_fp_fusion=False,
        )
    return terms if loss else None


def _options(**flags: bool) -> dict[str, Any]:
    return {name.upper(): flag for name, flag in flags.items()} | {"BLOCK": BLOCK}


def compile_for(
    target: launch.Target,
    shape: tuple[int, int],
    *,
    count: int,
    first: int,
    loss: bool,
    narrow: bool,
    line: int | None = None,
) -> Any:
    """Compile the kernel ahead of time, see :func:`.launch.compile_for`.

    Args:
        target: For which GPU.
        shape: Of the logits.
        count: How many positives there are.
        first: Number of the first row.
        loss: Whether to compute the losses.
        narrow: Whether to round the logits, and what they become, to BF16.
        line: From a row of the logits to the next (default: they are contiguous).
    """
    pointers = {"logits": "*fp32", "gradient": "*bf16" if narrow else "*fp32", "terms": "*fp64"}
    pointers |= {"kept": "*fp32", "rows": "*i64", "columns": "*i64"}
    integers = {"count": count, "first": first, "height": shape[0], "width": shape[1]}
    integers |= {"line": shape[1] if line is None else line, "before": 0, "size": shape[0]}
    arguments = pointers | integers | {"gain": "fp32", "scale": "fp32"}
    options = _options(gradient=True, loss=loss, narrow=narrow)
    return launch.compile_for(logistic_kernel, target, arguments, **options)


@triton.jit(do_not_specialize=launch.VARYING)
def logistic_kernel(
    logits,
    gradient,
    terms,
    kept,
    rows,
    columns,
    count,
    first,
    height,
    width,
    line,
    before,
    size,
    gain,
    scale,
    GRADIENT: tl.constexpr,
    LOSS: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    # Of the logits' own rows; a program may have others' before and after them.
    at_first = tl.program_id(0) * BLOCK - before
    start = tl.minimum(tl.maximum(at_first, 0), height)
    stop = tl.minimum(tl.maximum(at_first + BLOCK, 0), height)
    begin = first_at(rows, count, first + start)
    end = first_at(rows, count, first + stop)
    for some in range(begin, end, BLOCK):
        place = some + lane
        row, column, known = positive(rows, columns, place, end, first, width)
        z = tl.load(logits + (row * line + column), mask=known, other=0.0).to(tl.float32)
        z = rounded(z * scale, NARROW)
        tl.store(kept + place, z, mask=known)
        if LOSS:
            tl.store(terms + height + place, -z.to(tl.float64), mask=place < end)
    if LOSS:
        # What the first and the last program see of positives that are no program's.
        if start == 0:
            zeros(terms + height, 0, begin, BLOCK)
        if stop == height:
            zeros(terms + height, end, count, BLOCK)
    # Other threads than those that replace them have read them.
    tl.debug_barrier()
    own = at_first + lane
    inside = (own >= 0) & (own < height)
    written = own + before < size
    at, to = own.to(tl.int64) * line, (own + before).to(tl.int64) * width
    total = tl.zeros((BLOCK,), tl.float64)
    # A row's elements one by one: the sum has their order.
    for _ in range(0, width):
        z = rounded(tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * scale, NARROW)
        e = exp_of_negative(-tl.abs(z))
        if LOSS:
            total += softplus(z, e).to(tl.float64)
        if GRADIENT:
            g = tl.where(inside, rounded(sigmoid(z, e) * gain, NARROW), 0.0)
            store(gradient, to, g, written)
        at += 1
        to += 1
    if LOSS:
        tl.store(terms + own, total, mask=inside)
    if GRADIENT:
        tl.debug_barrier()
        for some in range(begin, end, BLOCK):
            place = some + lane
            row, column, known = positive(rows, columns, place, end, first, width)
            z = tl.load(kept + place, mask=known, other=0.0)
            # sigmoid(z) - 1 is -sigmoid(-z), which keeps its digits where sigmoid(z) is near 1.
            g = sigmoid(-z, exp_of_negative(-tl.abs(z))) * -gain
            store(gradient, (row + before) * width + column, rounded(g, NARROW), known)


@triton.jit
def first_at(rows, count, row):
    """The first of ascending rows that is not before ``row``."""
    low, high = row * 0, row * 0 + count
    while low < high:
        middle = (low + high) // 2
        if tl.load(rows + middle) < row:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def positive(rows, columns, place, end, first, width):
    """Rows and columns of positives, and which of them lie in the matrix."""
    row = tl.load(rows + place, mask=place < end, other=0) - first
    column = tl.load(columns + place, mask=place < end, other=-1)
    return row, column, (column >= 0) & (column < width)


@triton.jit
def zeros(to, begin, end, BLOCK: tl.constexpr):
    """Zeros from one place up to another."""
    for some in range(begin, end, BLOCK):
        place = some + tl.arange(0, BLOCK)
        tl.store(to + place, tl.zeros((BLOCK,), tl.float64), mask=place < end)


@triton.jit
def store(to, at, x, mask):
    """FP32 numbers, which are BF16's if that is what is stored."""
    if to.dtype.element_ty == tl.bfloat16:
        half = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store(to + at, half.to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(to + at, x, mask=mask)


@triton.jit
def exp_of_negative(y):
    """``exp(y)`` for ``y <= 0``."""
    y = tl.where(y > -87.0, y, -87.0)
    shifted = y * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    r = (y - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * (r * r) + r) + 1.0
    power = (shifted.to(tl.uint32, bitcast=True) << 23) + 0x3F800000
    return p * power.to(tl.float32, bitcast=True)


@triton.jit
def is_nan(x):
    """Whether a number is none."""
    return (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def sigmoid(z, e):
    """``1 / (1 + exp(-z))``; ``e`` is ``exp(-abs(z))``."""
    value = tl.div_rn(tl.where(z > 0, 1.0, e), e + 1.0)
    return tl.where(is_nan(z), z, value)


@triton.jit
def softplus(z, e):
    """``log(1 + exp(z))``; ``e`` is ``exp(-abs(z))``."""
    s = tl.div_rn(e, e + 2.0)
    t = s * s
    p = t * 0.15384615384615385 + 0.18181818181818182
    p = p * t + 0.2222222222222222
    p = p * t + 0.2857142857142857
    p = p * t + 0.4
    p = p * t + 0.6666666666666666
    p = p * t + 2.0
    value = tl.where(z > 0, z, 0.0) + p * s
    return tl.where(is_nan(z), z, value)


@triton.jit
def rounded(x, narrow: tl.constexpr):
    """BF16's nearest number, ties to even, if ``narrow``; beyond the largest lies infinity."""
    if narrow:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        magnitude = tl.where(magnitude > 0x7F800000, 0x7FC00000, magnitude)
        magnitude = magnitude + 0x7FFF + ((magnitude >> 16) & 1)
        kept = (magnitude | (bits & 0x80000000)) & 0xFFFF0000
        return kept.to(tl.float32, bitcast=True)
    else:
        return x

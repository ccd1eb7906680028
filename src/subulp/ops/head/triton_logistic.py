# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The gradient of the loss from the logits in Triton: the sequence of numerics/logistic.py.

Two launches: one marks the positives, and has their part of the loss while their logits are there;
the other goes through the rows, each from its first element to its last.
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
"""Rows, or positives, of a program."""

_POSITIVES = {
    "logits": "*fp32",
    "marks": "*u8",
    "terms": "*fp64",
    "rows": "*i64",
    "columns": "*i64",
}
_POSITIVES |= {"count": "i32", "first": "i64", "height": "i32", "width": "i32"}
_LOGISTIC = {"logits": "*fp32", "marks": "*u8", "sums": "*fp64"}
_LOGISTIC |= {"height": "i32", "width": "i32", "gain": "fp32"}


def run(
    logits: Tensor,
    rows: Tensor,
    columns: Tensor,
    first: int,
    gain: float,
    *,
    gradient: bool,
    loss: bool,
    narrow: bool,
) -> Tensor | None:
    """As :func:`.logistic.logistic_`; positives outside of the matrix are left out.

    Args:
        logits: Contiguous FP32 ``(height, width)``; overwritten with ``gradient``.
        rows: int64 ``(count,)``, counted from ``first``, of the positives.
        columns: int64 ``(count,)``, of the positives.
        first: Number of the first row.
        gain: Factor on the gradient.
        gradient: Whether to compute it.
        loss: Whether to compute the losses.
        narrow: Whether to round the logits, and what they become, to BF16.
    """
    launch.check_device(logistic_kernel, logits.device)
    height, width = logits.shape
    count, device = rows.numel(), logits.device
    terms = torch.zeros(height + count if loss else 0, dtype=torch.float64, device=device)
    if height == 0 or width == 0:
        return terms if loss else None
    marks = torch.zeros(height * width, dtype=torch.uint8, device=device)
    scope = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    flags = {"LOSS": loss, "NARROW": narrow, "BLOCK": BLOCK, "enable_fp_fusion": False}
    with scope:
        if count:
            positives_kernel[(triton.cdiv(count, BLOCK),)](
                *(logits, marks, terms[height:], rows, columns),
                *(count, first, height, width),
                **flags,
            )
        logistic_kernel[(triton.cdiv(height, BLOCK),)](
            *(logits, marks, terms, height, width, as_fp32(gain)), GRADIENT=gradient, **flags
        )
    return terms if loss else None


def compile_for(capability: int, *, loss: bool, narrow: bool) -> list[Any]:
    """Compile both kernels ahead of time, see :func:`.launch.compile_for`."""
    flags = {"LOSS": loss, "NARROW": narrow, "BLOCK": BLOCK}
    return [
        launch.compile_for(positives_kernel, capability, _POSITIVES, **flags),
        launch.compile_for(logistic_kernel, capability, _LOGISTIC, GRADIENT=True, **flags),
    ]


@triton.jit
def positives_kernel(
    logits,
    marks,
    terms,
    rows,
    columns,
    count,
    first,
    height,
    width,
    LOSS: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=-1) - first
    column = tl.load(columns + at, mask=inside, other=-1)
    here = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    place = row * width + column
    tl.store(marks + place, tl.full((BLOCK,), 1, tl.uint8), mask=here)
    if LOSS:
        z = rounded(tl.load(logits + place, mask=here, other=0.0), NARROW)
        tl.store(terms + at, -z.to(tl.float64), mask=inside)


@triton.jit
def logistic_kernel(
    logits,
    marks,
    sums,
    height,
    width,
    gain,
    GRADIENT: tl.constexpr,
    LOSS: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < height
    at = row.to(tl.int64) * width
    total = tl.zeros((BLOCK,), tl.float64)
    # A row's elements one by one: the sum has their order.
    for _ in range(0, width):
        z = rounded(tl.load(logits + at, mask=inside, other=0.0), NARROW)
        e = exp_of_negative(-tl.abs(z))
        if LOSS:
            total += softplus(z, e).to(tl.float64)
        if GRADIENT:
            marked = tl.load(marks + at, mask=inside, other=0) != 0
            # sigmoid(z) - 1 is -sigmoid(-z), which keeps its digits where sigmoid(z) is near 1.
            g = tl.where(marked, sigmoid(-z, e) * -gain, sigmoid(z, e) * gain)
            tl.store(logits + at, rounded(g, NARROW), mask=inside)
        at += 1
    if LOSS:
        tl.store(sums + row, total, mask=inside)


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

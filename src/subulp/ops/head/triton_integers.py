# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rows of integers of a head in Triton: decoded for its products, and stepped by their gradient.

A row's new scale is known when all of the row is, so a program takes a whole row, and the gradient
comes from a product of its own.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.ieee import as_fp32
from ...numerics.int_rows import IntFormat
from ..triton import codec, int_rows, launch, random_bits
from ..triton.faults import record
from . import HeadJob
from .tiles import Place
from .triton_dropout import factor_of, kept_at


def decoded(job: HeadJob, rows: Tensor, place: Place, address: Tensor) -> Tensor:
    """The FP32 weights of a tile; in training, those that dropout keeps.

    Args:
        job: The chunk's step.
        rows: uint8 ``(labels, bytes)``, contiguous.
        place: Where they lie in their tile, which has zeros elsewhere.
        address: Of the random bits of the first row, see :func:`.triton_dropout.kept_at`.
    """
    out = torch.empty(place.size, job.dim, dtype=torch.float32, device=rows.device)
    with _on(rows.device):
        if place.size:
            decode_kernel[(place.size,)](
                *(rows, out, address, job.dim, rows.shape[1]),
                *(rows.shape[0], place.before, factor_of(job.dropout)),
                **_decode_options(job),
                enable_fp_fusion=False,
            )
    return out


def step(
    job: HeadJob, first: int, rows: Tensor, gradient: Tensor, address: Tensor, partial: Tensor
) -> None:
    """Step rows by their gradient, in place, with a new scale and bias each.

    Args:
        job: The chunk's step.
        first: The rows' place in the job.
        rows: uint8 ``(labels, bytes)``, contiguous.
        gradient: FP32 ``(labels, dim)``.
        address: As for :func:`decoded`.
        partial: FP32 ``(batch, dim)``, which is added to ``job.grad_x`` beside it.
    """
    precise = min(max(job.precise - first, 0), rows.shape[0])
    # Without a remainder any pointer does: it is not read.
    remainder = gradient if job.remainder is None or not precise else job.remainder[first:]
    with _on(rows.device):
        if programs := max(rows.shape[0], partial.shape[0]):
            step_kernel[(programs,)](
                *(rows, remainder, gradient, address, record(rows.device).found),
                *(partial, job.grad_x, rows.shape[0], partial.shape[0]),
                *(precise, job.dim, rows.shape[1]),
                *(as_fp32(job.lr), as_fp32(job.weight_decay), factor_of(job.dropout)),
                **_step_options(job, precise=precise > 0),
                enable_fp_fusion=False,
            )


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _decode_options(job: HeadJob) -> dict[str, Any]:
    assert isinstance(job.format, IntFormat)
    return {
        "BITS": job.format.bits,
        "DROPOUT": job.train and job.dropout != 0.0,
        "BLOCK": max(16, triton.next_power_of_2(job.dim)),
    }


def _step_options(job: HeadJob, *, precise: bool) -> dict[str, Any]:
    return _decode_options(job) | {
        "RANDOM": job.rounding == "stochastic",
        "DECAY": job.weight_decay != 0.0,
        "PRECISE": precise,
    }


def compile_for(target: launch.Target, name: str, job: HeadJob) -> Any:
    """Compile ``"decode"`` or ``"step"`` for a job ahead of time: :func:`.launch.compile_for`."""
    arguments: dict[str, str | int] = {"rows": "*u8", "out": "*fp32", "gradient": "*fp32"}
    arguments |= {"remainder": "*bf16" if job.precise else "*fp32", "address": "*i64"}
    arguments |= {"found": "*i32", "precise": job.precise, "dim": job.dim}
    arguments |= {"stride": job.rows.shape[1], "partial": "*fp32", "sums": "*fp32"}
    arguments |= {"labels": job.rows.shape[0], "batch": job.x.shape[0], "before": job.before}
    arguments |= dict.fromkeys(("lr", "weight_decay", "factor"), "fp32")
    kernel = {"decode": decode_kernel, "step": step_kernel}[name]
    taken = {key: value for key, value in arguments.items() if key in kernel.arg_names}
    options = _decode_options(job)
    if name == "step":
        options = _step_options(job, precise=job.precise > 0)
    return launch.compile_for(kernel, target, taken, **options)


@triton.jit
def decode_kernel(
    rows,
    out,
    address,
    dim,
    stride,
    labels,
    before,
    factor,
    BITS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    to = tl.program_id(0).to(tl.int64)
    row = to - before
    element = tl.arange(0, BLOCK)
    inside = element < dim
    weight = tl.zeros((BLOCK,), tl.float32)
    if (row >= 0) & (row < labels):
        weight = int_rows.decode(rows + row * stride, element, inside, BITS)
        if DROPOUT:
            weight = weight * kept_at(row * dim + element, factor, address)
    tl.store(out + to * dim + element, weight, mask=inside)


@triton.jit
def step_kernel(
    rows,
    remainder,
    gradient,
    address,
    found,
    partial,
    sums,
    labels,
    batch,
    precise,
    dim,
    stride,
    lr,
    weight_decay,
    factor,
    BITS: tl.constexpr,
    DROPOUT: tl.constexpr,
    RANDOM: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    inside = element < dim
    at, to = row * dim + element, rows + row * stride
    if row < batch:
        # The inputs' gradient, whose every row a program has beside one of the weights.
        total = tl.load(sums + at, mask=inside, other=0.0)
        tl.store(sums + at, total + tl.load(partial + at, mask=inside, other=0.0), mask=inside)
    # No number is read or written of a row that there is not.
    inside = element < tl.where(row < labels, dim, 0)
    to = tl.where(row < labels, to, rows)
    weight = int_rows.decode(to, element, inside, BITS)
    step = tl.load(gradient + at, mask=inside, other=0.0)
    if DROPOUT:
        step = step * kept_at(at, factor, address)
    if PRECISE:
        kept = element < tl.where(row < precise, dim, 0)
        weight = weight + tl.load(remainder + at, mask=kept, other=0.0).to(tl.float32)
    if DECAY:
        step = step + weight * weight_decay
    weight = weight - step * lr
    if RANDOM:
        key, number = tl.load(address).to(tl.uint64), tl.load(address + 1).to(tl.uint32)
        bits = random_bits.draw_at(tl.load(address + 2) + at, key, number, 0, 32)
        q, scale, bias = int_rows.quantise(weight, bits, inside, BITS, True)
        if PRECISE:
            nearest, _, _ = int_rows.quantise(weight, 0, inside, BITS, False)
            q = tl.where(row < precise, nearest, q)
    else:
        q, scale, bias = int_rows.quantise(weight, 0, inside, BITS, False)
    if PRECISE:
        lost = weight - (q.to(tl.float32) * scale + bias)
        half = codec.nearest(lost, "bf16").to(tl.uint16)
    # Nothing is stored where something was found.
    if (row < labels) & (tl.load(found) == 0):
        if PRECISE:
            tl.store(remainder + at, half.to(tl.bfloat16, bitcast=True), mask=kept)
        int_rows.store(to, q, scale, bias, inside, BITS, BLOCK)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The batch of a head on a GPU: checked, and its positives sorted, without the host's waiting.

Two kernels and a sort, whatever the number of chunks. What is bad is raised when the host comes by
(:mod:`subulp.ops.triton.faults`); until then the step's sums are NaN, and no row is updated.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import launch
from ..triton.faults import record, report, tell
from .faults import Fault, error_of

BLOCK = 1024
"""Numbers that a program takes at a time."""

_PROGRAMS = 1024
_NOWHERE = 2**63 - 1

tell(Fault, error_of)


def sorted_pairs(
    x: Tensor, instances: Tensor, labels: Tensor, row_of: Tensor | None, num_labels: int
) -> tuple[Tensor, Tensor]:
    """Instances and rows of positive pairs, ascending by row, then by instance.

    Args:
        x: FP32 ``(batch, dim)``, the inputs, contiguous; checked to be finite.
        instances: Integers ``(count,)``; checked to be less than ``batch``.
        labels: Integers ``(count,)``; checked to be less than ``num_labels``.
        row_of: int64 ``(num_labels,)``, the row of each label; ``None`` where it is the label.
        num_labels: Number of labels.

    Returns:
        int64 ``(count,)``, instances and rows. Of a pair that is there several times all but the
        first have the instance -1, which a step leaves out.

    Raises:
        RuntimeError: A CUDA graph is being captured.
        ValueError: A number is out of range: of an earlier call, or of this one where launches are
            waited for.
        FloatingPointError: Inputs are not finite, likewise.
    """
    launch.refuse_capture(x.device)
    faults = record(x.device)
    faults.check()
    count, batch = labels.numel(), max(1, x.shape[0])
    codes, rows, found = torch.empty(3, count, dtype=torch.int64, device=x.device)
    with _on(x.device):
        programs = triton.cdiv(max(count, x.numel(), 1), BLOCK)
        check_kernel[(min(programs, _PROGRAMS),)](
            *(x, instances.contiguous(), labels.contiguous()),
            # Of labels that are rows any pointer does: it is not read.
            *(codes if row_of is None else row_of, codes, faults.words, faults.found),
            *(x.numel(), count, x.shape[0], x.shape[1], num_labels),
            **_check_options(permuted=row_of is not None),
        )
        faults.check_launched()
        codes = codes.sort().values
        if count:
            split_kernel[(triton.cdiv(count, BLOCK),)](
                codes, found, rows, count, batch, BLOCK=BLOCK
            )
    return found, rows


def new_sums(x: Tensor, parts: Tensor) -> Tensor:
    """What a step adds up, zeros, or NaN where something was found.

    Args:
        x: FP32 ``(batch, dim)``, the inputs.
        parts: FP64 ``(places,)``, the parts of the loss; overwritten. Without a loss it is empty.

    Returns:
        The gradient of the inputs, of their shape.
    """
    grad_x = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    size = max(grad_x.numel(), parts.numel())
    with _on(x.device):
        if size:
            zero_kernel[(triton.cdiv(size, BLOCK),)](
                *(grad_x, parts, record(x.device).found, grad_x.numel(), parts.numel()),
                BLOCK=BLOCK,
            )
    return grad_x


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _check_options(*, permuted: bool) -> dict[str, Any]:
    kinds = launch.layout({fault.name: fault.value for fault in Fault})
    return {"PERMUTED": permuted, "KINDS": kinds, "BLOCK": BLOCK}


def compile_for(
    target: launch.Target, name: str, sizes: tuple[int, int, int, int], *, permuted: bool = True
) -> Any:
    """Compile ``"check"``, ``"split"`` or ``"zero"`` ahead of time.

    Args:
        target: For which GPU, see :func:`.launch.compile_for`.
        name: The kernel.
        sizes: Labels, dimensions, instances and positives.
        permuted: Whether labels have rows that are not their numbers.
    """
    labels, dim, batch, count = sizes
    arguments: dict[str, str | int] = dict.fromkeys(
        ("instances", "labels", "row_of", "codes", "found_instances", "rows", "words"), "*i64"
    )
    arguments |= {"x": "*fp32", "grad_x": "*fp32", "parts": "*fp64", "found": "*i32"}
    arguments |= {"size": batch * dim, "count": count, "batch": batch, "dim": dim}
    arguments |= {"num_labels": labels, "places": 9}
    kernel = {"check": check_kernel, "split": split_kernel, "zero": zero_kernel}[name]
    taken = {key: value for key, value in arguments.items() if key in kernel.arg_names}
    options = _check_options(permuted=permuted) if name == "check" else {"BLOCK": BLOCK}
    return launch.compile_for(kernel, target, taken, **options)


@triton.constexpr_function
def kind(name):
    """The number of a fault."""
    return Fault[name].value


@triton.constexpr_function
def nowhere():
    """Key of a pair that is none: after all others."""
    return _NOWHERE


@triton.jit(do_not_specialize=launch.VARYING)
def check_kernel(
    x,
    instances,
    labels,
    row_of,
    codes,
    words,
    found,
    size,
    count,
    batch,
    dim,
    num_labels,
    PERMUTED: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(program * BLOCK, count, programs * BLOCK, disable_licm=True):
        at = start + lane
        here = at < count
        instance = tl.load(instances + at, mask=here, other=0).to(tl.int64)
        label = tl.load(labels + at, mask=here, other=0).to(tl.int64)
        bad_instance = here & ((instance < 0) | (instance >= batch))
        bad_label = here & ((label < 0) | (label >= num_labels))
        if tl.max(bad_instance.to(tl.int32), axis=0) > 0:
            which = tl.min(tl.where(bad_instance, at, count), axis=0)
            number = tl.load(instances + which).to(tl.int64)
            report(words, found, kind("BAD_INSTANCE"), which, number, batch, 0)
        if tl.max(bad_label.to(tl.int32), axis=0) > 0:
            which = tl.min(tl.where(bad_label, at, count), axis=0)
            number = tl.load(labels + which).to(tl.int64)
            report(words, found, kind("BAD_LABEL"), which, number, num_labels, 0)
        bad = bad_instance | bad_label
        row = label
        if PERMUTED:
            row = tl.load(row_of + label, mask=here & (bad == 0), other=0)
        code = row * tl.maximum(batch, 1) + instance
        tl.store(codes + at, tl.where(bad, nowhere(), code), mask=here)

    for start in tl.range(program * BLOCK, size, programs * BLOCK, disable_licm=True):
        number = tl.load(x + start + lane, mask=start + lane < size, other=0.0)
        if tl.max((tl.abs(number) < float("inf")).to(tl.int32) ^ 1, axis=0) > 0:
            report(words, found, kind("BAD_EMBEDDINGS"), batch, dim, 0, 0)


@triton.jit(do_not_specialize=launch.VARYING)
def split_kernel(codes, found_instances, rows, count, batch, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    code = tl.load(codes + at, mask=here, other=0)
    before = tl.load(codes + at - 1, mask=here & (at > 0), other=-1)
    tl.store(found_instances + at, tl.where(code == before, -1, code % batch), mask=here)
    tl.store(rows + at, code // batch, mask=here)


@triton.jit
def zero_kernel(grad_x, parts, found, size, places, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.where(tl.load(found) == 0, 0.0, float("nan"))
    tl.store(grad_x + at, zero + tl.zeros((BLOCK,), tl.float32), mask=at < size)
    tl.store(parts + at, zero.to(tl.float64) + tl.zeros((BLOCK,), tl.float64), mask=at < places)

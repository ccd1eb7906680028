# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Scores as integers that are all different, of which ``torch.topk`` has but one choice.

Which of equal scores it takes is otherwise not known, and the host would wait to find out whether
there are any.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import launch
from ..triton.faults import record

BLOCK = 1024
"""Scores of a program."""


def keys(scores: Tensor) -> Tensor:
    """int64 keys in the order of the scores; of equal ones, the first has the greatest.

    Zeros are equal whatever their sign, and so are NaN, which are greater than all others.

    Args:
        scores: FP32 ``(batch, count)``.

    Raises:
        RuntimeError, ValueError, FloatingPointError, IndexError: An earlier call of this device had
            bad numbers.
    """
    launch.check_device(keys_kernel, scores.device)
    record(scores.device).check()
    out = torch.empty(scores.shape, dtype=torch.int64, device=scores.device)
    on_gpu = scores.device.type == "cuda"
    with torch.cuda.device(scores.device) if on_gpu else contextlib.nullcontext():
        if out.numel():
            keys_kernel[(triton.cdiv(out.numel(), BLOCK),)](
                *(scores, out, out.numel(), out.shape[1], *scores.stride()), BLOCK=BLOCK
            )
    return out


def compile_for(target: launch.Target, shape: tuple[int, int]) -> Any:
    """Compile the kernel for scores of a shape ahead of time, see :func:`.launch.compile_for`."""
    arguments: launch.Arguments = {
        **{"scores": "*fp32", "keys": "*i64", "size": shape[0] * shape[1]},
        **{"count": shape[1], "line": shape[1], "step": 1},
    }
    return launch.compile_for(keys_kernel, target, arguments, BLOCK=BLOCK)


@triton.jit(do_not_specialize=launch.VARYING)
def keys_kernel(scores, keys, size, count, line, step, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // count, at % count
    score = tl.load(scores + row * line + column * step, mask=at < size, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Among negative numbers, the greater pattern is the lower number.
    order = tl.where(bits < 0, -magnitude, magnitude)
    order = tl.where(magnitude > 0x7F800000, 0x7FC00000, order)
    tl.store(keys + at, (order.to(tl.int64) << 32) | (count - 1 - column), mask=at < size)

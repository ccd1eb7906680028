# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""An exact sum in Triton: numbers are cut, added up and added to the parts in one launch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import launch
from .exact_sum import LOWEST, PARTS, WIDTH

BLOCK = 512
"""Numbers of a program."""


def add(terms: Tensor, parts: Tensor) -> None:
    """Add FP64 ``terms`` to the parts of a sum, see :mod:`.exact_sum`.

    Each program adds whole numbers of a place's units: in whatever order, nothing is rounded.
    """
    launch.check_device(sum_kernel, terms.device)
    if not terms.numel():
        return
    on_gpu = terms.device.type == "cuda"
    with torch.cuda.device(terms.device) if on_gpu else contextlib.nullcontext():
        grid = (triton.cdiv(terms.numel(), BLOCK),)
        sum_kernel[grid](terms, parts, terms.numel(), BLOCK=BLOCK, enable_fp_fusion=False)


def compile_for(target: launch.Target, count: int) -> Any:
    """Compile the kernel for so many numbers ahead of time, see :func:`.launch.compile_for`."""
    arguments: launch.Arguments = {"terms": "*fp64", "parts": "*fp64", "count": count}
    return launch.compile_for(sum_kernel, target, arguments, BLOCK=BLOCK)


@triton.constexpr_function
def places():
    """How many places there are."""
    return PARTS


@triton.constexpr_function
def unit(place):
    """The unit of a place."""
    return 2.0 ** (LOWEST + WIDTH * place)


@triton.constexpr_function
def units():
    """Units of a place in the next one's."""
    return 2.0**WIDTH


@triton.jit(do_not_specialize=launch.VARYING)
def sum_kernel(terms, parts, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    term = tl.load(terms + at, mask=at < count, other=0.0)
    finite = tl.abs(term) < float("inf")
    # First: the registers that tell which are finite are then free.
    strange = tl.where(finite, 0.0, term)
    if tl.min(finite.to(tl.int32), axis=0) == 0:
        tl.atomic_add(parts + places() - 1, tl.sum(strange, axis=0))
    number = tl.where(finite, term, 0.0)
    for place in tl.static_range(places()):
        # Less what the next place takes. A whole number of at most 53 bits: nothing is rounded.
        piece = whole(number * (1.0 / unit(place)))
        if place + 1 < places():
            piece = piece - whole(number * (1.0 / unit(place + 1))) * units()
        total = tl.sum(piece, axis=0) * unit(place)
        if total != 0.0:
            tl.atomic_add(parts + place, total)


@triton.jit
def whole(x):
    """The whole number next to each, towards zero."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))

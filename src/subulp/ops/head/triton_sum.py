# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""An exact sum in Triton: numbers are cut, added up and added to the parts in one launch."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import codec, launch

BLOCK = 512
"""Numbers of a program."""


def add(terms: Tensor, parts: Tensor, lowest: int, width: int) -> None:
    """Add FP64 ``terms`` to the parts of a sum, see :mod:`.exact_sum`.

    Each program adds whole numbers of a place's units: in whatever order, nothing is rounded.

    Args:
        terms: FP64 ``(count,)``.
        parts: FP64, one for each place; added to.
        lowest: The unit of the first place is ``2**lowest``.
        width: The next place's unit is ``2**width`` of them.
    """
    launch.check_device(sum_kernel, terms.device)
    if not terms.numel():
        return
    on_gpu = terms.device.type == "cuda"
    with torch.cuda.device(terms.device) if on_gpu else contextlib.nullcontext():
        grid = (triton.cdiv(terms.numel(), BLOCK),)
        options = _options(parts.numel(), lowest, width)
        sum_kernel[grid](terms, parts, terms.numel(), **options, enable_fp_fusion=False)


def rounded_total(parts: Tensor, gain: float) -> Tensor:
    """The sum times ``gain``, rounded to FP32: of the last place first, as on the host.

    Args:
        parts: FP64, one for each place.
        gain: A factor.
    """
    launch.check_device(total_kernel, parts.device)
    out = torch.empty((), dtype=torch.float32, device=parts.device)
    # In memory: an argument would be rounded to FP32.
    factor = launch.upload(parts.device, np.array([gain]))[0]
    on_gpu = parts.device.type == "cuda"
    with torch.cuda.device(parts.device) if on_gpu else contextlib.nullcontext():
        total_kernel[(1,)](parts, factor, out, PLACES=parts.numel(), enable_fp_fusion=False)
    return out


def _options(places: int, lowest: int, width: int) -> dict[str, int]:
    return {"PLACES": places, "LOWEST": lowest, "WIDTH": width, "BLOCK": BLOCK}


def compile_for(target: launch.Target, count: int, places: int, lowest: int, width: int) -> Any:
    """Compile the kernel for so many numbers ahead of time, see :func:`.launch.compile_for`."""
    arguments: launch.Arguments = {"terms": "*fp64", "parts": "*fp64", "count": count}
    return launch.compile_for(sum_kernel, target, arguments, **_options(places, lowest, width))


def compile_total(target: launch.Target, places: int) -> Any:
    """Compile the kernel of a total ahead of time, see :func:`.launch.compile_for`."""
    arguments: launch.Arguments = {"parts": "*fp64", "factor": "*fp64", "out": "*fp32"}
    return launch.compile_for(total_kernel, target, arguments, PLACES=places)


@triton.jit(do_not_specialize=launch.VARYING)
def sum_kernel(
    terms,
    parts,
    count,
    PLACES: tl.constexpr,
    LOWEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    term = tl.load(terms + at, mask=at < count, other=0.0)
    finite = tl.abs(term) < float("inf")
    # First: the registers that tell which are finite are then free.
    strange = tl.where(finite, 0.0, term)
    if tl.min(finite.to(tl.int32), axis=0) == 0:
        tl.atomic_add(parts + PLACES - 1, tl.sum(strange, axis=0))
    number = tl.where(finite, term, 0.0)
    for place in tl.static_range(PLACES):
        # Less what the next place takes. A whole number of at most 53 bits: nothing is rounded.
        piece = whole(number * codec.two_to(-LOWEST - WIDTH * place))
        if place + 1 < PLACES:
            above = whole(number * codec.two_to(-LOWEST - WIDTH * (place + 1)))
            piece = piece - above * codec.two_to(WIDTH)
        total = tl.sum(piece, axis=0) * codec.two_to(LOWEST + WIDTH * place)
        if total != 0.0:
            tl.atomic_add(parts + place, total)


@triton.jit
def total_kernel(parts, factor, out, PLACES: tl.constexpr):
    total = tl.load(parts + PLACES - 1)
    for place in tl.static_range(1, PLACES):
        total += tl.load(parts + PLACES - 1 - place)
    tl.store(out, (total * tl.load(factor)).to(tl.float32))


@triton.jit
def whole(x):
    """The whole number next to each, towards zero."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))

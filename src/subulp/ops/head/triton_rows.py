# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Stored rows of a head as the products of a tile take them, in Triton: one launch.

They are decoded, left out at random, and lie among zeros where other ranks have rows.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import format_of
from ..triton import codec, launch
from .tiles import Place
from .triton_dropout import factor_of, kept_at
from .triton_logistic import rounded, store

BLOCK = 1024
"""Weights of a program."""


def decoded(
    rows: Tensor,
    place: Place,
    address: Tensor,
    wide: torch.dtype,
    *,
    scale: float = 1.0,
    dropout: float = 0.0,
    codes: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The weights of a tile, zeros where the job has none or leaves them out.

    Args:
        rows: ``(labels, dim)`` stored values, contiguous.
        place: Where they lie in their tile.
        address: int64 on the device: see :func:`.triton_dropout.kept_at`.
        wide: FP32, or BF16, to which they are rounded.
        scale: A power of two that stored values are multiplied by (default: 1).
        dropout: Share of the weights that are left out (default: 0).
        codes: Whether the tile is wanted as it is stored, too (default: ``False``).

    Returns:
        ``(place.size, dim)``, and, if ``codes``, the same of the dtype of ``rows``.
    """
    shape = place.size, rows.shape[1]
    out = torch.empty(shape, dtype=wide, device=rows.device)
    stored = torch.empty(shape, dtype=rows.dtype, device=rows.device) if codes else None
    words = rows.view(codec.WORDS[rows.dtype.itemsize])
    on_gpu = rows.device.type == "cuda"
    with torch.cuda.device(rows.device) if on_gpu else contextlib.nullcontext():
        if out.numel():
            rows_kernel[(triton.cdiv(out.numel(), BLOCK),)](
                words,
                out,
                # Without codes any pointer does: nothing is written to it.
                words if stored is None else stored.view(words.dtype),
                *(rows.numel(), place.before * rows.shape[1], out.numel()),
                *(scale, factor_of(dropout), address),
                **_options(rows.dtype, wide, dropout=dropout != 0.0, codes=codes),
                enable_fp_fusion=False,
            )
    return out, stored


def _options(
    dtype: torch.dtype, wide: torch.dtype, *, dropout: bool, codes: bool
) -> dict[str, Any]:
    flags = {"FORMAT": format_of(dtype).name, "NARROW": wide == torch.bfloat16}
    return flags | {"DROPOUT": dropout, "CODES": codes, "BLOCK": BLOCK}


def compile_for(
    target: launch.Target,
    dtype: torch.dtype,
    shape: tuple[int, int],
    place: Place,
    *,
    dropout: bool,
    codes: bool = False,
) -> Any:
    """Compile the kernel for rows of a shape ahead of time, see :func:`.launch.compile_for`."""
    word = {1: "*u8", 2: "*i16", 4: "*i32"}[dtype.itemsize]
    labels, dim = shape
    arguments: dict[str, str | int] = {"rows": word, "out": "*bf16", "codes": word}
    arguments |= {"count": labels * dim, "before": place.before * dim, "total": place.size * dim}
    arguments |= {"scale": "fp32", "factor": "fp32", "address": "*i64"}
    options = _options(dtype, torch.bfloat16, dropout=dropout, codes=codes)
    return launch.compile_for(rows_kernel, target, arguments, **options)


@triton.jit
def rows_kernel(
    rows,
    out,
    codes,
    count,
    before,
    total,
    scale,
    factor,
    address,
    FORMAT: tl.constexpr,
    NARROW: tl.constexpr,
    DROPOUT: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    to = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = to - before
    # A word of zeros is a zero in every format.
    word = tl.load(rows + at, mask=(at >= 0) & (at < count), other=0)
    weight = codec.value(word.to(tl.uint32) & ((1 << codec.width(FORMAT)) - 1), FORMAT) * scale
    if DROPOUT:
        weight = weight * kept_at(at, factor, address)
    store(out, to, rounded(weight, NARROW), to < total)
    if CODES:
        tl.store(codes + to, word, mask=to < total)

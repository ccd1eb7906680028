# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Dropout of a head's weights in Triton: a mask of random bits, which no memory holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton import random_bits
from .tiles import DROPOUT_SLOT


def factor_of(dropout: float) -> float:
    """What the weights that are kept are multiplied by, an FP32 number."""
    return float(torch.ones((), dtype=torch.float32, device="cpu").div_(1.0 - dropout))


@triton.jit
def kept_at(at, factor, address):
    """The factors of some weights, 0 for those that are left out.

    Args:
        at: int64, places of the weights among the rows.
        factor: FP32, that of the others.
        address: int64 ``(4,)``: key and step of the random bits, where the rows begin, and the
            least word that keeps a weight.
    """
    key, step = tl.load(address).to(tl.uint64), tl.load(address + 1).to(tl.uint32)
    bits = random_bits.draw_at(tl.load(address + 2) + at, key, step, slot(), 32)
    return tl.where(bits.to(tl.int64) >= tl.load(address + 3), factor, 0.0)


@triton.constexpr_function
def slot():
    """Philox counter word of these bits."""
    return DROPOUT_SLOT

"""Memory of giant tables in huge pages: with small ones, reading random rows is slow."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """``torch.zeros``, on a Linux CPU in pages of 2 MiB where there are any.

    Almost every row of a giant table lies in another page. The processor's TLB holds a few thousand
    pages; others take a walk through memory, for which prefetches are dropped. With huge pages the
    TLB covers gigabytes.
    """
    made = torch.empty(shape, dtype=dtype, device=device)
    if type(made) is not Tensor or made.device.type != "cpu" or made.nbytes < 2 * HUGE_PAGE:
        return made.zero_()
    # The first write to a page chooses its size. Memory that the allocator reuses has been written
    # to before: its pages are collapsed afterwards, where Linux can (6.1 and later).
    _advise(made, _MADV_HUGEPAGE)
    made.zero_()
    _advise(made, _MADV_COLLAPSE)
    return made


def full(
    shape: tuple[int, ...],
    value: float,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """``torch.full``, as :func:`zeros`."""
    return zeros(shape, dtype, device).fill_(value)


def _advise(memory: Tensor, advice: int) -> None:
    """Give Linux advice, which it may ignore."""
    madvise = _madvise()
    address = memory.data_ptr()
    first = -(-address // HUGE_PAGE) * HUGE_PAGE
    end = (address + memory.nbytes) // HUGE_PAGE * HUGE_PAGE
    if madvise is not None and first < end:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


@cache
def _madvise() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)

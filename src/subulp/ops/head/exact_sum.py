"""A sum that does not depend on its order: of the losses of all labels.

However labels are cut into chunks, tiles and parts of many ranks, the loss has the same bits. An
FP64 number is cut at fixed powers of two into pieces of 24 bits; pieces of one place add up without
rounding, up to 2**29 of them, and only the sum of all places is rounded.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from .. import backend

WIDTH = 24
"""Bits of a piece."""
LOWEST = -60
"""What lies below ``2**LOWEST`` in a number is cut off."""
PARTS = 9
"""Places of a sum; the last one has no upper limit, and infinities and NaN go there."""

_AT_ONCE = 1 << 14
"""Numbers that are cut together: the pieces of more fit no cache."""


class ExactSum:
    """Adds FP64 numbers to ``parts``.

    Args:
        parts: FP64 ``(PARTS,)``, the pieces of each place, whose sum is the number; added to.
    """

    def __init__(self, parts: Tensor) -> None:
        self._parts = parts
        self._terms: list[Tensor] = []
        self._count = 0

    def add(self, terms: Tensor) -> None:
        """Add FP64 numbers ``(count,)``, which :meth:`flush` makes good."""
        if backend.choose(terms.device).backend == "triton":
            # Triton may not be installed.
            from . import triton_sum  # noqa: PLC0415

            triton_sum.add(terms, self._parts, LOWEST, WIDTH)
            return
        self._terms.append(terms)
        self._count += terms.shape[0]
        if self._count >= _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Add what waits."""
        for terms in torch.cat(self._terms).split(_AT_ONCE) if self._terms else ():  # type: ignore[no-untyped-call]
            self._parts.add_(_parts_of(terms))
        self._terms, self._count = [], 0


def new_parts(device: torch.device) -> Tensor:
    """The parts of a sum of nothing."""
    return torch.zeros(PARTS, dtype=torch.float64, device=device)


def total(parts: Tensor) -> Tensor:
    """The sum: FP64 ()."""
    result = parts[-1]
    for place in reversed(range(PARTS - 1)):
        result = result + parts[place]
    return result


def rounded_total(parts: Tensor, gain: float) -> Tensor:
    """The sum times ``gain``, rounded to FP32: ()."""
    if backend.choose(parts.device).backend == "triton":
        # Triton may not be installed.
        from . import triton_sum  # noqa: PLC0415

        return triton_sum.rounded_total(parts, gain)
    return (total(parts) * gain).float()


def _parts_of(terms: Tensor) -> Tensor:
    places = _places(terms)
    units = _units(terms.device)[:places]
    finite = terms.isfinite()
    # In units of every place, cut to whole numbers; less what the next place takes of them. A whole
    # number of at most 53 bits, so nothing here rounds.
    pieces = torch.where(finite, terms, 0.0) * (1.0 / units)[:, None]
    pieces.trunc_()
    lower = torch.sub(pieces[:-1], pieces[1:], alpha=math.ldexp(1.0, WIDTH))
    sums = torch.zeros(PARTS, dtype=torch.float64, device=terms.device)
    sums[:places] = torch.cat([lower.sum(1), pieces[-1:].sum(1)]).mul_(units)
    sums[-1] += torch.where(finite, 0.0, terms).sum()
    return sums


def _places(terms: Tensor) -> int:
    """How many places the numbers reach; all of them where to ask would mean to wait."""
    if terms.device.type != "cpu" or not terms.numel():
        return PARTS
    highest = float(terms.abs().max())
    if not math.isfinite(highest):
        return PARTS
    bits = math.frexp(highest)[1] - LOWEST
    return min(max(1, -(-bits // WIDTH)), PARTS)


@cache
def _units(device: torch.device) -> Tensor:
    """The units of all places. Copied to a device once: that waits for it."""
    units = [math.ldexp(1.0, LOWEST + WIDTH * place) for place in range(PARTS)]
    return torch.tensor(units, dtype=torch.float64, device=device)

"""Runs of memory that one call writes, and what shares bytes with them.

A kernel updates the elements of a step in no order: where two parameters share memory, or a
gradient lies in that of a parameter, its result depends on the number of threads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import count, pairwise
from operator import itemgetter


class MemoryRuns:
    """Runs of memory by their addresses.

    Args:
        addresses: Where each begins.
        sizes: Bytes of each.

    Attributes:
        clash: The positions of two that share bytes, the smaller first; ``None`` if none do.
    """

    def __init__(self, addresses: Iterable[int], sizes: Iterable[int]) -> None:
        numbered = zip(addresses, sizes, count(), strict=False)
        # Where nothing is, nothing is shared.
        self._runs = sorted(filter(itemgetter(1), numbered))
        self._starts = list(map(itemgetter(0), self._runs))
        self.clash: tuple[int, int] | None = None
        for (first, nbytes, i), (second, _, j) in pairwise(self._runs):
            if first + nbytes > second:
                self.clash = min(i, j), max(i, j)
                return

    def meet(self, addresses: Sequence[int], sizes: Sequence[int]) -> tuple[int, int] | None:
        """The positions of a run, of which no two clash, and of another that shares bytes with it.

        Args:
            addresses: Where each of the others begins.
            sizes: Bytes of each.
        """
        if not self._runs or not addresses:
            return None
        last, nbytes, _ = self._runs[-1]
        # All lie behind the runs, as tensors do that are made later.
        if min(addresses) >= last + nbytes:
            return None
        for k, (at, size) in enumerate(zip(addresses, sizes, strict=True)):
            # The last one that begins before the other's end is the one that reaches farthest.
            place = bisect_left(self._starts, at + size) - 1
            if place < 0 or not size:
                continue
            start, nbytes, i = self._runs[place]
            if start + nbytes > at:
                return i, k
        return None

"""Reduction of gradients over ranks, one by one, in an order that no rank's graph decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

Reduce = Callable[[Tensor], Tensor]


class Reduction:
    """Calls ``reduce`` once for every parameter of a pass, always in the same order.

    A collective pairs the first call of one rank with the first of another, whatever they hold.
    Autograd completes gradients in the order of its graph, which may differ between ranks; so a
    gradient waits here for those before it. A parameter that this rank's pass did not reach takes
    part with zeros, because another rank may have reached it.

    Args:
        reduce: Maps this rank's gradient to that of all ranks; may work in place.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._order: Sequence[Tensor] = ()
        self._next = 0
        self._held: dict[int, Tensor] = {}

    def begin(self, order: Sequence[Tensor]) -> None:
        """Begin a pass over these parameters, in this order."""
        self._order, self._next = order, 0
        self._held.clear()

    def complete(self, p: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters that this gradient was holding up, and their reduced gradients."""
        self._held[id(p)] = grad
        while self._next < len(self._order) and id(self._order[self._next]) in self._held:
            yield self._turn()

    def rest(self, zero: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters left at the end of the pass, and their reduced gradients."""
        while self._next < len(self._order):
            p = self._order[self._next]
            if id(p) not in self._held:
                self._held[id(p)] = zero(p)
            yield self._turn()

    def _turn(self) -> tuple[Tensor, Tensor]:
        p = self._order[self._next]
        self._next += 1
        reduced = self._reduce(self._held.pop(id(p)))
        if not isinstance(reduced, Tensor) or reduced.shape != p.shape:
            got = tuple(reduced.shape) if isinstance(reduced, Tensor) else type(reduced).__name__
            raise ValueError(
                f"reduce returned {got} for a gradient of shape {tuple(p.shape)}: return the "
                "reduced gradient, also where it works in place"
            )
        return p, reduced

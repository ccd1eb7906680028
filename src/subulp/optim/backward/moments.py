"""Accumulation without a buffer: each gradient goes into Adam's moments at once.

"Adam Accumulation to Reduce Memory Footprints of both Activations and Gradients for Large-scale
DNN Training" (AdamA). The first moment is linear in the gradient, so it becomes that of the sum;
the second takes the sum of the squares instead of the square of the sum, which is not the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .accumulation import Accumulator

Fold = Callable[[Tensor, Tensor, bool, int], None]
"""Takes a parameter, its gradient, whether its moments have decayed in this step already, and the
number of the gradient in the step, from 0."""


class MomentAccumulator(Accumulator):
    """Folds gradients into the moments of Adam or AdamW, which decay once a step.

    Args:
        passes: Backward passes to a step.
        fold: Takes a gradient into the moments of its parameter.
    """

    revocable = False

    def __init__(self, passes: int, fold: Fold) -> None:
        super().__init__(passes)
        self._fold = fold
        self._folded: set[Tensor] = set()

    def check(self, params: Sequence[Tensor]) -> None:
        """Moments take the gradients of every parameter."""

    def add(self, p: Tensor) -> None:
        """Fold the gradient into the moments."""
        grad, p.grad = p.grad, None
        assert grad is not None
        self._fold(p, grad, p in self._folded, self.done)
        self._folded.add(p)

    def folded(self, p: Tensor) -> bool:
        """Whether the moments of a parameter have decayed in this step."""
        return p in self._folded

    def total(self, p: Tensor, *, keep: bool) -> Tensor:
        """The gradient of the last pass alone, zero if it has none."""
        assert not keep, "moments cannot be folded twice"
        grad, p.grad = p.grad, None
        return self.zero(p) if grad is None else grad

    def holds(self, p: Tensor) -> bool:
        """Whether a parameter must step although the last pass did not reach it."""
        return p in self._folded

    def advance(self) -> None:
        """The pass is over; after the last one, moments are whole again."""
        super().advance()
        if self.done == 0:
            self._folded.clear()

    def reset(self) -> None:
        """Begin a step; what is folded stays in the moments."""
        super().reset()
        self._folded.clear()

    def release(self, params: Sequence[Tensor]) -> None:
        """What is folded stays in the moments."""

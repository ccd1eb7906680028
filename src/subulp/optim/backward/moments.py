"""Accumulation without a buffer: each gradient is added to Adam's moments at once.

"Adam Accumulation to Reduce Memory Footprints of both Activations and Gradients for Large-scale
DNN Training" (AdamA). The first moment is linear in the gradient, so it is that of the sum. The
second takes the sum of the squares instead of the square of the sum: an approximation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .. import shards
from .accumulation import Accumulator, take

Fold = Callable[[Tensor, Tensor, bool, int], None]
"""Called with a parameter, its gradient, whether its moments already hold an earlier gradient of
the step, and the gradient's number in the step, from 0."""


class MomentAccumulator(Accumulator):
    """Adds gradients to the moments of Adam or AdamW, which decay once per step.

    Args:
        passes: Backward passes to a step.
        fold: Adds a gradient to the moments of its parameter.
    """

    revocable = False

    def __init__(self, passes: int, fold: Fold) -> None:
        super().__init__(passes)
        self._fold = fold
        self._folded: set[Tensor] = set()

    def check(self, params: Sequence[Tensor]) -> None:
        """Any parameter has moments: nothing to refuse."""

    def add(self, p: Tensor) -> None:
        """Add the gradient to the moments."""
        self._fold(p, shards.gradient_part(p, take(p)), p in self._folded, self.done)
        self._folded.add(p)

    def folded(self, p: Tensor) -> bool:
        """Whether the moments of a parameter hold an earlier gradient of this step."""
        return p in self._folded

    def total(self, p: Tensor) -> Tensor:
        """The gradient of the last pass alone; zeros if there is none."""
        return self.zero(p) if p.grad is None else take(p)

    def free(self, p: Tensor) -> None:
        """Forget that the moments of a parameter held gradients of an unfinished step."""
        self._folded.discard(p)

    def buffer_bytes(self, p: Tensor) -> int:
        """Moments are there in any case."""
        return 0

    def holds(self, p: Tensor) -> bool:
        """Whether a parameter must step even if the last pass does not reach it."""
        return p in self._folded

    def advance(self) -> None:
        """End a pass; after the last one, the moments hold no unfinished step."""
        super().advance()
        if self.done == 0:
            self._folded.clear()

    def reset(self) -> None:
        """Start the step again; gradients already in the moments stay there."""
        super().reset()
        self._folded.clear()

    def release(self, params: Sequence[Tensor]) -> None:
        """Gradients already in the moments stay there."""

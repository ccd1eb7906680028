"""Parameters that one call of a fused op updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..ops.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter stands in an optimizer.

    Attributes:
        group: Number of its group.
        index: Its position in the group.
        stream: Its position among all parameters, the key of its random bits.
    """

    group: int
    index: int
    stream: int


@dataclass
class Bucket:
    """Parameters of one group, dtype and device, and their gradients, of one dtype.

    Attributes:
        group: The group.
        strategy: Its strategy for these parameters.
        params: The parameters.
        grads: Their gradients.
        streams: Their positions among all parameters.
        folded: The moments have decayed in this step already, and hold earlier gradients of it.
    """

    group: dict[str, Any]
    strategy: Strategy
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    folded: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(grad.nbytes for grad in self.grads)


Buckets = dict[tuple[Any, ...], Bucket]
"""Buckets by what their parameters and gradients have in common."""

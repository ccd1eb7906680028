"""Gradients of several backward passes in one buffer a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..numerics import expansion, format_of

AccumulateIn = Literal["param", "fp32", "expansion"]


class Accumulator:
    """Adds up gradients over ``passes`` backward passes, in a chosen format.

    ``"param"`` adds in the parameter's dtype, as autograd does in ``p.grad``; ``"fp32"`` in FP32.
    ``"expansion"`` keeps the sum as two components of the parameter's dtype: BF16 holds 16
    significant bits of it in 4 bytes.

    Args:
        passes: Backward passes to a step.
        form: Format of the buffer.
    """

    def __init__(self, passes: int, form: AccumulateIn) -> None:
        self._passes, self._form = passes, form
        self._done = 0
        self._buffers: dict[Tensor, tuple[Tensor, ...]] = {}

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if a parameter cannot have the format."""
        if self._passes == 1 or self._form == "fp32":
            return
        for p in params:
            if self._form == "param" and p.dtype.itemsize == 1:
                raise ValueError(
                    f"accumulate_in='param' is not available for a parameter of dtype {p.dtype}: "
                    "FP8 gradients do not add up; use 'fp32'"
                )
            if self._form == "expansion" and p.dtype not in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"accumulate_in='expansion' is not available for a parameter of dtype {p.dtype}"
                    ": it takes bfloat16 or float16; use 'fp32'"
                )

    @property
    def last(self) -> bool:
        """Whether the current pass completes a step."""
        return self._done == self._passes - 1

    def add(self, p: Tensor) -> Tensor | None:
        """Take the gradient of this pass; the sum of all in the last one, else ``None``."""
        if self.last:
            total = self.preview(p)
            self.forget(p)
            self._buffers.pop(p, None)
            return total
        assert p.grad is not None
        self._buffers[p] = self._sum(p, p.grad)
        p.grad = None
        return None

    def preview(self, p: Tensor) -> Tensor:
        """The sum of all passes up to now; nothing is taken."""
        if p in self._buffers:
            components = self._buffers[p] if p.grad is None else self._sum(p, p.grad)
            return _decode(components)
        assert p.grad is not None
        return p.grad

    def take(self, p: Tensor) -> Tensor:
        """The sum of a parameter that the last pass did not reach."""
        total = self.preview(p)
        self.forget(p)
        self._buffers.pop(p, None)
        return total

    def forget(self, p: Tensor) -> None:
        """Free the gradient of this pass."""
        p.grad = None

    def holds(self, p: Tensor) -> bool:
        """Whether earlier passes left something for a parameter."""
        return p in self._buffers

    def advance(self) -> None:
        """The pass is over."""
        self._done = (self._done + 1) % self._passes

    def reset(self) -> None:
        """Forget all passes since the last step."""
        self._done = 0
        self._buffers.clear()

    def release(self, params: Sequence[Tensor]) -> None:
        """Leave what is accumulated in ``p.grad``."""
        for p in params:
            if p in self._buffers:
                p.grad = _decode(self._buffers.pop(p)).to(p.dtype)

    def _sum(self, p: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        earlier = self._buffers.get(p)
        if self._form == "param":
            return (grad if earlier is None else earlier[0] + grad,)
        wide = grad.to(torch.float32)
        if earlier is not None:
            wide = _decode(earlier) + wide
        if self._form == "fp32":
            return (wide,)
        return tuple(c.to(p.dtype) for c in expansion.encode(wide, format_of(p.dtype)))


def _decode(components: tuple[Tensor, ...]) -> Tensor:
    return components[0] if len(components) == 1 else expansion.decode(*components)

"""Accumulation of the gradients of several backward passes into one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ...numerics import expansion, format_of
from .. import shards

BufferFormat = Literal["param", "fp32", "expansion"]


class Accumulator(ABC):
    """Counts the backward passes of a step, and keeps the gradients of the earlier ones.

    Args:
        passes: Backward passes to a step.

    Attributes:
        passes: Backward passes to a step.
        done: Those of the current step that are over.
        ends: Whether the current pass completes a step; ``None``: by its number.
        revocable: Whether a step can still be skipped once all its gradients are known.
    """

    revocable = True

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.done = 0
        self.ends: bool | None = None

    @property
    def last(self) -> bool:
        """Whether the current pass completes a step."""
        return self.done == self.passes - 1 if self.ends is None else self.ends

    def advance(self) -> None:
        """End a pass."""
        self.done = 0 if self.last else self.done + 1

    def reset(self) -> None:
        """Discard all passes since the last step."""
        self.done = 0

    def folded(self, p: Tensor) -> bool:
        """Whether the optimizer's moments already hold earlier gradients of a parameter."""
        return False

    @abstractmethod
    def check(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if a parameter's gradients cannot be accumulated like this."""

    @abstractmethod
    def add(self, p: Tensor) -> None:
        """Take and free a parameter's gradient, in a pass that is not the last."""

    @abstractmethod
    def total(self, p: Tensor) -> Tensor:
        """Take and free a parameter's gradient in the last pass, and add the earlier ones.

        Of a DTensor it is what this rank holds, unless it is still to be reduced.

        The earlier ones are kept until :meth:`free`, for the last pass may fail, or run again.

        Args:
            p: The parameter; the last pass need not have reached it.
        """

    @abstractmethod
    def free(self, p: Tensor) -> None:
        """Forget the earlier gradients of a parameter: it has stepped."""

    @abstractmethod
    def buffer_bytes(self, p: Tensor) -> int:
        """Bytes that are kept for a parameter between passes."""

    def zero(self, p: Tensor) -> Tensor:
        """The gradient of a parameter that no pass has reached: zeros."""
        dtype = getattr(p, "grad_dtype", None) or p.dtype
        return torch.zeros_like(shards.local(p), dtype=dtype, requires_grad=False)

    @abstractmethod
    def holds(self, p: Tensor) -> bool:
        """Whether earlier passes have left a gradient for a parameter."""

    @abstractmethod
    def release(self, params: Sequence[Tensor]) -> None:
        """Leave unfinished sums in ``p.grad``, if there are any."""


class BufferAccumulator(Accumulator):
    """Sums gradients in one buffer per parameter, in a chosen format.

    ``"param"`` adds in the parameter's dtype, as autograd does in ``p.grad``; ``"fp32"`` adds in
    FP32. ``"expansion"`` stores the sum as two components of the parameter's dtype: in BF16, 16
    significant bits in 4 bytes.

    Args:
        passes: Backward passes to a step.
        form: Format of the buffer.
    """

    def __init__(self, passes: int, form: BufferFormat) -> None:
        super().__init__(passes)
        self._form = form
        self._wide = passes > 1 and form != "param"
        self._buffers: dict[Tensor, tuple[Tensor, ...]] = {}

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if a parameter cannot have a buffer of this format."""
        if self.passes == 1 or self._form == "fp32":
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

    def add(self, p: Tensor) -> None:
        """Add the gradient to the buffer."""
        total = self._sum(p, self._buffers.get(p))
        if self._form == "expansion":
            hi, lo = expansion.encode(total, format_of(p.dtype))
            self._buffers[p] = hi.to(p.dtype), lo.to(p.dtype)
        else:
            self._buffers[p] = (total,)

    def total(self, p: Tensor) -> Tensor:
        """The sum, in the dtype that it is computed in."""
        earlier = self._buffers.get(p)
        if p.grad is not None:
            return self._sum(p, earlier)
        assert earlier is not None
        # It may be reduced in place.
        return _decode(earlier).clone()

    def free(self, p: Tensor) -> None:
        """Free the buffer."""
        self._buffers.pop(p, None)

    def buffer_bytes(self, p: Tensor) -> int:
        """Bytes of the buffer; none if every pass steps."""
        if self.passes == 1:
            return 0
        own = (getattr(p, "grad_dtype", None) or p.dtype).itemsize
        itemsize = {"param": own, "fp32": 4, "expansion": 2 * p.dtype.itemsize}[self._form]
        return shards.local(p).numel() * itemsize

    def zero(self, p: Tensor) -> Tensor:
        """Zeros, in the dtype of other totals."""
        zero = super().zero(p)
        return zero.to(torch.float32) if self._wide else zero

    def holds(self, p: Tensor) -> bool:
        """Whether there is a buffer."""
        return p in self._buffers

    def reset(self) -> None:
        """Discard all passes since the last step, and free the buffers."""
        super().reset()
        self._buffers.clear()

    def release(self, params: Sequence[Tensor]) -> None:
        """Leave unfinished sums in ``p.grad``, in the parameter's dtype."""
        for p in params:
            if p in self._buffers:
                total = _decode(self._buffers.pop(p)).to(p.dtype)
                p.grad = total if shards.is_sharded(total) else shards.part_of(p, total)

    def _sum(self, p: Tensor, earlier: tuple[Tensor, ...] | None) -> Tensor:
        grad = take(p)
        if self._wide:
            grad = shards.gradient_part(p, grad).to(torch.float32)
        return grad if earlier is None else _decode(earlier) + grad


def take(p: Tensor) -> Tensor:
    """Take the gradient of a parameter away from it; of a DTensor, what this rank holds.

    One that is not reduced yet stays so: clipped and added up as it is, it gives the bits of a step
    outside the backward pass.
    """
    grad, p.grad = p.grad, None
    assert grad is not None
    unreduced = shards.is_sharded(grad) and not shards.is_placed_like(p, grad)
    return grad if unreduced else shards.gradient_part(p, grad)


def _decode(components: tuple[Tensor, ...]) -> Tensor:
    return components[0] if len(components) == 1 else expansion.decode(*components)

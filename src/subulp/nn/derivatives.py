"""Derivatives that modules compute by themselves: first ones, in backward passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass whose gradients refuse to be differentiated.

    As torch's decorator of this name, which refuses only where the gradients that came in require
    one: those of a sum do not, and what is computed from it, such as a penalty on a gradient's
    norm, would have no derivative, without a word.
    """

    @wraps(backward)
    def first(ctx: Any, *grads: Tensor | None) -> Any:
        # Autograd runs backward passes with gradients enabled only under create_graph.
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        one = not isinstance(found, tuple)
        start = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        name = type(ctx).__name__.strip("_").removesuffix("Backward")
        last = _Last.apply(start, name, *((found,) if one else found))  # type: ignore[no-untyped-call]
        return last[0] if one else last

    return first


class _Last(torch.autograd.Function):
    """Gradients as they are, which have no derivative."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, name: str, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"the gradient of {ctx.name} is differentiated, and has no derivative: keep what needs "
            "second derivatives, as a penalty on gradients does, out of such layers"
        )


def check_no_tangent(name: str, tensor: Tensor) -> None:
    """Raise NotImplementedError if a tensor has a tangent of forward-mode differentiation."""
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            f"{name} has a tangent, and forward-mode differentiation is not available here: it "
            "would be lost; use backward()"
        )


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` records what PyTorch does, which kernels in C++ escape."""
    return torch._C._get_tracing_state() is not None

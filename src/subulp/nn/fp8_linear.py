"""A linear layer whose three products have both operands in E4M3, for FP8 units.

As in "FP8 Formats for Deep Learning" a tensor has one scale; it is that of the tensor as it is now,
and gradients are in E4M3 too, since their scale follows them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.fp8_product import product, quantised
from .derivatives import once_differentiable
from .narrow import gradient_dtype, without_autocast

E4M3 = torch.float8_e4m3fn


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(q(x), q(weight), bias)``; gradients are products of ``q(grad_y)``.

    ``q`` rounds to E4M3 under a scale of the whole tensor; a weight in E4M3 is taken as it is.
    ``q(x)``, a byte a number, is what is saved for the gradient of the weight.

    Args:
        x: ``(..., in_features)``, FP32, BF16 or FP16, not empty.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)`` or ``None``.

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.

    Raises:
        ValueError: The weight is in E5M2.
    """
    if weight.dtype == torch.float8_e5m2:
        raise ValueError(
            "products='fp8' multiplies E4M3, and the weight is in float8_e5m2: E4M3 lacks its "
            "range; use a weight in float8_e4m3fn, or products='auto'"
        )
    y: Tensor = _Fp8Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def _of_weight(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    return (weight, None) if weight.dtype == E4M3 else quantised(weight)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with without_autocast(x):
            codes, scale = quantised(x.reshape(-1, x.shape[-1]))
            of_weight, weight_scale = _of_weight(weight)
            y = product(codes, of_weight, scale, weight_scale, x.dtype, bias)
        ctx.save_for_backward(codes, scale, weight)
        ctx.set_materialize_grads(False)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.weight_grad_dtype = gradient_dtype(weight)
        ctx.bias_grad_dtype = None if bias is None else gradient_dtype(bias)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        # None passes where fuse_backward(keep_bytes=) has the gradients below already.
        if grad_y is None:
            return None, None, None
        codes, scale, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        rows = grad_y.reshape(-1, weight.shape[0])
        with without_autocast(grad_y):
            if needs_x or needs_weight:
                of_grad, grad_scale = quantised(rows)
            if needs_x:
                of_weight, weight_scale = _of_weight(weight)
                grad_x = product(of_grad, of_weight.t(), grad_scale, weight_scale, ctx.x_dtype)
                grad_x = grad_x.view(ctx.x_shape)
            if needs_weight:
                # Rounded once, from the FP32 sums.
                wanted = ctx.weight_grad_dtype
                dtype = wanted if wanted in (torch.bfloat16, torch.float16) else torch.float32
                grad_weight = product(of_grad.t(), codes.t(), grad_scale, scale, dtype).to(wanted)
            if needs_bias:
                grad_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_grad_dtype)
        return grad_x, grad_weight, grad_bias

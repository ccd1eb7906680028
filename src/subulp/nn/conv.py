"""A convolution whose weight stays narrow: decoded while the layer computes, multiplied in FP32.

A CPU without BF16 and FP16 units convolves in those dtypes up to seventy times slower than in
FP32. The FP32 copy of a layer's weight lives only while the layer computes; cutting it into tiles
would repeat the transform of the input for every tile.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .derivatives import once_differentiable
from .narrow import (
    ACTIVATION_DTYPES,
    NATIVE_ON_GPU,
    autocast_operands,
    draw_wide,
    gradient_dtype,
    without_autocast,
)

_Pair = tuple[int, int]
_Size = int | _Pair


def narrow_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _Size = 1,
    padding: _Size = 0,
    dilation: _Size = 1,
    groups: int = 1,
) -> Tensor:
    """``F.conv2d(x.float(), weight.float(), bias.float(), ...)``, saving nothing wide.

    Saves ``x`` and the narrow weight for backward. The gradient of the weight is computed in FP32
    and rounded to nearest into ``weight.grad_dtype`` (the weight's own dtype where it is not set).
    Under ``torch.autocast``, FP32 operands are first cast to its dtype, as in ``F.conv2d``. On a
    GPU, BF16 and FP16 weights multiply natively in their own dtype.

    Args:
        x: ``(batch, in_channels, height, width)``, FP32, BF16 or FP16.
        weight: ``(out_channels, in_channels / groups, kernel height, kernel width)``, any
            floating-point dtype that casts to FP32.
        bias: ``(out_channels,)`` or ``None`` (default: ``None``).
        stride: Stride of the kernel, one for both dimensions or one for each (default: 1).
        padding: Zeros added around the input, likewise (default: 0).
        dilation: Spacing of the kernel's elements, likewise (default: 1).
        groups: Number of blocks of channels without connections between them (default: 1).

    Returns:
        ``(batch, out_channels, out height, out width)`` in the dtype of ``x``.

    Raises:
        ValueError: A dtype or a shape does not fit.
    """
    _check(x, weight)
    x, weight = autocast_operands(x, weight)
    options = (_pair(stride), _pair(padding), _pair(dilation), groups)
    if weight.dtype == torch.float32:
        wide_bias = None if bias is None else bias.float()
        return F.conv2d(x.float(), weight, wide_bias, *options).to(x.dtype)
    if x.is_cuda and weight.dtype in NATIVE_ON_GPU:
        native_bias = None if bias is None else bias.to(weight.dtype)
        return F.conv2d(x.to(weight.dtype), weight, native_bias, *options).to(x.dtype)
    if torch.compiler.is_exporting():
        wide_bias = None if bias is None else bias.float()
        return F.conv2d(x.float(), weight.float(), wide_bias, *options).to(x.dtype)
    y: Tensor = _NarrowConv2d.apply(x, weight, bias, *options)  # type: ignore[no-untyped-call]
    return y


class Conv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d`` for a weight in any storage dtype.

    Created in torch's default dtype like its parent; ``.to(torch.bfloat16)`` (or FP16, FP8) makes
    it narrow. See :func:`narrow_conv2d` for what is computed and kept.
    """

    def reset_parameters(self) -> None:
        """As in torch; parameters in FP8 are drawn in FP32 and rounded."""
        draw_wide(self, super().reset_parameters)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: _Pair = (0, 0)
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        elif self.padding == "same":
            # An even kernel needs one zero more on one side.
            input = F.pad(input, self._reversed_padding_repeated_twice)
        elif not isinstance(self.padding, str):
            padding = _pair(self.padding)
        return narrow_conv2d(
            input, weight, bias, _pair(self.stride), padding, _pair(self.dilation), self.groups
        )


class _NarrowConv2d(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        with without_autocast(x):
            return F.conv2d(x.float(), weight.float(), wide_bias, *options).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, *ctx.options = inputs
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.bias_grad_dtype = None if bias is None else gradient_dtype(bias)
        ctx.weight_grad_dtype = gradient_dtype(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        # None passes where fuse_backward(keep_bytes=) has the gradients below already.
        if grad_y is None:
            return (None,) * 7
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.options
        with without_autocast(x):
            gradients = torch.ops.aten.convolution_backward(
                grad_y.float(),
                x.float(),
                weight.float(),
                [weight.shape[0]],
                stride,
                padding,
                dilation,
                transposed=False,
                output_padding=(0, 0),
                groups=groups,
                output_mask=ctx.needs_input_grad[:3],
            )
        dtypes = (x.dtype, ctx.weight_grad_dtype, ctx.bias_grad_dtype)
        narrow = (
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, dtypes, strict=True)
        )
        return *narrow, None, None, None, None


def _pair(value: Any) -> _Pair:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(
            f"x has dtype {x.dtype}: narrow_conv2d takes FP32, BF16 or FP16 activations; cast x"
        )
    if weight.dim() != 4 or not weight.is_floating_point():
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and dtype {weight.dtype}: expected a "
            "floating-point tensor (out_channels, in_channels / groups, height, width)"
        )
    if x.dim() != 4:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: expected (batch, in_channels, height, width)"
        )

"""A linear layer whose weight stays narrow: decoded tile by tile, multiplied in FP32.

A CPU without BF16 units multiplies BF16 matrices five to six times slower than FP32 ones, and an
FP32 copy of the weights would undo the memory that narrow storage saves. So a tile of weight rows
is decoded into a buffer that fits the second-level cache, multiplied in FP32, and overwritten by
the next tile, in the forward and in the backward pass. Units of BF16 multiply narrow activations
and weights as they are; those of FP8 multiply what is rounded to it, where that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import bf16_product
from ..ops.bf16_product import bf16_mm
from ..ops.pointers import is_plain_type
from ..ops.rows import decode
from .derivatives import once_differentiable
from .dtensors import is_dtensor, linear_of_shards
from .fp8_linear import fp8_linear
from .narrow import (
    ACTIVATION_DTYPES,
    NATIVE_ON_GPU,
    autocast_operands,
    draw_wide,
    gradient_dtype,
    without_autocast,
)

# Half of a 1 MiB second-level cache. Measured against one untiled FP32 product (1024 x 1024 and
# 4096 x 1024 weights): 512 KiB costs nothing, 128 KiB costs 15 %.
TILE_BYTES = 512 * 1024
UNIT_TILE_BYTES = 4 * 1024 * 1024
"""The same where each product packs the other operand once more."""

_IN_BF16 = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_STORED = (*_IN_BF16, torch.float16)


LinearProducts = Literal["auto", "fp8"]
"""Operands of a linear layer's products."""


def narrow_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, products: LinearProducts = "auto"
) -> Tensor:
    """``F.linear(x, weight.float(), bias.float())`` without the FP32 copy of the weight.

    Saves ``x`` and the narrow weight for backward and nothing else. The gradient of the weight is
    computed in FP32, tile by tile, and rounded to nearest into ``weight.grad_dtype`` (the weight's
    own dtype where it is not set). Summation order depends on the tile, so the result equals the
    untiled product up to FP32 rounding. On a CPU with units of BF16, those multiply BF16
    activations and weights in BF16, E4M3 or E5M2 as they are, outside of compiled graphs. Under
    ``torch.autocast``, FP32 operands are first cast to its dtype, as in ``F.linear``. On a GPU,
    BF16 and FP16 weights multiply natively in their own dtype, FP8 ones in that of ``x``, in one
    product whose copy of the weight in that dtype is gone after it.

    With ``products="fp8"`` all three products have both operands in E4M3 and sums in FP32: ``x``,
    the gradient of the output, and a weight that is wider are rounded to it under a scale of the
    whole tensor, which the host never reads. GPUs of sm_89 and later multiply them on FP8 units;
    elsewhere the same numbers are decoded and multiplied in FP32. Saved for backward is ``x`` in
    E4M3, a byte a number.

    Args:
        x: ``(..., in_features)``, FP32, BF16 or FP16.
        weight: ``(out_features, in_features)``, any floating-point dtype that casts to FP32.
        bias: ``(out_features,)`` or ``None`` (default: ``None``).
        products: Operands of the products: ``"auto"``, those of the dtypes as above, or ``"fp8"``
            (default: ``"auto"``).

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.

    Raises:
        ValueError: A dtype or a shape does not fit, or ``products`` is unknown, or a weight in E5M2
            is to be multiplied in E4M3.
    """
    check_linear(x, weight, bias)
    check_products(products)
    if is_dtensor(weight) or is_dtensor(x):
        if products == "fp8":
            raise ValueError("products='fp8' has one scale for a whole tensor: not for DTensors")
        return linear_of_shards(x, weight, bias, narrow_linear)
    x, weight = autocast_operands(x, weight)
    if products == "fp8" and x.numel() > 0:
        return fp8_linear(x, weight, bias)
    if weight.dtype == torch.float32:
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight, wide_bias).to(x.dtype)
    if x.is_cuda and weight.dtype in NATIVE_ON_GPU:
        native_bias = None if bias is None else bias.to(weight.dtype)
        return F.linear(x.to(weight.dtype), weight, native_bias).to(x.dtype)
    if torch.compiler.is_exporting():
        # One product in the graph: its runtime tiles it, or not.
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
    function: type[torch.autograd.Function] = _NarrowLinear
    if x.is_cuda:
        function = _DecodedLinear
    elif _have_units(x, weight):
        function = _UnitLinear
    y: Tensor = function.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def _have_units(x: Tensor, weight: Tensor) -> bool:
    """Whether units of BF16 multiply these as they are."""
    return (
        x.dtype == torch.bfloat16
        and weight.dtype in _IN_BF16
        and _is_plain(x)
        and _is_plain(weight)
        and bf16_product.units_at(x.device)
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether C++ may be given a tensor; a graph has operators, which the compiler knows."""
    return not torch.compiler.is_compiling() and is_plain_type(type(tensor))


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` for a weight in any storage dtype and wide activations.

    Created in torch's default dtype like its parent; ``.to(torch.bfloat16)`` (or FP16, FP8) makes
    it narrow. See :func:`narrow_linear` for what is computed and saved.

    Args:
        in_features: Size of an input.
        out_features: Size of an output.
        bias: Whether there is one (default: ``True``).
        device: Device of the parameters (default: torch's).
        dtype: Dtype of the parameters (default: torch's).
        products: Operands of the products, ``"auto"`` or ``"fp8"`` (default: ``"auto"``).

    Attributes:
        products: Operands of the products; may be replaced between steps.

    Raises:
        ValueError: ``products`` is unknown.
    """

    # For modules that turn into this class.
    products: LinearProducts = "auto"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        products: LinearProducts = "auto",
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        check_products(products)
        self.products = products

    def reset_parameters(self) -> None:
        """As in torch; parameters in FP8 are drawn in FP32 and rounded."""
        draw_wide(self, super().reset_parameters)

    def forward(self, input: Tensor) -> Tensor:
        """``(..., in_features)`` to ``(..., out_features)``, in the dtype of the input."""
        return narrow_linear(input, self.weight, self.bias, products=self.products)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        shown = super().extra_repr()
        return shown if self.products == "auto" else f"{shown}, products={self.products!r}"


class _UnitLinear(torch.autograd.Function):
    """Products of BF16 numbers on their units: nothing is decoded outside of registers."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, wide_bias = x.reshape(-1, x.shape[-1]), None if bias is None else bias.float()
        y = bf16_mm(
            rows, weight.t(), rows.new_empty(rows.shape[0], weight.shape[0]), bias=wide_bias
        )
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _NarrowLinear.setup_context(ctx, inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_y is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad_y.reshape(-1, weight.shape[0])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = bf16_mm(grad_rows, weight, rows.new_empty(rows.shape)).view(x.shape)
        if needs_weight:
            grad_weight = torch.empty_like(weight, dtype=ctx.weight_grad_dtype)
            if grad_weight.dtype in bf16_product.RESULTS and grad_weight.is_contiguous():
                bf16_mm(grad_rows.t(), rows, grad_weight)
            else:
                for tile, buffer in _tiles(weight, UNIT_TILE_BYTES):
                    grad_weight[tile].copy_(bf16_mm(grad_rows[:, tile].t(), rows, buffer))
        if needs_bias:
            grad_bias = grad_rows.float().sum(0).to(ctx.bias_grad_dtype)
        return grad_x, grad_weight, grad_bias


class _DecodedLinear(torch.autograd.Function):
    """One product a pass: on a GPU tiles that fit a cache would be a launch each.

    The weight in the dtype of the activations lives as long as its product.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with without_autocast(x):
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _NarrowLinear.setup_context(ctx, inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_y is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        with without_autocast(x):
            if needs_x:
                grad_x = grad_y @ weight.to(x.dtype)
            rows = grad_y.reshape(-1, weight.shape[0])
            if needs_weight:
                grad_weight = _rounded_once(
                    rows.t(), x.reshape(-1, x.shape[-1]), ctx.weight_grad_dtype
                )
            if needs_bias:
                grad_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_grad_dtype)
        return grad_x, grad_weight, grad_bias


def _rounded_once(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in ``dtype`` on a GPU, whose sums are FP32."""
    if a.dtype in (dtype, torch.float32):
        return (a @ b).to(dtype)
    return torch.mm(a, b, out_dtype=torch.float32).to(dtype)


class _NarrowLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        y = rows.new_empty(rows.shape[0], weight.shape[0])
        with without_autocast(x):
            for tile, decoded in _decoded_tiles(weight):
                if bias is None:
                    torch.mm(rows, decoded.t(), out=y[:, tile])
                else:
                    torch.addmm(bias[tile].float(), rows, decoded.t(), out=y[:, tile])
        return y.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.bias_grad_dtype = None if bias is None else gradient_dtype(bias)
        ctx.weight_grad_dtype = gradient_dtype(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        # None passes where fuse_backward(keep_bytes=) has the gradients below already.
        if grad_y is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1]).float()
        grad_rows = grad_y.reshape(-1, weight.shape[0]).float()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad

        grad_x = torch.empty_like(rows) if needs_x else None
        grad_weight = (
            torch.empty_like(weight, dtype=ctx.weight_grad_dtype) if needs_weight else None
        )
        with without_autocast(x):
            for tile, buffer in _decoded_tiles(weight):
                grad_tile = grad_rows[:, tile]
                if grad_x is not None:
                    beta = 0 if tile.start == 0 else 1
                    torch.addmm(grad_x, grad_tile, buffer, beta=beta, out=grad_x)
                if grad_weight is not None:
                    torch.mm(grad_tile.t(), rows, out=buffer)
                    grad_weight[tile].copy_(buffer)
        grad_bias = grad_rows.sum(0).to(ctx.bias_grad_dtype) if needs_bias else None
        if grad_x is not None:
            grad_x = grad_x.view(x.shape).to(x.dtype)
        return grad_x, grad_weight, grad_bias


def _decoded_tiles(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The weight in FP32, a tile of rows at a time, each in the same buffer.

    The caller may overwrite the buffer: the next tile is decoded into it anyway.
    """
    # C++ decodes FP8 several times as fast as torch casts it.
    known = _is_plain(weight) and weight.is_contiguous() and weight.dtype in _STORED
    for tile, buffer in _tiles(weight, TILE_BYTES):
        if known:
            decode(weight[tile], buffer)
        else:
            buffer.copy_(weight[tile])
        yield tile, buffer


def _tiles(weight: Tensor, tile_bytes: int) -> Iterator[tuple[slice, Tensor]]:
    """Runs of the weight's rows, with an FP32 buffer for each, which is the same memory."""
    row_bytes = weight.shape[1] * torch.float32.itemsize
    rows = min(weight.shape[0], max(1, tile_bytes // row_bytes))
    buffer = torch.empty(rows, weight.shape[1], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], rows):
        tile = slice(start, min(start + rows, weight.shape[0]))
        yield tile, buffer[: tile.stop - tile.start]


def check_products(products: LinearProducts) -> None:
    """Raise ValueError unless products are known."""
    if products not in get_args(LinearProducts):
        raise ValueError(f"products={products!r} is unknown: use 'auto' or 'fp8'")


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless dtypes and shapes are those of a linear layer."""
    if x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"x has dtype {x.dtype}: expected FP32, BF16 or FP16 activations; cast x")
    if not weight.is_floating_point():
        raise ValueError(f"weight has dtype {weight.dtype}: expected a floating-point weight")
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: expected (out_features, in_features), both "
            "at least 1"
        )
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not multiply a weight of shape "
            f"{tuple(weight.shape)}: expected x of shape (..., {weight.shape[1]})"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}: expected ({weight.shape[0]},), one value per "
            "row of the weight"
        )

"""Matrix products of BF16 operands, summed in FP32: on units of BF16 where the processor has them.

C++ on a CPU (csrc/product.h): operands are decoded from their storage while they are packed, so no
wide copy of them exists, and results do not depend on blocks or threads, nor on the instruction
set, but that tiles of AMX have an order of their own.
PyTorch's own BF16 product on a CPU rounds its sums to BF16. On a GPU PyTorch's product, which can
leave them in FP32; elsewhere one in FP32 of the rounded operands. Both differ in the order of the
sums.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics import BF16, format_of, round_to
from ..numerics.partition import grid_of
from . import backend, facts, native
from .pointers import check_plain, data_ptr, matrix_ptr

UNITS = ("avx512-bf16", "amx-bf16")
"""Instruction sets with units of BF16."""

RESULTS = (torch.float32, torch.bfloat16)
"""Dtypes of products."""

LARGEST_EXPONENT = 126
"""Of a factor that is a normal number, as its inverse is."""


def units_at(device: torch.device) -> bool:
    """Whether the C++ kernels of a device multiply on units of BF16."""
    if device.type != "cpu" or backend.choose(device).backend != "cpu":
        return False
    return native.isa_name() in UNITS


@dataclass(frozen=True)
class Blocks:
    """Blocks of a factor in E4M3 or E5M2, each with a power of two of its own.

    Attributes:
        exponents: int8 (down, across), from -126 to 126: a stored value times ``2 ** -exponent`` is
            a number.
        types: uint8 (down, across), 1 where a block is in E5M2, else 0; ``None`` where all are in
            E4M3.
        lines: Runs of memory of a block, a multiple of 32.
        inner: Numbers of each of them, likewise.
    """

    exponents: Tensor
    types: Tensor | None
    lines: int
    inner: int

    def check(self, name: str, matrix: Tensor) -> None:
        """Raise ValueError or TypeError unless these are blocks of a factor."""
        if matrix.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} has blocks and dtype {matrix.dtype}: expected float8_e4m3fn")
        # Of one row or column none could say how its memory runs.
        if min(matrix.shape) < 2 or 1 not in matrix.stride():
            raise ValueError(
                f"{name} has blocks, shape {tuple(matrix.shape)} and strides {matrix.stride()}: "
                "expected contiguous rows or columns, two at least"
            )
        if self.lines % facts.BLOCK_STEP or self.inner % facts.BLOCK_STEP:
            raise ValueError(
                f"{name} has blocks of {self.lines} x {self.inner}: expected multiples of "
                f"{facts.BLOCK_STEP}"
            )
        grid = grid_of(_stored(matrix).shape, (self.lines, self.inner))
        for what, of_blocks, dtype, least, most in (
            ("exponents", self.exponents, torch.int8, -LARGEST_EXPONENT, LARGEST_EXPONENT),
            ("types", self.types, torch.uint8, 0, 1),
        ):
            if of_blocks is None:
                continue
            check_plain(f"{name}'s {what}", of_blocks)
            if (of_blocks.dtype, of_blocks.shape, of_blocks.device) != (dtype, grid, matrix.device):
                raise ValueError(
                    f"{name}'s {what} are {of_blocks.dtype} of {tuple(of_blocks.shape)} on "
                    f"{of_blocks.device}: expected {dtype} of {grid} on {matrix.device}"
                )
            low, high = map(int, of_blocks.aminmax())
            if low < least or high > most:
                raise ValueError(
                    f"{name}'s {what} are from {low} to {high}: expected {least} to {most}"
                )

    def native(self, name: str) -> native.ProductBlocks:
        """As C++ takes them, once they are checked."""
        across = self.exponents.shape[1]
        types = None if self.types is None else data_ptr(f"{name}'s types", self.types, torch.uint8)
        exponents = data_ptr(f"{name}'s exponents", self.exponents, torch.int8)
        return native.ProductBlocks(exponents, types, self.lines, self.inner, across)

    def decoded(self, matrix: Tensor) -> Tensor:
        """The numbers of a matrix with these blocks, in FP32."""
        stored = _stored(matrix)

        def each(of_blocks: Tensor) -> Tensor:
            down = of_blocks.repeat_interleave(self.lines, 0)[: stored.shape[0]]
            return down.repeat_interleave(self.inner, 1)[:, : stored.shape[1]]

        values = stored.float()
        if self.types is not None:
            in_e5m2 = each(self.types) == 1
            values = torch.where(in_e5m2, stored.view(torch.float8_e5m2).float(), values)
        values = values * torch.exp2(-each(self.exponents).float())
        return values if stored is matrix else values.t()


def _stored(matrix: Tensor) -> Tensor:
    """A matrix as its memory runs."""
    return matrix if matrix.stride(1) == 1 else matrix.t()


def bf16_mm(
    a: Tensor,
    b: Tensor,
    out: Tensor | None = None,
    *,
    a_scale: float = 1.0,
    b_scale: float = 1.0,
    a_blocks: Blocks | None = None,
    b_blocks: Blocks | None = None,
    out_scale: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """``bf16(a * a_scale) @ bf16(b * b_scale) * out_scale + bias``, in FP32 until the end.

    Args:
        a: ``(m, k)`` of a storage dtype: FP32, BF16, FP16, E4M3 or E5M2. Rounded to nearest even;
            what is too large saturates. Subnormal numbers of BF16 count as zero. On a GPU what is
            too large becomes infinite, and subnormal numbers stay.
        b: ``(k, n)``, likewise.
        out: FP32 or BF16 ``(m, n)``, contiguous along its rows; overwritten (default: a new one in
            FP32). Rounded to BF16 as by ``Tensor.to``.
        a_scale: A power of two (default: 1).
        b_scale: A power of two (default: 1).
        a_blocks: Blocks of ``a``, which is in E4M3 but where they say otherwise, and has no other
            scale; for units of BF16 (default: none).
        b_blocks: Blocks of ``b``, likewise.
        out_scale: Factor on the sums, rounded to FP32 (default: 1).
        bias: FP32 ``(n,)``, added to each row (default: nothing).

    Returns:
        ``(m, n)``. On a CPU, sums begin at zero and take the products in pairs along ``k``, the odd
        one of a pair first, each addition rounded once. With ``amx-bf16`` and ``plain-amx`` they
        take 32 products at a time: those of even places added up from zero, those of odd places,
        then both sums.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A shape, dtype, layout or device does not fit, or a number of its blocks.
    """
    _check(a, b, out, bias)
    for name, factor, scale, blocks in (("a", a, a_scale, a_blocks), ("b", b, b_scale, b_blocks)):
        if blocks is None:
            continue
        if scale != 1.0:
            raise ValueError(f"{name} has blocks and another scale, {scale}: expected one of them")
        blocks.check(name, factor)
    if (a_blocks or b_blocks) and not units_at(a.device):
        a = a if a_blocks is None else a_blocks.decoded(a)
        b = b if b_blocks is None else b_blocks.decoded(b)
        a_blocks = b_blocks = None
    if out is None:
        out = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    if backend.choose(a.device).backend != "cpu":
        sums = _sums(a, b, a_scale * b_scale)
        if out_scale != 1.0:
            sums.mul_(out_scale)
        return out.copy_(sums if bias is None else sums.add_(bias))
    if out.numel() == 0:
        return out
    a, b = _dense(a), _dense(b)
    a_address, a_line, a_by_row = matrix_ptr("a", a)
    b_address, b_line, b_by_row = matrix_ptr("b", b)
    out_address, out_line, _ = matrix_ptr("out", out)
    # A copy must live as long as the call needs its address.
    bias = None if bias is None else bias.contiguous()
    call = native.Product(
        *(a_address, b_address, out_address),
        None if bias is None else data_ptr("bias", bias, torch.float32),
        *(a.shape[0], b.shape[1], a.shape[1]),
        *(a_line, b_line, out_line),
        *(facts.DTYPES[a.dtype], facts.DTYPES[b.dtype], a_by_row, not b_by_row),
        *(a_scale, b_scale, facts.DTYPES[out.dtype], out_scale),
        torch.get_num_threads(),
        native.isa(),
        native.ProductBlocks() if a_blocks is None else a_blocks.native("a"),
        native.ProductBlocks() if b_blocks is None else b_blocks.native("b"),
    )
    if native.library().subulp_bf16_product(ctypes.byref(call)):
        raise RuntimeError(f"subulp_bf16_product has no kernel for {a.dtype} and {b.dtype}")
    return out


def _sums(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The product in FP32, new. Powers of two may as well be multiplied to the sums."""
    if a.is_cuda:
        sums = torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    else:
        # A sum that begins at zero is no negative zero.
        sums = torch.mm(_rounded(a), _rounded(b)).add_(0.0)
    return sums if scale == 1.0 else sums.mul_(scale)


def _rounded(x: Tensor) -> Tensor:
    """FP32 numbers of BF16."""
    return round_to(x.float(), BF16)


def _dense(matrix: Tensor) -> Tensor:
    """The matrix with runs of memory along one of its dimensions."""
    return matrix if 1 in (*matrix.stride(), *matrix.shape) else matrix.contiguous()


def _check(a: Tensor, b: Tensor, out: Tensor | None, bias: Tensor | None) -> None:
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if tensor is None:
            continue
        check_plain(name, tensor)
        if tensor.dim() != 2 or tensor.layout != torch.strided:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and layout {tensor.layout}: expected a "
                "dense matrix"
            )
        if tensor.device != a.device:
            raise ValueError(f"{name} lies on {tensor.device} and a on {a.device}")
        format_of(tensor.dtype)
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a is {tuple(a.shape)} and b {tuple(b.shape)}: expected (m, k) and (k, n)"
        )
    if bias is not None:
        check_plain("bias", bias)
        if (bias.dtype, bias.shape, bias.device) != (torch.float32, b.shape[1:], a.device):
            raise ValueError(
                f"bias is {bias.dtype} of {tuple(bias.shape)} on {bias.device}: expected FP32 "
                f"{tuple(b.shape[1:])} on {a.device}"
            )
    if out is None:
        return
    if out.dtype not in RESULTS or out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(
            f"out is {out.dtype} of {tuple(out.shape)}: expected FP32 or BF16 "
            f"{(a.shape[0], b.shape[1])}"
        )
    if out.numel() and (out.stride(1) != 1 or out.stride(0) < out.shape[1]):
        raise ValueError(f"out has strides {out.stride()}: expected contiguous rows")

"""Products of mixtures: on units of FP8 where they can multiply the operands, else decoded.

A narrow value times the inverse of its scale is the operand, on every device; units of FP8 multiply
the narrow values and the inverse scales apart, which rounds at other places. A kernel chooses by
itself (triton_product.py): the host would wait to know the formats.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...numerics import E4M3, E5M2
from .. import backend, bf16_product
from ..head import fp8
from .job import DecodeJob
from .operand import Operand, ProductJob
from .tiles import row_tiles

_FP8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
# FP32 of an operand that are decoded at a time. Of a weight of 4096 x 4096, 2 MiB at a time take
# twice as long, because each call takes a third of a millisecond; 16 MiB take as long as 8.
TILE_BYTES = 8 * 1024 * 1024
# Dtypes of a bias that the kernel reads.
_ADDED = (torch.float32, torch.bfloat16, torch.float16)
# The most and the least exponent of a factor that is a normal number, as its inverse is.
_EXPONENTS = range(-126, 127)


def product(a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T + bias``.

    Args:
        a: (rows, k).
        b: (columns, k).
        dtype: Dtype of the activations. Decoded values are rounded to it before they are multiplied
            if it is BF16 or FP16 on a GPU. If it is BF16 on a CPU with units of BF16, they are
            unless a mantissa that all scales share can be left to the result.
        bias: (columns,), added before the result is rounded to ``dtype``, or to the result
            (default: nothing).

    Returns:
        (rows, columns), FP32 or ``dtype``.
    """
    device = a.mixture.codes.device
    if device.type == "cpu" and dtype == torch.bfloat16 and bf16_product.units_at(device):
        return _bf16_product(a, b, bias)
    added = bias if bias is None or bias.dtype in _ADDED else bias.float()
    job = ProductJob(a, b, dtype, added, units=fp8.units_at(device))
    if _is_for_kernel(job):
        multiplied: Tensor = backend.run("mixture", job)
        return multiplied
    found = _product(a, b, dtype)
    return found if bias is None else found + bias.to(found.dtype)


def _is_for_kernel(job: ProductJob) -> bool:
    """Whether one launch multiplies the operands as they are stored.

    Of FP32 activations, only where units of FP8 may do: else decoded values are multiplied by
    PyTorch, whose products in FP32 are faster than the kernel's.
    """
    if job.device.type != "cuda" or backend.choose(job.device).backend != "triton":
        return False
    multiplies = job.dtype != torch.float32 or (job.units and job.is_aligned)
    return multiplies and job.step is not None


def _product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    device = a.mixture.codes.device
    if device.type == "cpu":
        return _tiled_product(a.values(), b)
    rounded = dtype if device.type == "cuda" else torch.float32
    return a.values(rounded) @ b.values(rounded).t()


def _bf16_product(a: Operand, b: Operand, bias: Tensor | None) -> Tensor:
    """``a @ b.T + bias`` in BF16, from operands that are BF16 numbers or rounded to them."""
    (left, of_left), (right, of_right) = _in_bf16(a), _in_bf16(b)
    scale, added = of_left * of_right, None if bias is None else bias.float()
    rows, a_scale = _stored_values(left) or (left.values(torch.bfloat16), 1.0)
    out = rows.new_empty(rows.shape[0], b.shape[0], dtype=torch.bfloat16)
    columns = _stored_values(right)
    if columns is not None:
        return bf16_product.bf16_mm(
            *(rows, columns[0].t(), out),
            a_scale=a_scale,
            b_scale=columns[1],
            out_scale=scale,
            bias=added,
        )
    # Not more than a tile of it is decoded at a time.
    tiles = list(row_tiles(right.mixture, max(1, TILE_BYTES // (2 * right.mixture.shape[1]))))
    if not b.transposed:
        for tile, part in tiles:
            values = replace(right, mixture=part).values(torch.bfloat16)
            bf16_product.bf16_mm(
                *(rows, values.t(), out[:, tile]),
                a_scale=a_scale,
                out_scale=scale,
                bias=None if added is None else added[tile],
            )
        return out
    if len(tiles) == 1:
        values = right.values(torch.bfloat16).t()
        return bf16_product.bf16_mm(rows, values, out, a_scale=a_scale, out_scale=scale, bias=added)
    # The contraction runs over the tiles.
    sums = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for tile, part in tiles:
        values = replace(right, mixture=part).values(torch.bfloat16).t()
        sums.add_(bf16_product.bf16_mm(rows[:, tile], values, a_scale=a_scale))
    sums.mul_(scale)
    return out.copy_(sums if added is None else sums.add_(added))


def _in_bf16(operand: Operand) -> tuple[Operand, float]:
    """An operand and its factor: a mantissa that all scales share is no part of it, and so all its
    numbers are narrow values times powers of two. Those of several groups of blocks, or beside wide
    blocks, are none of BF16's: they stay as they are.
    """
    mixture = operand.mixture
    if mixture.mantissa.numel() > 1 or mixture.wide.numel():
        return operand, 1.0
    one = torch.ones_like(mixture.mantissa)
    factor = float(one / mixture.mantissa) if mixture.mantissa.numel() else 1.0
    return replace(operand, mixture=replace(mixture, mantissa=one)), factor


def _stored_values(operand: Operand) -> tuple[Tensor, float] | None:
    """(rows, k) of a storage dtype, and the power of two that makes them the operand's values;
    ``None`` unless they are of one format and one scale, whose mantissa is 1.
    """
    mixture, fmt = operand.mixture, operand.format
    if fmt not in _FP8 or mixture.exponents.numel() != 1 or mixture.mantissa.item() != 1.0:
        return None
    exponent = int(mixture.exponents)
    if exponent not in _EXPONENTS:
        return None
    codes = mixture.codes.view(_FP8[fmt])
    return codes.t() if operand.transposed else codes, 2.0**-exponent


def _tiled_product(left: Tensor, b: Operand) -> Tensor:
    """``left @ b.T`` in FP32, where ``b`` is never decoded as a whole."""
    width = b.mixture.shape[1]
    tiles = list(row_tiles(b.mixture, max(1, TILE_BYTES // (4 * width))))
    # The same memory for all: new pages would cost more than decoding into them does.
    room = left.new_empty(max(tile.stop - tile.start for tile, _ in tiles), width)
    out = left.new_empty(left.shape[0], b.shape[0])
    # Where the contraction runs over the tiles, what one of them adds.
    term = torch.empty_like(out) if b.transposed and len(tiles) > 1 else out
    for tile, part in tiles:
        decoded = backend.run("mixture", DecodeJob(part, room[: tile.stop - tile.start]))
        if not b.transposed:
            torch.mm(left, decoded.t(), out=out[:, tile])
        elif tile.start == 0:
            torch.mm(left[:, tile], decoded, out=out)
        else:
            out.add_(torch.mm(left[:, tile], decoded, out=term))
    return out

"""Products of mixtures: on units of FP8 where they can multiply the operands, else decoded.

A narrow value times the inverse of its scale is the operand, on every device; units of FP8 multiply
the narrow values and the inverse scales apart, which rounds at other places. A kernel chooses by
itself (triton_product.py): the host would wait to know the formats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...numerics import E4M3, E5M2
from ...numerics.mixture import Mixture
from .. import backend, bf16_product, facts
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
    rows = _stored(left) or _Stored(left.values(torch.bfloat16))
    out = rows.matrix.new_empty(rows.matrix.shape[0], b.shape[0], dtype=torch.bfloat16)
    columns = _stored(right)
    if columns is not None:
        return bf16_product.bf16_mm(
            *(rows.matrix, columns.matrix.t(), out),
            a_scale=rows.scale,
            b_scale=columns.scale,
            a_blocks=rows.blocks,
            b_blocks=columns.blocks,
            out_scale=scale,
            bias=added,
        )
    # Not more than a tile of it is decoded at a time.
    tiles = list(row_tiles(right.mixture, max(1, TILE_BYTES // (2 * right.mixture.shape[1]))))
    if len(tiles) > 1 and b.transposed and rows.blocks is not None:
        # Tiles of the contraction would cut its blocks.
        rows = _Stored(left.values(torch.bfloat16))
    multiply = partial(bf16_product.bf16_mm, a_scale=rows.scale, a_blocks=rows.blocks)
    if not b.transposed:
        for tile, part in tiles:
            values = replace(right, mixture=part).values(torch.bfloat16)
            here = None if added is None else added[tile]
            multiply(rows.matrix, values.t(), out[:, tile], out_scale=scale, bias=here)
        return out
    if len(tiles) == 1:
        values = right.values(torch.bfloat16).t()
        return multiply(rows.matrix, values, out, out_scale=scale, bias=added)
    # The contraction runs over the tiles.
    sums = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for tile, part in tiles:
        values = replace(right, mixture=part).values(torch.bfloat16).t()
        sums.add_(multiply(rows.matrix[:, tile], values))
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


@dataclass(frozen=True)
class _Stored:
    """A factor that is multiplied as it is stored.

    Attributes:
        matrix: (rows, k) of a storage dtype.
        scale: The power of two that makes its numbers the operand's.
        blocks: Powers of two of its blocks, instead of one of all.
    """

    matrix: Tensor
    scale: float = 1.0
    blocks: bf16_product.Blocks | None = None


def _stored(operand: Operand) -> _Stored | None:
    """An operand that need not be decoded before it is multiplied; ``None`` unless its values are
    narrow ones times powers of two, and its blocks large.
    """
    mixture = operand.mixture
    if mixture.wide.numel() or mixture.mantissa.numel() != 1 or mixture.mantissa.item() != 1.0:
        return None
    if mixture.exponents.numel() == 1:
        fmt, exponent = operand.format, int(mixture.exponents)
        if fmt not in _FP8 or abs(exponent) > bf16_product.LARGEST_EXPONENT:
            return None
        return _Stored(operand.turned(mixture.codes.view(_FP8[fmt])), 2.0**-exponent)
    blocks = _blocks(mixture)
    codes = mixture.codes.view(torch.float8_e4m3fn)
    return None if blocks is None else _Stored(operand.turned(codes), blocks=blocks)


def _blocks(mixture: Mixture) -> bf16_product.Blocks | None:
    """Blocks as units of BF16 take them, if they do."""
    if mixture.formats not in ((E4M3,), (E4M3, E5M2)) or min(mixture.shape) < 2:
        return None
    if not (mixture.codes.is_contiguous() and mixture.exponents.is_contiguous()):
        return None
    least, most = map(int, mixture.exponents.aminmax())
    if max(-least, most) > bf16_product.LARGEST_EXPONENT:
        return None
    # A block that reaches to the end may as well reach beyond.
    lines, inner = (
        -(-size // facts.BLOCK_STEP) * facts.BLOCK_STEP if size >= whole else size
        for size, whole in zip(mixture.block, mixture.shape, strict=True)
    )
    fit = lines % facts.BLOCK_STEP == 0 and inner % facts.BLOCK_STEP == 0
    # Whatever else these may be, who decodes them refuses by name.
    known = mixture.types.dtype == torch.uint8 and mixture.types.shape in (
        (1, 1),
        mixture.exponents.shape,
    )
    if not (fit and known and int(mixture.types.max()) < len(mixture.formats)):
        return None
    types = mixture.block_types().contiguous() if len(mixture.formats) > 1 else None
    return bf16_product.Blocks(mixture.exponents, types, lines, inner)


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

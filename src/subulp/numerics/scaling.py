"""Scales that fill a narrow format's range: one mantissa a group, one exponent a block.

"MoR: Mixture of Representations", section 2 and Algorithm 1 (group amax mantissa scaling). A block
of largest magnitude ``amax`` has the ideal scale ``s = fmt.max / amax``, rounded to FP32. Of the
group's ideal scale only the mantissa is kept, ``m`` in [1, 2), and of the block's only the
exponent ``e``, one less if the block's mantissa is below the group's. The block's scale is thus
``m * 2**e <= s``: nothing saturates, and the group's amax has its ideal scale.

The paper's comparison is lost in our copy; the one here follows from its text. What it leaves open:

* Exponents are clamped to 127 where ``amax`` is tiny; the mantissa is that of the quotient all the
  same, as if exponents had no end. It so depends on ``fmt.max`` by its mantissa only.
* A block of zeros, and one with an infinity or a NaN, has scale 1 and no part in its group. Its
  exponent is stored as :data:`NO_SCALE`.
* A group without other blocks has mantissa 1.
* A scale below FP32's normal range (exponent -127) loses its last bit, downward.

Two baselines are the same thing with other mantissas: with a group for each block the scales are
ideal FP32 ones; with the mantissa 1 they are powers of two, as the microscaling formats have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .formats import Format
from .partition import Partition, block_of, blocks_of_group, to_blocks

Scaling = Literal["gam", "amax", "e8m0"]

NO_SCALE = -128
"""The exponent of a block whose scale is 1."""

MAX_EXPONENT = 127
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MANTISSA = 0x7FFFFF
_ONE = 0x3F800000
_INFINITE = 0x7F800000


@dataclass(frozen=True)
class BlockScales:
    """Scales of blocks.

    Attributes:
        mantissa: FP32 (group rows, group columns), in [1, 2).
        exponents: int8 (block rows, block columns), -127 to 127, or :data:`NO_SCALE`.
        blocks_of_group: Rows and columns of blocks in a group.
    """

    mantissa: Tensor
    exponents: Tensor
    blocks_of_group: tuple[int, int]

    def per_block(self) -> Tensor:
        """FP32 scales (block rows, block columns); a value times its scale is in range."""
        return join(spread(self.mantissa, self.exponents, self.blocks_of_group), self.exponents)

    def inverse_per_block(self) -> Tensor:
        """``1 / per_block()``, rounded to FP32: a narrow value times it is the value again."""
        return torch.ones_like(self.mantissa[:1, :1]) / self.per_block()

    @property
    def nbytes(self) -> int:
        """Bytes of mantissas and exponents."""
        return self.mantissa.nbytes + self.exponents.nbytes


def group_amax_mantissa(
    x: Tensor, fmt: Format, block: Partition = "block-128x128", group: Partition = "tensor"
) -> BlockScales:
    """Group amax mantissa scaling ("MoR", Algorithm 1).

    Args:
        x: FP32, BF16 or FP16 ``(rows, k)``, contraction dimension last.
        fmt: The format whose range is to be filled.
        block: Name or size of the blocks (default: ``"block-128x128"``).
        group: Name or size, in elements, of a group of blocks (default: ``"tensor"``, one group, as
            in the paper).

    Raises:
        ValueError: ``x`` is no matrix of numbers, ``fmt`` needs no scale, or sizes cannot apply.
    """
    sizes = _sizes(x, block)
    return scales_of(block_amax(to_blocks(x.float(), sizes)), fmt, "gam", _groups(group, sizes, x))


def amax_scaling(x: Tensor, fmt: Format, block: Partition = "block-128x128") -> BlockScales:
    """Ideal FP32 scales, the common baseline: a mantissa for every block.

    Arguments and errors are those of :func:`group_amax_mantissa`.
    """
    return scales_of(block_amax(to_blocks(x.float(), _sizes(x, block))), fmt, "amax", (1, 1))


def power_of_two_scaling(x: Tensor, fmt: Format, block: Partition = "subchannel-32") -> BlockScales:
    """Powers of two, stored in eight bits (E8M0) as in the microscaling formats.

    The largest one not above the ideal scale, so that nothing saturates. Arguments and errors are
    those of :func:`group_amax_mantissa`.
    """
    sizes = _sizes(x, block)
    return scales_of(
        block_amax(to_blocks(x.float(), sizes)), fmt, "e8m0", _groups("tensor", sizes, x)
    )


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of FP32 blocks (..., rows, columns); infinite where one is not finite."""
    return blocks.abs().amax((-2, -1)).nan_to_num(nan=torch.inf, posinf=torch.inf)


def scales_of(
    amax: Tensor, fmt: Format, scaling: Scaling, blocks_of_group: tuple[int, int]
) -> BlockScales:
    """Scales from the largest magnitudes.

    Args:
        amax: FP32 (block rows, block columns), see :func:`block_amax`.
        fmt: The format whose range is to be filled.
        scaling: Where mantissas come from: ``"gam"``, ``"amax"`` or ``"e8m0"``.
        blocks_of_group: Rows and columns of blocks in a group; for ``"amax"``, (1, 1).
    """
    check_format(fmt)
    assert scaling in get_args(Scaling)
    counts = torch.isfinite(amax) & (amax > 0)
    mantissa, exponents = ideal(torch.where(counts, amax, 1.0), fmt)
    if scaling == "e8m0":
        of_group = torch.full((1, 1), _ONE, dtype=torch.int32, device=amax.device)
        blocks_of_group = (amax.shape[0], amax.shape[1])
    else:
        group_amax = to_blocks(torch.where(counts, amax, 0.0), blocks_of_group).amax((-2, -1))
        of_group, _ = ideal(torch.where(group_amax > 0, group_amax, 1.0), fmt)
        of_group = torch.where(group_amax > 0, of_group, _ONE)
    shared = spread(of_group, amax, blocks_of_group)
    exponents = (exponents - (shared > mantissa).int()).clamp(max=MAX_EXPONENT)
    exponents = torch.where(counts, exponents, NO_SCALE).to(torch.int8)
    return BlockScales(of_group.view(torch.float32), exponents, blocks_of_group)


def ideal(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Mantissa, as the FP32 pattern of a number in [1, 2), and exponent of ``fmt.max / amax``.

    The exponent may be above 127; both are int32.
    """
    # The quotient of a tiny amax would overflow.
    tiny = amax < 2.0**-64
    amax = torch.where(tiny, amax * 2.0**64, amax)
    bits = (torch.full_like(amax, fmt.max) / amax).view(torch.int32)
    return (bits & _MANTISSA) | _ONE, (bits >> 23) - 127 + 64 * tiny.int()


def join(mantissa: Tensor, exponents: Tensor) -> Tensor:
    """``mantissa * 2**exponents`` in FP32 for exponents from -127 on; 1 for :data:`NO_SCALE`."""
    e = exponents.to(torch.int32)
    fraction = mantissa.contiguous().view(torch.int32) & _MANTISSA
    normal = ((e + 127) << 23) | fraction
    bits = torch.where(e == -127, (fraction | 0x800000) >> 1, normal)
    return torch.where(e == NO_SCALE, _ONE, bits).view(torch.float32)


def spread(of_group: Tensor, blocks: Tensor, blocks_of_group: tuple[int, int]) -> Tensor:
    """Each block's number, from those of the groups; of the shape of ``blocks``."""
    down, across = blocks_of_group
    repeated = of_group.repeat_interleave(down, 0).repeat_interleave(across, 1)
    return repeated[: blocks.shape[0], : blocks.shape[1]]


def check_format(fmt: Format) -> None:
    """Raise ValueError unless a scale makes sense for ``fmt``."""
    if fmt.exponent_bits == 8 or fmt.max < 4:
        raise ValueError(
            f"fmt={fmt.name} cannot be scaled to: it needs fewer than eight exponent bits, and a "
            "largest value of at least 4"
        )


def check_matrix(x: Tensor) -> None:
    """Raise ValueError unless ``x`` is a matrix of floating-point numbers."""
    if x.dtype not in FLOATS:
        raise ValueError(f"x has dtype {x.dtype}: expected FP32, BF16 or FP16 numbers; cast x")
    if x.layout != torch.strided:
        raise ValueError(f"x has layout {x.layout}: expected a dense matrix; call x.to_dense()")
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: expected (rows, k), both at least 1; reshape x"
        )


def _sizes(x: Tensor, block: Partition) -> tuple[int, int]:
    check_matrix(x)
    return block_of(block, x.shape)


def _groups(group: Partition, block: tuple[int, int], x: Tensor) -> tuple[int, int]:
    return blocks_of_group(group, block, x.shape)

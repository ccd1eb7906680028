"""How a matrix is cut into blocks that share a scale, and into groups of blocks.

A matrix here is the operand of a product: ``(rows, k)``, its contraction dimension last. A block is
``(rows, columns)`` in elements; ``None`` is the whole dimension. Blocks at the lower and the right
edge may be smaller. A matrix that is used along its other dimension is transposed first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Size = int | None
Partition = str | tuple[Size, Size]
"""A name of :data:`PARTITIONS`, or the size of a block."""

PARTITIONS: dict[str, tuple[Size, Size]] = {
    "tensor": (None, None),
    "channel": (1, None),
    "subchannel-128": (1, 128),
    "subchannel-32": (1, 32),
    "block-128x128": (128, 128),
}
"""The partitions of "MoR", section 3: of the tensor, a row, a part of a row, and a square."""


def parse(partition: Partition, argument: str = "partition") -> tuple[Size, Size]:
    """The block size that a name stands for, or that is given.

    Raises:
        ValueError: The name is unknown, or a size is not a positive integer or ``None``.
    """
    if isinstance(partition, str):
        if partition not in PARTITIONS:
            choices = ", ".join(map(repr, PARTITIONS))
            raise ValueError(
                f"{argument}={partition!r} is unknown: use one of {choices}, or the size of a "
                "block, (rows, columns)"
            )
        return PARTITIONS[partition]
    sizes = tuple(partition) if isinstance(partition, (tuple, list)) else ()
    if len(sizes) != 2 or not all(s is None or (type(s) is int and s >= 1) for s in sizes):
        raise ValueError(
            f"{argument}={partition!r} cannot apply: expected (rows, columns), each at least 1, or "
            "None for the whole dimension"
        )
    rows, columns = sizes
    assert not isinstance(rows, str)
    assert not isinstance(columns, str)
    return rows, columns


def block_of(partition: Partition, shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a block of a matrix of this shape; no more than the matrix has."""
    rows, columns = parse(partition)
    return min(rows or shape[0], shape[0]), min(columns or shape[1], shape[1])


def blocks_of_group(
    group: Partition, block: tuple[int, int], shape: Sequence[int]
) -> tuple[int, int]:
    """Rows and columns of blocks in a group.

    Raises:
        ValueError: A group would not consist of whole blocks.
    """
    sizes = parse(group, "group")
    found = []
    for size, part, whole in zip(sizes, block, shape, strict=True):
        if size is None or size >= whole:
            found.append(-(-whole // part))
        elif size % part == 0:
            found.append(size // part)
        else:
            raise ValueError(
                f"group={group!r} cannot apply: it does not consist of whole blocks of "
                f"{block[0]} x {block[1]}; use multiples of them"
            )
    return found[0], found[1]


def grid_of(shape: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of blocks that cover a matrix."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def is_symmetric(partition: Partition) -> bool:
    """Whether the transposed matrix has the transposed blocks."""
    rows, columns = parse(partition)
    return rows == columns


def to_blocks(x: Tensor, block: Sequence[int]) -> Tensor:
    """A matrix as ``(block rows, block columns, rows, columns)``, zeros where an edge is ragged."""
    down, across = grid_of(x.shape, block)
    missing = down * block[0] - x.shape[0], across * block[1] - x.shape[1]
    whole = torch.nn.functional.pad(x, (0, missing[1], 0, missing[0]))
    return whole.view(down, block[0], across, block[1]).transpose(1, 2)


def from_blocks(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrix again; the inverse of :func:`to_blocks`."""
    down, across, rows, columns = blocks.shape
    whole = blocks.transpose(1, 2).reshape(down * rows, across * columns)
    return whole[: shape[0], : shape[1]].contiguous()


def sizes_of_blocks(shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """Elements of each block, int64 ``(block rows, block columns)`` on the CPU."""
    sides = []
    for whole, part in zip(shape, block, strict=True):
        starts = torch.arange(0, whole, part, dtype=torch.int64, device="cpu")
        sides.append((whole - starts).clamp(max=part))
    return sides[0][:, None] * sides[1]

"""Any recipe in three passes over the matrix: magnitudes, errors of the candidates, codes.

What needs all blocks happens between the passes, by the definition's own functions on the numbers
of blocks. A backend brings the passes; so a recipe of formats and metrics that it knows runs at its
speed, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...numerics import Format
from ...numerics.mixture import (
    Evidence,
    Mixture,
    decide,
    mantissa_rows,
    numbers_of,
    wide_format_of,
)
from ...numerics.partition import sizes_of_blocks
from ...numerics.scaling import BlockScales, scales_of
from .job import EncodeJob


@dataclass(frozen=True)
class Choice:
    """What each block is encoded as.

    Attributes:
        formats: The narrow formats.
        factors: FP32 scales (block rows, block columns) of each; 0 where a block is not finite.
        types: uint8 (block rows, block columns), contiguous: the place in ``formats``, or their
            number for the wide format.
        wide_format: BF16 or FP16.
        offsets: int64 (block rows, block columns): where the lower bytes of a wide block begin.
        count: Lower bytes of all wide blocks.
    """

    formats: tuple[Format, ...]
    factors: tuple[Tensor, ...]
    types: Tensor
    wide_format: Format
    offsets: Tensor
    count: int


class Passes(Protocol):
    """What a backend brings for one matrix."""

    def measure(self) -> tuple[Tensor, Tensor, Tensor]:
        """Largest magnitudes (infinite where not finite) and smallest non-zero ones (infinite where
        there are none), FP32, and counts of non-zero values, int64; all (block rows, block columns)
        """

    def errors(self, factors: Mapping[Format, Tensor]) -> Mapping[Format, Tensor]:
        """Sums of the metric's terms over each block, FP32, in each format under its scales."""

    def write(self, choice: Choice) -> tuple[Tensor, Tensor]:
        """Codes of the matrix, and lower bytes of its wide blocks."""


def encode(job: EncodeJob, passes: Passes) -> tuple[Tensor, ...]:
    """The stored tensors, and the numbers of a summary."""
    recipe = job.recipe
    amax, smallest, counts = passes.measure()
    finite = torch.isfinite(amax)
    scales: dict[Format, BlockScales] = {
        fmt: scales_of(amax, fmt, job.scaling, job.groups) for fmt in recipe.candidates
    }
    # Blocks that are not finite have no errors: the kernels know them by the scale 0.
    factors = {fmt: torch.where(finite, s.per_block(), 0.0) for fmt, s in scales.items()}
    sums = passes.errors(factors)
    evidence = Evidence(
        recipe, amax, smallest, counts * finite, job.threshold, lambda fmt: sums[fmt]
    )
    types = decide(recipe, evidence)
    of_blocks = types.expand(amax.shape).contiguous()
    wide_format = wide_format_of(job.x.dtype)
    offsets, count = wide_offsets(of_blocks, len(recipe.formats), job.x.shape, job.block)
    given = tuple(factors[fmt] for fmt in recipe.formats)
    codes, wide = passes.write(
        Choice(recipe.formats, given, of_blocks, wide_format, offsets, count)
    )
    exponents = scales[recipe.formats[0]].exponents
    for i, fmt in enumerate(recipe.formats[1:], 1):
        exponents = torch.where(of_blocks == i, scales[fmt].exponents, exponents)
    rows = mantissa_rows(recipe.formats)
    first = [recipe.formats[rows.index(row)] for row in range(max(rows) + 1)]
    found = Mixture(
        codes,
        types,
        torch.stack([scales[fmt].mantissa for fmt in first]),
        exponents,
        wide,
        recipe.formats,
        job.block,
        scales[recipe.formats[0]].blocks_of_group,
        wide_format,
    )
    return *found.tensors, numbers_of(found, evidence)


def inverse_scales(mixture: Mixture) -> Tensor:
    """What each block's narrow values are multiplied by, FP32 (block rows, block columns)."""
    types = mixture.block_types()
    found = mixture.scales(0).inverse_per_block()
    for i in range(1, len(mixture.formats)):
        found = torch.where(types == i, mixture.scales(i).inverse_per_block(), found)
    return found.contiguous()


def wide_offsets(
    types: Tensor, last: int, shape: torch.Size, block: tuple[int, int]
) -> tuple[Tensor, int]:
    """Where each block's lower bytes begin, int64, and how many there are."""
    sizes = sizes_of_blocks(shape, block).to(types.device) * (types == last)
    ends = sizes.flatten().cumsum(0)
    return (ends - sizes.flatten()).view(types.shape), int(ends[-1])

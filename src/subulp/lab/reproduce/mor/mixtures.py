"""Mixtures of representations against their definitions, block by block in FP64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ....numerics import E4M3, E5M2, Format
from ....numerics.mixture import RECIPES, encode
from ....numerics.partition import block_of, to_blocks
from ....numerics.rounding import round_to
from ....numerics.scaling import (
    BlockScales,
    amax_scaling,
    group_amax_mantissa,
    power_of_two_scaling,
)
from ..found import Found, Observation
from . import rules

_FORMATS = (E4M3, E5M2)


def ranges() -> Found:
    """Smallest and largest positive numbers of the FP8 formats, read off all of their codes."""
    found = []
    for fmt in _FORMATS:
        assert fmt.dtype is not None
        values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).double()
        positive = values[values.isfinite() & (values > 0)]
        found.append(Observation(fmt.name, "smallest", float(positive.min())))
        found.append(Observation(fmt.name, "largest", float(positive.max())))
    return Found(tuple(found))


def scales(rows: int, columns: int, partitions: list[str]) -> Found:
    """Group amax mantissa scaling of a matrix whose blocks have all sizes.

    Args:
        rows: Of the matrix.
        columns: Of the matrix.
        partitions: Names of the blocks.
    """
    x = matrix(rows, columns)
    found = []
    for partition in partitions:
        blocks = to_blocks(x, block_of(partition, x.shape))
        amax = blocks.abs().amax((-2, -1))
        for fmt in _FORMATS:
            case = f"{partition} in {fmt.name}"
            own = group_amax_mantissa(x, fmt, partition)
            per_block = own.per_block()
            wrong = sum(
                float(scale) != _scale(fmt, float(largest), float(amax.max()))
                for scale, largest in zip(per_block.flatten(), amax.flatten(), strict=True)
            )
            found.append(Observation(case, "scales that are not the algorithm's", wrong))
            beyond = (amax.double() * per_block.double() > fmt.max * (1 + 2.0**-23)).sum()
            found.append(Observation(case, "blocks that saturate", int(beyond)))
            found.append(Observation(case, "bytes of the scales", own.nbytes - amax.numel()))
        for name, scaling in (
            ("GAM", group_amax_mantissa),
            ("FP32", amax_scaling),
            ("E8M0", power_of_two_scaling),
        ):
            error = _largest_error(x, blocks, scaling(x, E4M3, partition))
            found.append(Observation(f"{partition}, {name}", "error of the largest number", error))
    return Found(tuple(found))


def groups(
    rows: int, columns: int, partition: str, sizes: list[str], spread: float, seeds: list[int]
) -> Found:
    """What larger groups of blocks cost and save: the error in E4M3, and bytes.

    Args:
        rows: Of the matrices.
        columns: Of the matrices.
        partition: Name of the blocks.
        sizes: Names of the groups.
        spread: See :func:`matrix`.
        seeds: A matrix each.
    """
    found = []
    for seed in seeds:
        x = matrix(rows, columns, spread, seed)
        blocks = to_blocks(x, block_of(partition, x.shape))
        for group in sizes:
            own = group_amax_mantissa(x, E4M3, partition, group)
            scales = own.per_block()[..., None, None]
            back = round_to(blocks * scales, E4M3).double() / scales.double()
            errors = (back - blocks.double()).abs() / blocks.double().abs()
            measured = {
                "percent of relative error": 100 * float(errors.mean()),
                "bytes of the scales": own.nbytes,
            }
            found += [Observation(group, name, value, seed) for name, value in measured.items()]
    return Found(tuple(found))


def choices(rows: int, columns: int, recipe: str, partitions: list[str], threshold: float) -> Found:
    """What a recipe chooses for the blocks of a matrix, against :mod:`.rules`.

    Args:
        rows: Of the matrix.
        columns: Of the matrix.
        recipe: A name in :data:`subulp.numerics.mixture.RECIPES`.
        partitions: Names of the blocks.
        threshold: Of a recipe that has one.
    """
    chosen = RECIPES[recipe]
    found = []
    for partition in partitions:
        wrong, names = 0, set()
        for x in _matrices(rows, columns):
            mixture, _ = encode(x, chosen, partition, threshold=threshold)
            types = mixture.block_types()
            expected = rules.choices(x.double().numpy(), recipe, partition, threshold)
            wrong += sum(a != b for a, b in zip(types.flatten().tolist(), expected, strict=True))
            names |= set(types.flatten().tolist())
        found.append(Observation(partition, "blocks that are decided otherwise", wrong))
        found.append(Observation(partition, "representations in use", len(names)))
    return Found(tuple(found))


def matrix(rows: int, columns: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    """Random numbers, FP32, whose size differs from region to region by many binades.

    Args:
        rows: Of the matrix.
        columns: Of the matrix.
        spread: Standard deviation of the binades of a region of 16 x 16.
        seed: Of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    regions = torch.randn(-(-rows // 16), -(-columns // 16), generator=generator) * spread
    sizes = torch.exp2(regions).repeat_interleave(16, 0).repeat_interleave(16, 1)
    return torch.randn(rows, columns, generator=generator) * sizes[:rows, :columns]


def _matrices(rows: int, columns: int) -> Iterator[Tensor]:
    """Of regions that are alike, that differ, and that differ by more than FP8 spans."""
    for spread in (0.0, 3.0, 12.0):
        yield matrix(rows, columns, spread)


def _scale(fmt: Format, largest: float, of_group: float) -> float:
    """Algorithm 1 with one group: the group's mantissa, and the block's exponent or one less."""
    ideal, shared = (
        float(torch.tensor(fmt.max) / torch.tensor(amax)) for amax in (largest, of_group)
    )
    (mantissa, exponent), (group_mantissa, _) = math.frexp(ideal), math.frexp(shared)
    return math.ldexp(group_mantissa, exponent - (group_mantissa > mantissa))


def _largest_error(x: Tensor, blocks: Tensor, own: BlockScales) -> float:
    """Relative error of the matrix's largest magnitude in E4M3."""
    at = int(blocks.abs().amax((-2, -1)).argmax())
    scale = own.per_block().flatten()[at].double()
    largest = x.abs().max().double()
    back = round_to((largest * scale).float(), E4M3).double() / scale
    return float((back - largest).abs() / largest)

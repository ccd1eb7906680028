"""``subulp::mixture_encode``: scales, errors, decision and codes of every block of a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from ...numerics import mixture as definition
from ...numerics.metrics import RELATIVE_ERROR
from ...numerics.mixture import (
    ALWAYS_E4M3,
    DEFAULT_THRESHOLD,
    RECIPES,
    TENSOR,
    Mixture,
    Recipe,
    Summary,
)
from ...numerics.partition import Partition, block_of, blocks_of_group, grid_of
from ...numerics.scaling import Scaling, check_matrix
from .. import backend
from .job import DecodeJob, EncodeJob

__all__ = [
    "DecodeJob",
    "EncodeJob",
    "decode",
    "encode",
    "mixture_decode",
    "mixture_encode",
]


def encode(
    x: Tensor,
    recipe: Recipe,
    partition: Partition = "tensor",
    *,
    scaling: Scaling = "gam",
    group: Partition = "tensor",
    threshold: float = DEFAULT_THRESHOLD,
    metric: str = RELATIVE_ERROR,
) -> tuple[Mixture, Summary]:
    """:func:`subulp.numerics.mixture.encode` at the speed of the device.

    The paper's recipes and E4M3 for all, with the relative error, run in one fused pass; others
    run in plain PyTorch. Arguments and errors are those of the definition.
    """
    if recipe is ALWAYS_E4M3:
        recipe, threshold = TENSOR, math.inf
    if metric != RELATIVE_ERROR or RECIPES.get(recipe.name) is not recipe:
        return definition.encode(
            x,
            recipe,
            partition,
            scaling=scaling,
            group=group,
            threshold=threshold,
            metric=metric,
        )
    check_matrix(x)
    block = block_of(partition, x.shape)
    groups = (1, 1) if scaling == "amax" else blocks_of_group(group, block, x.shape)
    *stored, numbers = mixture_encode(
        x.contiguous(), recipe.name, block, groups, scaling, threshold
    )
    found = _mixture(stored, recipe, block, groups, scaling)
    return found, definition.summarise(recipe, numbers)


def decode(mixture: Mixture) -> Tensor:
    """:func:`subulp.numerics.mixture.decode` at the speed of the device: FP32 (rows, k)."""
    for recipe in RECIPES.values():
        if recipe.formats == mixture.formats:
            values: Tensor = mixture_decode(
                *mixture.tensors, recipe.name, mixture.block, mixture.blocks_of_group
            )
            return values
    return definition.decode(mixture)


@torch.library.custom_op("subulp::mixture_encode", mutates_args=())
def mixture_encode(
    x: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
    scaling: str,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The stored tensors of :class:`subulp.numerics.mixture.Mixture`, and its summary's numbers.

    Args:
        x: FP32, BF16 or FP16 (rows, k), contiguous.
        recipe: ``"tensor"``, ``"subtensor-2way"`` or ``"subtensor-3way"``.
        block: Rows and columns of a block.
        groups: Rows and columns of blocks in a group.
        scaling: ``"gam"``, ``"amax"`` or ``"e8m0"``.
        threshold: The tensor's error must stay below it, for ``"tensor"``.

    Returns:
        Codes, types, mantissas, exponents, lower bytes of BF16 numbers; FP64 numbers.

    Raises:
        ValueError: ``x`` is no contiguous matrix, or an argument is unknown or cannot apply.
    """
    check_matrix(x)
    _check(x, recipe, block, groups, scaling)
    job = EncodeJob(x, RECIPES[recipe], _pair(block), _pair(groups), _scaling(scaling), threshold)
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = backend.run("mixture", job)
    return result


@mixture_encode.register_fake
def _(
    x: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
    scaling: str,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    down, across = grid_of(x.shape, block)
    whole = RECIPES[recipe].granularity == "tensor"
    of_group = (1, 1) if scaling == "e8m0" else grid_of((down, across), groups)
    wide = torch.library.get_ctx().new_dynamic_size(min=0)
    return (
        torch.empty(x.shape, dtype=torch.uint8, device=x.device),
        torch.empty((1, 1) if whole else (down, across), dtype=torch.uint8, device=x.device),
        torch.empty((1, *of_group), dtype=torch.float32, device=x.device),
        torch.empty((down, across), dtype=torch.int8, device=x.device),
        torch.empty(wide, dtype=torch.uint8, device=x.device),
        torch.empty(2 * len(RECIPES[recipe].formats) + 8, dtype=torch.float64, device=x.device),
    )


@torch.library.custom_op("subulp::mixture_decode", mutates_args=())
def mixture_decode(
    codes: Tensor,
    types: Tensor,
    mantissa: Tensor,
    exponents: Tensor,
    wide: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
) -> Tensor:
    """The matrix, FP32, of what :func:`mixture_encode` returned for the same last arguments."""
    _check(codes, recipe, block, groups, "gam")
    found = Mixture(
        codes,
        types,
        mantissa,
        exponents,
        wide,
        RECIPES[recipe].formats,
        _pair(block),
        _pair(groups),
    )
    result: Tensor = backend.run("mixture", DecodeJob(found))
    return result


@mixture_decode.register_fake
def _(
    codes: Tensor,
    types: Tensor,
    mantissa: Tensor,
    exponents: Tensor,
    wide: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
) -> Tensor:
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


def _mixture(
    stored: Sequence[Tensor],
    recipe: Recipe,
    block: tuple[int, int],
    groups: tuple[int, int],
    scaling: Scaling,
) -> Mixture:
    codes, types, mantissa, exponents, wide = stored
    if scaling == "e8m0":
        groups = exponents.shape[0], exponents.shape[1]
    return Mixture(codes, types, mantissa, exponents, wide, recipe.formats, block, groups)


def _check(
    x: Tensor, recipe: str, block: Sequence[int], groups: Sequence[int], scaling: str
) -> None:
    if not x.is_contiguous():
        raise ValueError(f"x has strides {x.stride()}: the kernels read rows; call x.contiguous()")
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown: use one of {', '.join(RECIPES)}")
    for name, sizes in (("block", block), ("groups", groups)):
        if len(sizes) != 2 or min(sizes) < 1:
            raise ValueError(f"{name}={tuple(sizes)} cannot apply: expected two positive sizes")
    _scaling(scaling)


def _scaling(name: str) -> Scaling:
    for known in get_args(Scaling):
        if name == known:
            found: Scaling = known
            return found
    raise ValueError(f"scaling={name!r} is unknown: use one of {', '.join(get_args(Scaling))}")


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    return sizes[0], sizes[1]

# mypy: allow-untyped-calls
"""Mixtures in Triton: encoding (triton_encode.py) and decoding (triton_decode.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...numerics.mixture import DEFAULT_THRESHOLD, THREE_WAY, Mixture, Recipe, wide_format_of
from ...numerics.partition import grid_of
from ..triton import launch
from ..triton.choices import Configuration
from . import triton_both, triton_decode, triton_encode, triton_product
from .job import DecodeJob, EncodeBothJob, EncodeJob, Job
from .kept import KeptEncoding
from .operand import ProductJob
from .triton_tiles import Launch


def run(job: Job | EncodeBothJob | ProductJob) -> tuple[Tensor, ...] | Tensor:
    """Run ``job``: return the stored tensors and the numbers of a summary, the decoded matrix, or
    the product.

    Raises:
        RuntimeError: The kernels do not run on the device of the tensors.
    """
    launch.check_device(triton_encode.candidates_kernel, job.device)
    if isinstance(job, ProductJob):
        return triton_product.multiply(job)
    if isinstance(job, DecodeJob):
        return triton_decode.decode(job)
    if isinstance(job, EncodeBothJob):
        return triton_both.encode(job)
    return triton_encode.encode(job)


def encode_job(
    shape: tuple[int, int],
    block: tuple[int, int],
    dtype: torch.dtype,
    recipe: Recipe = THREE_WAY,
    *,
    kept: bool = False,
) -> EncodeJob:
    """A matrix without numbers, of which compilers are told.

    Args:
        shape: Rows and columns.
        block: Those of a block.
        dtype: FP32, BF16 or FP16.
        recipe: What decides (default: in three ways).
        kept: Whether what is encoded is kept (default: ``False``).
    """
    x = torch.empty(shape, dtype=dtype, device="meta")
    block = min(block[0], shape[0]), min(block[1], shape[1])
    encoding = KeptEncoding() if kept else None
    return EncodeJob(
        x, recipe, block, grid_of(shape, block), "gam", DEFAULT_THRESHOLD, kept=encoding
    )


def encode_both_job(
    shape: tuple[int, int], side: int, dtype: torch.dtype, recipe: Recipe = THREE_WAY
) -> EncodeBothJob:
    """A matrix without numbers, to encode along rows and columns, of which compilers are told.

    Args:
        shape: Rows and columns.
        side: Columns of a block, and rows of one of the transpose.
        dtype: FP32, BF16 or FP16.
        recipe: What decides (default: in three ways).
    """
    job = encode_job(shape, (1, side), dtype, recipe)
    return EncodeBothJob(
        job, replace(encode_job(shape[::-1], (1, side), dtype, recipe), x=job.x.t())
    )


def encoded(job: EncodeJob) -> Mixture:
    """What becomes of a matrix without numbers."""
    stored, _numbers, _launches = triton_encode.planned(job)
    codes, types, mantissa, exponents, low = stored
    return Mixture(
        *(codes, types, mantissa, exponents, low),
        job.recipe.formats,
        job.block,
        job.groups,
        wide_format_of(job.x.dtype),
    )


def launches_of(
    job: Job | EncodeBothJob | ProductJob, configuration: Configuration | None = None
) -> list[Launch]:
    """All launches of a job; of a product, in its first configuration or another."""
    if isinstance(job, ProductJob):
        return [triton_product.planned(job, job.result(), configuration)]
    if isinstance(job, DecodeJob):
        return [triton_decode.planned(job, job.result())]
    if isinstance(job, EncodeBothJob):
        return triton_both.planned(job)[1]
    return triton_encode.planned(job)[2]


def compile_for(
    target: launch.Target,
    kernel: str,
    job: Job | EncodeBothJob | ProductJob,
    configuration: Configuration | None = None,
) -> Any:
    """Compile a kernel ahead of time, see :func:`subulp.ops.triton.launch.compile_for`.

    Args:
        target: Which GPU.
        kernel: ``"measure"``, ``"blocks"``, ``"candidates"``, ``"chunks"``, ``"write"``,
            ``"decode"``, ``"measure_both"``, ``"candidates_both"``, ``"write_both"`` or
            ``"product"``.
        job: What launches it; its tensors need no numbers.
        configuration: One of :func:`.triton_product.configurations` (default: the first).

    Raises:
        ValueError: The job does not.
    """
    launches = {each.name: each for each in launches_of(job, configuration)}
    if kernel not in launches:
        raise ValueError(f"kernel={kernel!r} is not launched: there are {', '.join(launches)}")
    return launches[kernel].compile_for(target)

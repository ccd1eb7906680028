"""Mixtures in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ...numerics import mixture
from ..rows import encode
from .job import DecodeJob, Job


def run(job: Job) -> tuple[Tensor, ...] | Tensor:
    """Return the stored tensors and the numbers of a summary, or the decoded matrix."""
    if isinstance(job, DecodeJob):
        values = mixture.decode(job.mixture)
        return values if job.room is None else encode(values, job.room)
    found, numbers = mixture.encode_blocks(
        job.x, job.recipe, job.block, job.groups, job.scaling, job.threshold, job.metric
    )
    return *found.tensors, numbers

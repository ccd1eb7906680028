"""Head step in plain PyTorch."""

from __future__ import annotations

from ..sgd import reference as sgd
from . import HeadJob, tiles


def run(job: HeadJob) -> None:
    """Run ``job`` with the whole chunk as one tile."""
    tiles.run(job, job.chunk_rows, sgd.run)

"""Head step on a CPU: tiles of rows that fit the caches, FP32 products, C++ kernels around them."""

from __future__ import annotations

from ..sgd import cpu as sgd
from . import HeadJob, fused, tiles

TILE_BYTES = 4 * 1024 * 1024
"""FP32 bytes of a tile's weights: enough for fast products, small enough for a shared cache."""


def run(job: HeadJob) -> None:
    """Run ``job``."""
    tile_rows = max(1, TILE_BYTES // (4 * job.dim))
    if not fused.run(job, tile_rows):
        tiles.run(job, tile_rows, sgd.run)

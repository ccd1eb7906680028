"""How far rounded numbers are from what they stand for: means, summed in one order everywhere.

"MoR", section 1, decides by the relative error; its formula, which our copy lacks, is taken to be
the mean of ``|x - q(x)| / |x|``. A kernel adds in an order that suits it; for equal bits there is
one order for all:

1. A block is cut into tiles of 128 rows and 4,096 columns from its first element on.
2. A row of a tile: lane ``l`` of 16 adds the elements ``l``, ``l + 16``, ... in turn. Then the
   upper half of the lanes is added to the lower half until one is left.
3. The rows of a tile: the upper half of 128 is added to the lower half until one is left.
4. The tiles of a block, row by row, are added up like the elements of a row.
5. The blocks of a tensor, if a single number is wanted, are a row of tiles of 4,096.

What is missing counts as zero, all numbers are FP32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LANES = 16
TILE_ROWS = 128
TILE_COLUMNS = 4096

Terms = Callable[[Tensor, Tensor], Tensor]
"""What each value adds to the mean: from scaled FP32 values and their rounded values."""


def relative_error(scaled: Tensor, rounded: Tensor) -> Tensor:
    """``|t - q| * (1 / |t|)``, the subtraction exact; 1 where a value is rounded to zero.

    Relative errors do not depend on the scale, so these are taken of the scaled values, where the
    only error is that of the rounding.
    """
    error = (scaled - rounded).abs() * (torch.ones_like(scaled) / scaled.abs())
    return torch.where(rounded == 0, 1.0, error)


def squared_relative_error(scaled: Tensor, rounded: Tensor) -> Tensor:
    """``relative_error`` squared: few large errors count more than many small ones."""
    error = relative_error(scaled, rounded)
    return error * error


def underflow(scaled: Tensor, rounded: Tensor) -> Tensor:
    """1 where a value is rounded to zero, so that the mean is the share of the values lost."""
    del scaled
    return (rounded == 0).to(torch.float32)


RELATIVE_ERROR = "relative-error"
"""The name of the paper's metric."""

KNOWN: dict[str, Terms] = {
    RELATIVE_ERROR: relative_error,
    "squared-relative-error": squared_relative_error,
    "underflow": underflow,
}
"""The metrics that every backend computes at full speed; none depends on a scale."""

_registered: dict[str, Terms] = {}


def register(name: str, terms: Terms) -> None:
    """Make a Python function available as a metric, for experiments.

    Kernels cannot run it: operands that it judges are encoded in plain PyTorch, 30 to 1,000 times
    slower, with a warning that names it. It is known to this process only: a configuration that
    names it can be pickled, and used wherever it is registered.

    Args:
        name: What ``metric=`` calls it.
        terms: From FP32 scaled values and the values that they are rounded to, of any shape, to the
            FP32 number that each adds to the mean. Zeros and what is not finite are left out of the
            mean, whatever it returns for them.

    Raises:
        ValueError: The name is taken, or ``terms`` cannot be called.
    """
    if name in KNOWN or name in _registered:
        raise ValueError(f"name={name!r} is taken: choose another one for this metric")
    if not callable(terms):
        raise ValueError(f"terms={terms!r} is not a function: see numerics.metrics.relative_error")
    _registered[name] = terms


def unregister(name: str) -> None:
    """Forget a registered metric.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in _registered:
        raise ValueError(f"name={name!r} is not registered: use one of {list(_registered)}")
    del _registered[name]


def terms_of(metric: str) -> Terms:
    """The function of a metric.

    Raises:
        ValueError: There is none of this name.
    """
    found = {**KNOWN, **_registered}
    if not isinstance(metric, str) or metric not in found:
        choices = ", ".join(map(repr, found))
        raise ValueError(f"metric={metric!r} is unknown: use one of {choices}, or register it")
    return found[metric]


def block_sums(terms: Tensor) -> Tensor:
    """Sums of FP32 blocks (block rows, block columns, rows, columns), one a block."""
    tiles = _cut(_cut(terms, -2, TILE_ROWS), -1, TILE_COLUMNS)
    # Now (block rows, block columns, tiles down, rows, tiles across, columns).
    of_rows = lane_sums(tiles).transpose(-2, -1)
    return lane_sums(_halve(of_rows).flatten(-2))


def total(sums: Tensor) -> Tensor:
    """Sum of the numbers of all blocks, FP32 ()."""
    return lane_sums(lane_sums(_cut(sums.reshape(1, -1), -1, TILE_COLUMNS)))[0]


def _cut(x: Tensor, dim: int, size: int) -> Tensor:
    """``dim`` as two, the second one at most ``size`` long, with zeros after the last element."""
    length = x.shape[dim]
    part = min(length, size)
    missing = -length % part
    x = x.movedim(dim, -1)
    x = torch.nn.functional.pad(x, (0, missing))
    x = x.reshape(*x.shape[:-1], -1, part)
    return x.movedim((-2, -1), (dim - 1, dim)) if dim != -1 else x


def lane_sums(x: Tensor) -> Tensor:
    """Sums of the last dimension, step 2: by lanes, in turn, then by halves."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES))
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // LANES, LANES)
    lanes = parts[..., 0, :]
    for part in range(1, parts.shape[-2]):
        lanes = lanes + parts[..., part, :]
    return _halve(lanes)


def _halve(x: Tensor) -> Tensor:
    """Sums of the last dimension by halves, of a power of two, zeros after the last."""
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]

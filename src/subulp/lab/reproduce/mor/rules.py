"""MoR's selection, written anew from the paper's words: none of it is the library's.

Section 3: a tensor is parted into blocks, and each takes the first of a list of formats, from the
most aggressive one on, whose test it passes, else BF16. Where our copy ends, the tests are those of
the library's pages. Numbers times scales, their rounding and its error are exact in FP64; relative
errors are rounded once, and summed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_LARGEST = {"e4m3": 448.0, "e5m2": 57_344.0}
_SMALLEST_NORMAL = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
_MANTISSA = {"e4m3": 3, "e5m2": 2}


def choices(x: Matrix, recipe: str, partition: str, threshold: float) -> list[int]:
    """For each block, row by row, the place of its format in the recipe's list; BF16 is the last.

    Args:
        x: FP32 numbers.
        recipe: ``"tensor"``, ``"subtensor-2way"`` or ``"subtensor-3way"``.
        partition: Blocks.
        threshold: Of ``"tensor"``: the largest mean relative error, not included.
    """
    largest = float(np.abs(x).max())
    blocks = [block[block != 0] for block in _blocks(x, partition)]
    e4m3 = [_errors(block, "e4m3", largest) for block in blocks]
    if recipe == "tensor":
        every = np.concatenate(e4m3)
        narrow = math.fsum(every) / len(every) < threshold
        return [0 if narrow else 1] * len(blocks)
    chosen = []
    for block, errors in zip(blocks, e4m3, strict=True):
        own = math.fsum(errors)
        other = math.fsum(_errors(block, "e5m2", largest))
        if recipe == "subtensor-2way":
            chosen.append(0 if own < other else 1)
            continue
        sizes = np.abs(block)
        span = sizes.max() / sizes.min()
        fits = span <= _LARGEST["e5m2"] / _SMALLEST_NORMAL["e5m2"]
        chosen.append(0 if own <= other else 1 if fits else 2)
    return chosen


def _blocks(x: Matrix, partition: str) -> Iterator[Matrix]:
    """The parts of a matrix; its last dimension is that of the dot product."""
    rows, columns = x.shape
    high, wide = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "subchannel-32": (1, 32),
        "subchannel-128": (1, 128),
        "block-128x128": (128, 128),
    }[partition]
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            yield x[top : top + high, left : left + wide]


def _errors(block: Matrix, fmt: str, of_tensor: float) -> Matrix:
    """Relative errors of a block's numbers under the scale of Algorithm 1, one group."""
    scaled = block * _scale(_LARGEST[fmt], float(np.abs(block).max()), of_tensor)
    return np.abs(_rounded(scaled, fmt) - scaled) / np.abs(scaled)


def _scale(largest: float, of_block: float, of_group: float) -> float:
    """The group's mantissa, and the block's exponent, one less if its mantissa is smaller."""
    ideal, shared = (float(np.float32(largest) / np.float32(a)) for a in (of_block, of_group))
    (mantissa, exponent), (group_mantissa, _) = math.frexp(ideal), math.frexp(shared)
    return math.ldexp(group_mantissa, exponent - (group_mantissa > mantissa))


def _rounded(x: Matrix, fmt: str) -> Matrix:
    """The nearest numbers of an FP8 format, of two the even one, and at most the largest one."""
    _, exponents = np.frexp(x)
    lowest = round(math.log2(_SMALLEST_NORMAL[fmt]))
    unit = np.exp2(np.maximum(exponents - 1, lowest) - _MANTISSA[fmt])
    # NumPy rounds halves to even.
    nearest = np.rint(x / unit) * unit
    limited: Matrix = np.clip(nearest, -_LARGEST[fmt], _LARGEST[fmt])
    return limited

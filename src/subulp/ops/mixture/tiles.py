"""Parts of a mixture: runs of its rows, so that a product need not decode all of it at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ...numerics.mixture import Mixture
from ...numerics.partition import grid_of, sizes_of_blocks


def row_tiles(mixture: Mixture, rows: int) -> Iterator[tuple[slice, Mixture]]:
    """Runs of about ``rows`` rows, each a mixture that decodes to what the whole does there.

    Runs end where groups of blocks do: of larger groups, there are fewer runs.
    """
    mixture = mixture.trimmed()
    height, width = mixture.shape
    if grid_of(mixture.shape, mixture.block) == (1, 1):
        # A single block: its wide numbers, if it is wide, follow each other row by row.
        per_row = width if mixture.wide.numel() else 0
        for start in range(0, height, rows):
            stop = min(start + rows, height)
            yield (
                slice(start, stop),
                replace(
                    mixture,
                    codes=mixture.codes[start:stop],
                    wide=mixture.wide[start * per_row : stop * per_row],
                    block=(stop - start, width),
                ),
            )
        return
    blocks, groups = grid_of(mixture.shape, mixture.block)[0], mixture.mantissa.shape[1]
    # One group of all rows may be cut anywhere.
    of_group = 1 if groups == 1 else mixture.blocks_of_group[0]
    step = of_group * max(1, rows // (of_group * mixture.block[0]))
    offsets = _wide_offsets(mixture)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        start, stop = first * mixture.block[0], min(last * mixture.block[0], height)
        group = slice(None) if groups == 1 else slice(first // of_group, math.ceil(last / of_group))
        yield (
            slice(start, stop),
            replace(
                mixture,
                codes=mixture.codes[start:stop],
                types=mixture.types if mixture.types.numel() == 1 else mixture.types[first:last],
                mantissa=mixture.mantissa[:, group],
                exponents=mixture.exponents[first:last],
                wide=mixture.wide[offsets[first] : offsets[last]],
                block=(min(mixture.block[0], stop - start), mixture.block[1]),
            ),
        )


def _wide_offsets(mixture: Mixture) -> list[int]:
    """Where the wide numbers of each row of blocks begin, and where all end."""
    blocks = grid_of(mixture.shape, mixture.block)[0]
    if not mixture.wide.numel():
        return [0] * (blocks + 1)
    is_wide = (mixture.types == len(mixture.formats)).cpu()
    counts = (sizes_of_blocks(mixture.shape, mixture.block) * is_wide).sum(1)
    return [0, *counts.cumsum(0).tolist()]

"""How lines look: the same strategy in the same way in every figure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Dashes = str | tuple[float, Sequence[float]]


class Look(NamedTuple):
    """Of a line: told apart by colour, by dashes, and by markers.

    Attributes:
        color: Of Okabe and Ito's, which the common kinds of colour blindness tell apart, as hex.
        dashes: ``"solid"``, or an offset and lengths in widths of the line, as in Matplotlib.
        marker: Matplotlib's letter.
    """

    color: str
    dashes: Dashes
    marker: str


NAMED: dict[str, Look] = {
    "fp32": Look("#000000", (0, (1, 1)), "."),
    "master": Look("#000000", "solid", "o"),
    "nearest": Look("#D55E00", (0, (5, 2)), "s"),
    "collage-light": Look("#0072B2", (0, (5, 2, 1, 2)), "^"),
    "collage-plus": Look("#009E73", (0, (1, 1.5)), "D"),
    "kahan": Look("#CC79A7", (0, (8, 3)), "v"),
    "stochastic": Look("#E69F00", (0, (3, 1.5)), "P"),
    "fp32-states": Look("#56B4E9", (0, (3, 1, 1, 1, 1, 1)), "X"),
    "amp": Look("#7A5195", (0, (6, 1)), "p"),
}
SPARE: tuple[Look, ...] = (
    Look("#7F7F7F", (0, (2, 2)), "<"),
    Look("#8C564B", (0, (6, 2, 2, 2)), ">"),
    Look("#4B0092", (0, (4, 1)), "*"),
    Look("#5D5D00", (0, (1, 3)), "h"),
    Look("#D55E00", (0, (5, 2)), "s"),
    Look("#0072B2", (0, (5, 2, 1, 2)), "^"),
    Look("#009E73", (0, (1, 1.5)), "D"),
    Look("#CC79A7", (0, (8, 3)), "v"),
    Look("#E69F00", (0, (3, 1.5)), "P"),
    Look("#56B4E9", (0, (3, 1, 1, 1, 1, 1)), "X"),
    Look("#7A5195", (0, (6, 1)), "p"),
    Look("#000000", (0, (3, 3)), "d"),
)


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name: its own, or a spare one; spare ones repeat after the last."""
    spare = itertools.cycle(SPARE)
    return {name: NAMED.get(name) or next(spare) for name in names}

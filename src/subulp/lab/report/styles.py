"""Colours and line styles: a strategy looks the same in every figure, also without colour."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Dashes = Literal["solid"] | tuple[float, Sequence[float]]

COLOURS: dict[str, tuple[str, str]] = {
    "text": ("#1d2228", "#e6eaef"),
    "quiet": ("#58616c", "#a3adb8"),
    "grid": ("#e3e6ea", "#2a313a"),
    "axis": ("#7d8690", "#7b8794"),
    "panel": ("#f6f7f9", "#1a2027"),
    "on-fill": ("#14181d", "#ffffff"),
    "weights": ("#7db4e6", "#3f7fb8"),
    "gradients": ("#f2b26b", "#b8742a"),
    "states": ("#6cc7a3", "#2f8a69"),
    "activations": ("#c3c8cf", "#5b6571"),
    # Matplotlib leaves a fill of #000000 out of SVG, as the default: it would stay black when dark.
    "black": ("#010101", "#f0f0f0"),
    # Okabe and Ito's, distinguishable with the common kinds of colour blindness, then darker ones.
    "vermilion": ("#d55e00", "#ff8c42"),
    "blue": ("#0072b2", "#5db7f2"),
    "green": ("#009e73", "#2ccb9b"),
    "pink": ("#cc79a7", "#eda3cb"),
    "orange": ("#e69f00", "#ffbe3d"),
    "sky": ("#56b4e9", "#a4dbff"),
    "purple": ("#7a5195", "#c094df"),
    "grey": ("#7f7f7f", "#a9a9a9"),
    "brown": ("#8c564b", "#cf9387"),
    "indigo": ("#4b0092", "#a882ff"),
    "olive": ("#5d5d00", "#c9c93a"),
}
"""Every colour of a figure by the name of its CSS variable: on a light page (and in PNG files), and
on a dark one."""


class LineStyle(NamedTuple):
    """The look of a line: colour, dashes and marker.

    Attributes:
        colour: One of :data:`COLOURS`.
        dashes: ``"solid"``, or an offset and lengths in widths of the line, as in Matplotlib.
        marker: Matplotlib's letter.
    """

    colour: str
    dashes: Dashes
    marker: str

    @property
    def hex(self) -> str:
        """The colour on a light page."""
        return COLOURS[self.colour][0]


STYLES = (
    LineStyle("black", "solid", "o"),
    LineStyle("vermilion", (0, (5, 2)), "s"),
    LineStyle("blue", (0, (5, 2, 1, 2)), "^"),
    LineStyle("green", (0, (1, 1.5)), "D"),
    LineStyle("pink", (0, (8, 3)), "v"),
    LineStyle("orange", (0, (3, 1.5)), "P"),
    LineStyle("sky", (0, (3, 1, 1, 1, 1, 1)), "X"),
    LineStyle("purple", (0, (6, 1)), "p"),
    LineStyle("black", (0, (1, 1)), "."),
    LineStyle("grey", (0, (2, 2)), "<"),
    LineStyle("brown", (0, (6, 2, 2, 2)), ">"),
    LineStyle("indigo", (0, (4, 1)), "*"),
    LineStyle("olive", (0, (1, 3)), "h"),
    LineStyle("black", (0, (3, 3)), "d"),
)
# Every figure gives these their own style, also one that shows only some of them.
_OWN = dict(
    zip(
        (
            *("master", "nearest", "collage-light", "collage-plus"),
            *("kahan", "stochastic", "fp32-states", "amp", "fp32"),
        ),
        STYLES,
        strict=False,
    )
)


def line_styles(names: Iterable[str]) -> list[LineStyle]:
    """A style for each name: a strategy's own, else one that no other name has.

    Where there are more names than styles, styles repeat.
    """
    names = list(names)
    used = {_OWN[name] for name in names if name in _OWN}
    unused = [style for style in (*STYLES[len(_OWN) :], *STYLES) if style not in used]
    spare = itertools.cycle(dict.fromkeys(unused) or STYLES)
    found: list[LineStyle] = []
    for name in names:
        own = _OWN.get(name)
        found.append(next(spare) if own is None or own in found else own)
    return found

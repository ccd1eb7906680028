"""Stacked bars, one for each variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import svg

_WIDTH = 360.0
_ROW, _BAR = 41.0, 16.0
_LETTER = 5.6
_GAP = 1.5


@dataclass(frozen=True)
class Bar:
    """A variant's parts.

    Attributes:
        name: Of the variant.
        parts: Sizes by name, in the order in which they are stacked.
        total: What is written beside the name.
    """

    name: str
    parts: dict[str, float]
    total: str


@dataclass(frozen=True)
class BarChart:
    """A figure with its text.

    Attributes:
        title: Of the figure.
        unit: Of the sizes.
        bars: What it shows.
        kinds: Of the parts, by name: the class that fills them.
        text: Of a size.
    """

    title: str
    unit: str
    bars: Sequence[Bar]
    kinds: dict[str, str]
    text: Callable[[float], str]

    @property
    def markup(self) -> str:
        """The figure as SVG."""
        return svg.markup(_draw(self))

    def legend(self) -> list[tuple[str, str]]:
        """Kind and name of the parts; those without a name inside any bar are found by it."""
        found = dict.fromkeys(itertools.chain.from_iterable(bar.parts for bar in self.bars))
        return [(self.kinds[name], name) for name in found]


def _draw(chart: BarChart) -> svg.Element:
    height = _ROW * len(chart.bars) + 2
    described = "; ".join(
        f"{bar.name}: " + ", ".join(f"{n} {chart.text(v)}" for n, v in bar.parts.items())
        for bar in chart.bars
    )
    root = svg.figure(_WIDTH, height, chart.title, f"{chart.unit}. {described}.")
    longest = max((sum(bar.parts.values()) for bar in chart.bars), default=0.0) or 1.0
    for row, bar in enumerate(chart.bars):
        top = _ROW * row
        svg.text(root, bar.name, 0, top + 12, class_="label")
        svg.text(root, bar.total, _WIDTH, top + 12, class_="value", text_anchor="end")
        x = 0.0
        for name, size in bar.parts.items():
            width = _WIDTH * size / longest
            if width > 0:
                _part(root, chart, name, size, x, top + 17, width)
            x += width
    return root


def _part(
    root: svg.Element, chart: BarChart, name: str, size: float, x: float, y: float, width: float
) -> None:
    drawn = max(width - _GAP, min(width, 0.5))
    group = svg.child(root, "g", class_=f"part {chart.kinds[name]}")
    svg.tooltip(group, f"{name}: {chart.text(size)}")
    svg.child(group, "rect", class_="fill", x=x, y=y, width=drawn, height=_BAR)
    svg.child(group, "rect", class_="pattern", x=x, y=y, width=drawn, height=_BAR)
    words = next((w for w in (name, chart.text(size)) if _LETTER * len(w) + 8 < drawn), None)
    if words is not None:
        svg.text(group, words, x + drawn / 2, y + 11.8, text_anchor="middle")

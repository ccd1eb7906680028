"""Quality against memory: a point for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import svg
from .line_chart import apart
from .line_styles import Look

_WIDTH, _HEIGHT = 360.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 42.0, 336.0, 10.0, 40.0


@dataclass(frozen=True)
class Point:
    """A variant's place.

    Attributes:
        name: Of the variant.
        key: What stands beside the point.
        look: Of its marker.
        x: Its memory.
        y: Its quality, the mean over seeds.
        ends: Lowest and highest quality over seeds.
    """

    name: str
    key: str
    look: Look
    x: float
    y: float
    ends: tuple[float, float]


@dataclass(frozen=True)
class ScatterChart:
    """A figure with its text.

    Attributes:
        title: Of the figure.
        unit: Of the vertical axis.
        axis: Of the horizontal one.
        points: What it shows.
    """

    title: str
    unit: str
    axis: str
    points: Sequence[Point]

    @property
    def markup(self) -> str:
        """The figure as SVG."""
        return svg.markup(_draw(self))


def _draw(chart: ScatterChart) -> svg.Element:
    points = chart.points
    described = "; ".join(f"{p.name}: {p.x:.3g}, {p.y:.3g}" for p in points)
    root = svg.figure(
        _WIDTH, _HEIGHT, chart.title, f"{chart.unit} against {chart.axis}. {described}."
    )
    low = min(0.0, *(p.ends[0] for p in points))
    high = max(0.0, *(p.ends[1] for p in points))
    room = 0.06 * (high - low) or 1.0
    low, high = low - room, high + room
    widest = 1.05 * max(p.x for p in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (_RIGHT - _LEFT) * x / widest,
            _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * (y - low) / (high - low),
        )

    grid = svg.child(root, "g", class_="grid")
    for value in svg.ticks(low, high, log=False):
        y = at(0, value)[1]
        kind = "zero" if value == 0 else "level"
        svg.child(grid, "line", class_=kind, x1=_LEFT, x2=_RIGHT, y1=y, y2=y)
        svg.text(grid, svg.tick_text(value), _LEFT - 6, y + 3.5, text_anchor="end")
    bottom = _HEIGHT - _BOTTOM
    for value in svg.ticks(0.0, widest, log=False):
        x = at(value, low)[0]
        svg.child(grid, "line", class_="tick", x1=x, x2=x, y1=bottom, y2=bottom + 4)
        svg.text(grid, svg.tick_text(value), x, bottom + 15, text_anchor="middle")
    svg.child(grid, "line", class_="tick", x1=_LEFT, x2=_RIGHT, y1=bottom, y2=bottom)
    svg.text(grid, chart.axis, (_LEFT + _RIGHT) / 2, _HEIGHT - 6, text_anchor="middle")
    heights = apart([at(p.x, p.y)[1] for p in points], 11.5, _TOP + 4, bottom - 2)
    for point, height in zip(points, heights, strict=True):
        group = svg.child(root, "g", style=f"--c:var(--c-{point.look.color[1:]})")
        x, y = at(point.x, point.y)
        ends = [at(point.x, end)[1] for end in point.ends]
        svg.child(group, "line", class_="whisker", x1=x, x2=x, y1=ends[0], y2=ends[1])
        place = svg.marker(group, point.look, x, y, 4.2)
        svg.tooltip(place, f"{point.name}: {point.x:.4g}, {point.y:.4g}")
        svg.text(group, point.key, x + 9, height + 3.8, class_="label")
    return root

"""Quality against memory: a point for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes

from .figure import LINE_WIDTH, TEXT, WIDTH, Panel, handle, legend_height, text_width
from .styles import LineStyle

_HEIGHT, _AXIS = 190.0, 34.0
_LEFT = 40.0
_NEAR = 0.02


@dataclass(frozen=True)
class Point:
    """A variant's place.

    Attributes:
        name: Name of the variant.
        label: What stands above the point.
        x: Memory.
        y: Quality, the mean over seeds.
        ends: Lowest and highest quality over seeds.
    """

    name: str
    label: str
    x: float
    y: float
    ends: tuple[float, float]


@dataclass(frozen=True)
class Path:
    """Variants that differ in one thing only, joined by a line.

    Attributes:
        name: What they have in common.
        style: Colour, dashes and marker.
        points: The variants.
    """

    name: str
    style: LineStyle
    points: Sequence[Point]


@dataclass(frozen=True)
class TradeOff:
    """Means over seeds as points, with bars that span all seeds.

    Attributes:
        title: Heading of the figure.
        quantity: What the vertical axis shows.
        axis: What the horizontal one shows.
        paths: What is shown.
    """

    title: str
    quantity: str
    axis: str
    paths: Sequence[Path]

    @property
    def unit(self) -> str:
        """What the points are."""
        return f"{self.quantity}; points are means over seeds, bars span them"

    @property
    def description(self) -> str:
        """Every point."""
        points = "; ".join(f"{p.name}: {p.x:.3g}, {p.y:.3g}" for p in self._points)
        return f"{self.quantity} against {self.axis}. {points}."

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in points."""
        return WIDTH, self._top + _HEIGHT + _AXIS + 6 + legend_height(
            [path.name for path in self.paths]
        )

    def draw(self, panel: Panel) -> None:
        """Less memory is on the left."""
        points = self._points
        top, right, bottom = self._top, panel.width - 12, self._top + _HEIGHT
        axes = panel.axes(_LEFT, top, right, bottom)
        low = min([0.0, *(point.ends[0] for point in points)])
        high = max([0.0, *(point.ends[1] for point in points)])
        margin = 0.06 * (high - low) or 1.0
        axes.set_ylim(low - margin, high + margin)
        widest = 1.04 * max(point.x for point in points)
        axes.set_xlim(0, widest)
        panel.ticks(axes, xlabel=self.axis, left=_LEFT, bottom=bottom + 30)
        axes.axhline(0, color=TEXT, linewidth=1)
        for place, path in enumerate(self.paths):
            # Points of equal memory stand side by side, so that their bars do not overlap.
            aside = 0.007 * widest * (place - (len(self.paths) - 1) / 2)
            _draw_path(axes, panel, path, aside)
        labels = [(panel.place(axes, x, 0)[0], label) for label, x in self._labels()]
        panel.labels_above(labels, left=_LEFT + 6, right=right, bottom=top - 12)
        entries = [(handle(path.style), path.name) for path in self.paths]
        panel.legend(entries, bottom + _AXIS + 6)

    @property
    def _top(self) -> float:
        return 16 + max(text_width(point.label) for point in self._points)

    def _labels(self) -> list[tuple[str, float]]:
        """Labels and their places; points of one label that nearly share a place share it."""
        sizes: dict[str, list[list[float]]] = {}
        for point in sorted(self._points, key=lambda point: point.x):
            groups = sizes.setdefault(point.label, [])
            if groups and point.x - groups[-1][-1] < _NEAR:
                groups[-1].append(point.x)
            else:
                groups.append([point.x])
        return [(label, fmean(group)) for label, groups in sizes.items() for group in groups]

    @property
    def _points(self) -> list[Point]:
        return [point for path in self.paths for point in path.points]


def _draw_path(axes: Axes, panel: Panel, path: Path, aside: float) -> None:
    points, style = sorted(path.points, key=lambda point: point.x), path.style
    x, y = [p.x + aside for p in points], [p.y for p in points]
    axes.vlines(x, [p.ends[0] for p in points], [p.ends[1] for p in points], style.hex, lw=1)
    axes.plot(x, y, color=style.hex, linestyle=style.dashes, linewidth=LINE_WIDTH)
    texts = [f"{p.name}: {p.x:.4g}, {p.y:.4g}" for p in points]
    panel.marks(axes, (x, y), style, texts, size=7)

"""Lines against steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import svg
from .line_styles import Look
from .series import Series, spans_decades

_WIDTH, _TOP, _BOTTOM = 360.0, 8.0, 36.0
_HEIGHT = 230.0
_MARKERS = 7
_MOST_POINTS = 160
_LABEL_HEIGHT = 13.0
_LETTER = 6.1
_LONGEST_NAME = 17
_MOST_NAMES = 6
_LEAST_SPAN = 0.004


@dataclass(frozen=True)
class Line:
    """A variant's values.

    Attributes:
        name: Of the variant.
        key: A short sign that stands for it where names have no room.
        look: Of the line.
        series: Its values.
    """

    name: str
    key: str
    look: Look
    series: Series


@dataclass(frozen=True)
class LineChart:
    """A figure with its text.

    Attributes:
        title: Of the figure.
        unit: Of its values.
        lines: What it shows.
        text: Of a value.
        from_zero: The axis begins at zero.
        zero: What zero means, if it is a line of its own.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    text: Callable[[float], str]
    from_zero: bool = False
    zero: str | None = None

    @property
    def keyed(self) -> bool:
        """Whether keys stand at the ends of the lines, so that the figure needs a legend."""
        names = [line.name for line in self.lines]
        return len(names) > _MOST_NAMES or max(map(len, names), default=0) > _LONGEST_NAME

    @property
    def seeds(self) -> int:
        """The most seeds that a line has."""
        return max((len(line.series[1]) for line in self.lines), default=0)

    @property
    def markup(self) -> str:
        """The figure as SVG."""
        return svg.markup(_draw(self))

    def numbers(self, most: int = 12) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """Its values as a table: steps, and a row for each line, with at most ``most`` columns."""
        steps = sorted({int(s) for line in self.lines for s in line.series[0]})
        if len(steps) > most:
            steps = [steps[i] for i in np.linspace(0, len(steps) - 1, most).round().astype(int)]
        rows = []
        for line in self.lines:
            values = dict(zip(line.series[0].tolist(), _mean(line.series), strict=True))
            cells = [self._cell(values.get(step)) for step in steps]
            rows.append((line.name, cells))
        return [f"{step:,}" for step in steps], rows

    def _cell(self, value: float | None) -> str:
        if value is None:
            return ""
        return self.text(value) if math.isfinite(value) else "not finite"


def _mean(series: Series) -> list[float]:
    values = series[1]
    return [float(v) for v in values.mean(0)] if values.size else []


@dataclass(frozen=True)
class _Frame:
    """From data to places in the figure."""

    left: float
    right: float
    height: float
    last: float
    low: float
    high: float
    log: bool

    def x(self, step: float) -> float:
        return self.left + (self.right - self.left) * step / self.last

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        bottom = self.height - _BOTTOM
        return bottom - (bottom - _TOP) * (value - low) / (high - low)


def _draw(chart: LineChart) -> svg.Element:
    lines = [line for line in chart.lines if np.isfinite(line.series[1]).any()]
    labels = [line.key if chart.keyed else line.name for line in lines]
    height = max(_HEIGHT, _TOP + _BOTTOM + _LABEL_HEIGHT * len(lines))
    frame = _frame(chart, lines, labels, height)
    root = svg.figure(_WIDTH, height, chart.title, _description(chart))
    _axes(root, chart, frame)
    for line in lines:
        if len(line.series[1]) > 1:
            # Many bands cover each other.
            _band(root, frame, line, "band faint" if len(lines) > _MOST_NAMES else "band")
    for line in lines:
        _line(root, chart, frame, line)
    _labels(root, frame, lines, labels)
    return root


def _frame(chart: LineChart, lines: Sequence[Line], labels: Sequence[str], height: float) -> _Frame:
    shown = [line.series[1][np.isfinite(line.series[1])] for line in lines]
    every = np.concatenate(shown or [np.zeros(0)])
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
    log = not (chart.from_zero or chart.zero) and spans_decades(shown)
    if chart.from_zero or chart.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if not log:
        # What nearly does not change is a flat line, not its last digits.
        short = _LEAST_SPAN * max(abs(low), abs(high)) - (high - low)
        if short > 0 or low == high:
            low, high = low - (short / 2 if low else 0.0), high + (short / 2 or 1.0)
        room = 0.04 * (high - low)
        low, high = low - (room if low else 0.0), high + room
    last = max((float(line.series[0][-1]) for line in lines if len(line.series[0])), default=1.0)
    room = 22 + _LETTER * max(map(len, labels), default=0)
    longest = max(len(svg.tick_text(tick)) for tick in svg.ticks(low, high, log=log) or [0.0])
    left = 12 + _LETTER * max(longest, 3)
    return _Frame(left, _WIDTH - room, height, max(last, 1.0), low, high, log)


def _description(chart: LineChart) -> str:
    ends = [
        f"{line.name} ends at {chart._cell(values[-1])}"
        for line in chart.lines
        if (values := _mean(line.series))
    ]
    return f"{chart.unit or chart.title} against steps. {'; '.join(ends)}."


def _axes(root: svg.Element, chart: LineChart, frame: _Frame) -> None:
    grid = svg.child(root, "g", class_="grid")
    bottom = frame.height - _BOTTOM
    values = svg.ticks(frame.low, frame.high, log=frame.log)
    for value in values:
        y = frame.y(value)
        svg.child(grid, "line", x1=frame.left, x2=frame.right, y1=y, y2=y)
        svg.text(grid, svg.tick_text(value), frame.left - 6, y + 3.5, text_anchor="end")
    if chart.zero:
        y = frame.y(0.0)
        svg.child(root, "line", class_="zero", x1=frame.left, x2=frame.right, y1=y, y2=y)
    for step in svg.ticks(0.0, frame.last, log=False):
        x = frame.x(step)
        svg.child(grid, "line", class_="tick", x1=x, x2=x, y1=bottom, y2=bottom + 4)
        svg.text(grid, _short(step), x, bottom + 15, text_anchor="middle")
    svg.child(grid, "line", class_="tick", x1=frame.left, x2=frame.right, y1=bottom, y2=bottom)
    middle = (frame.left + frame.right) / 2
    svg.text(grid, "step", middle, frame.height - 5, text_anchor="middle")


def _short(step: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if step >= size:
            return f"{step / size:g}{unit}"
    return f"{step:g}"


def _thinned(series: Series) -> Series:
    """The means of neighbouring points, if there are more than anybody can see."""
    steps, values = series
    if len(steps) <= _MOST_POINTS:
        return series
    parts = np.array_split(np.arange(len(steps)), _MOST_POINTS)
    means = np.stack([values[:, part].mean(1) for part in parts], 1)
    return np.array([steps[part[-1]] for part in parts]), means


def _band(root: svg.Element, frame: _Frame, line: Line, kind: str) -> None:
    steps, values = _thinned(line.series)
    good = np.asarray(np.isfinite(values).all(0))
    low, high = values.min(0), values.max(0)
    group = svg.child(root, "g", style=f"--c:{_colour(line)}")
    for piece in _pieces(good):
        if len(piece) > 1:
            there = [(frame.x(steps[i]), frame.y(high[i])) for i in piece]
            back = [(frame.x(steps[i]), frame.y(low[i])) for i in reversed(piece)]
            svg.child(group, "polygon", class_=kind, points=_points([*there, *back]))


def _line(root: svg.Element, chart: LineChart, frame: _Frame, line: Line) -> None:
    steps, values = _thinned(line.series)
    means = values.mean(0)
    group = svg.child(root, "g", style=f"--c:{_colour(line)}")
    for piece in _pieces(np.asarray(np.isfinite(means))):
        places = [(frame.x(steps[i]), frame.y(means[i])) for i in piece]
        if len(places) > 1:
            svg.child(
                group,
                "polyline",
                class_="line",
                points=_points(places),
                stroke_dasharray=svg.dash_array(line.look.dashes),
            )
    marked = np.unique(np.linspace(0, len(steps) - 1, min(_MARKERS, len(steps))).round())
    for i in marked.astype(int):
        if math.isfinite(means[i]):
            place = svg.marker(group, line.look, frame.x(steps[i]), frame.y(means[i]))
            svg.tooltip(place, f"{line.name}, step {steps[i]:,}: {chart.text(float(means[i]))}")


def _labels(root: svg.Element, frame: _Frame, lines: Sequence[Line], labels: Sequence[str]) -> None:
    """Write each line's label beside its end, moved apart where they would touch."""
    ends = []
    for line, label in zip(lines, labels, strict=True):
        steps, means = line.series[0], line.series[1].mean(0)
        last = np.flatnonzero(np.isfinite(means))
        if last.size:
            place = (frame.x(steps[last[-1]]), frame.y(float(means[last[-1]])))
            ends.append((place, label, line))
    heights = apart([y for (_, y), _, _ in ends], _LABEL_HEIGHT, _TOP + 5, frame.height - _BOTTOM)
    for ((x, y), label, line), height in zip(ends, heights, strict=True):
        group = svg.child(root, "g", style=f"--c:{_colour(line)}")
        svg.child(
            group,
            "polyline",
            class_="leader",
            points=_points([(x + 5, y), (frame.right + 9, height)]),
        )
        svg.text(group, label, frame.right + 12, height + 3.8, class_="label")


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places, moved as little as keeps them ``gap`` apart, between ``low`` and ``high``."""
    order = np.argsort(places, kind="stable")
    moved = np.array(places, float)[order]
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    if len(moved) and moved[-1] > high:
        moved[-1] = high
        for i in range(len(moved) - 2, -1, -1):
            moved[i] = min(moved[i], moved[i + 1] - gap)
    if len(moved) and moved[0] < low:
        moved += low - moved[0]
    found = np.empty_like(moved)
    found[order] = moved
    return [float(place) for place in found]


def _pieces(good: np.ndarray) -> list[list[int]]:
    """Runs of neighbouring indices that are good."""
    indices = np.flatnonzero(good)
    cuts = np.flatnonzero(np.diff(indices) > 1) + 1
    return [part.tolist() for part in np.split(indices, cuts) if part.size]


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{svg.number(x)},{svg.number(y)}" for x, y in places)


def _colour(line: Line) -> str:
    return f"var(--c-{line.look.color[1:]})"

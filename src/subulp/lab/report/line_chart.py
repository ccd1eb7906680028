"""Lines against steps, or what else is varied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from matplotlib.axes import Axes

from .figure import (
    LABEL_HEIGHT,
    LINE_WIDTH,
    TEXT,
    WIDTH,
    Panel,
    handle,
    legend_height,
    text_width,
    tick_text,
    ticks,
)
from .styles import LineStyle

Series = tuple[np.ndarray, np.ndarray]
"""Steps, and values of shape (seeds, steps)."""

STEP = "step"

_TOP, _BOTTOM, _HEIGHT = 8.0, 38.0, 230.0
_MARKERS = 7
_MOST_POINTS = 160
_LONGEST_LABEL = 24
_LONGEST_NAME = 17
_MOST_NAMES = 6
_LEAST_SPAN = 0.004
_TOLD_APART = 0.02
_HEADING = 22.0


@dataclass(frozen=True)
class Line:
    """A variant's values.

    Attributes:
        name: Name of the variant.
        key: A short sign that stands for it where names have no room.
        style: Colour, dashes and marker.
        series: The values.
    """

    name: str
    key: str
    style: LineStyle
    series: Series


@dataclass(frozen=True)
class LineChart:
    """Means over seeds as lines, with bands that span all seeds.

    Attributes:
        title: Heading of the figure.
        quantity: What the values are.
        lines: What is shown.
        text: Formats a value.
        from_zero: The axis begins at zero.
        zero: What zero means, if it is a line of its own.
        below: Drawn beneath it, against the same steps, without a legend of its own (default:
            nothing).
        along: What the lines go along (default: steps). Another quantity that spans three decades
            has a logarithmic axis.
    """

    title: str
    quantity: str
    lines: Sequence[Line]
    text: Callable[[float], str]
    from_zero: bool = False
    zero: str | None = None
    below: LineChart | None = None
    along: str = STEP

    @property
    def coincide(self) -> bool:
        """Whether any line is so close to another that the eye cannot tell them apart."""
        low, high, log = self._span
        if log or len(self._shown) < 2:
            return False
        for first, second in itertools.combinations(self._shown, 2):
            (a, x), (b, y) = first.series, second.series
            _, mine, others = np.intersect1d(a, b, return_indices=True)
            apart = np.abs(x.mean(0)[mine] - y.mean(0)[others])
            if len(apart) and np.nanmedian(apart) < _TOLD_APART * (high - low):
                return True
        return False

    @property
    def unit(self) -> str:
        """What the values are, and what bands mean if there are any."""
        bands = "lines are means over seeds, bands span them"
        several = any(len(line.series[1]) > 1 for line in self.lines)
        return "; ".join(filter(None, [self.quantity, bands if several else ""]))

    @property
    def description(self) -> str:
        """The last value of each line."""
        ends = [f"{line.name} ends at {self._text(_last(line))}" for line in self.lines]
        against = "steps" if self.along == STEP else f"the {self.along}"
        own = f"{self.quantity or self.title} against {against}. {'; '.join(ends)}."
        return own if self.below is None else f"{own} {self.below.title}: {self.below.description}"

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in points."""
        legend = legend_height(self._legend_texts) if self._keyed else 0.0
        below = 0.0 if self.below is None else _HEADING + self.below.height
        return WIDTH, self.height + legend + below

    @property
    def height(self) -> float:
        """Height in points without legend and what is below."""
        return self._bottom + _BOTTOM

    def numbers(self, most: int = 12) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """Its values as a table: steps, and a row for each line, with at most ``most`` columns."""
        steps = sorted({s for line in self.lines for s in line.series[0].tolist()})
        if len(steps) > most:
            steps = [steps[i] for i in np.linspace(0, len(steps) - 1, most).round().astype(int)]
        rows = self.rows(steps)
        if self.below is not None:
            rows += self.below.rows(
                steps, f", {self.below.title[:1].lower()}{self.below.title[1:]}"
            )
        return [_step_text(step) for step in steps], rows

    def rows(self, steps: Sequence[float], end: str = "") -> list[tuple[str, list[str]]]:
        """The values at some steps, a row for each line, whose name gets an end."""
        found = []
        for line in self.lines:
            values = dict(zip(line.series[0].tolist(), line.series[1].mean(0), strict=True))
            found.append((line.name + end, [self._text(values.get(step)) for step in steps]))
        return found

    def draw(self, panel: Panel) -> None:
        """Lines with labels at their ends: names and last values, or keys where these are long."""
        self._draw_lines(panel)
        if self._keyed:
            handles = [handle(line.style) for line in self.lines]
            entries = list(zip(handles, self._legend_texts, strict=True))
            panel.legend(entries, self.height + 4)
        if self.below is not None:
            top = self.size[1] - self.below.height
            panel.text(self.below.title, 0, top - 6)
            self.below._draw_lines(panel.part(top, (WIDTH, self.below.height)))

    def _draw_lines(self, panel: Panel) -> None:
        labels = self._labels
        low, high, log = self._span
        longest = max((len(tick_text(t)) for t in ticks(low, high, log=log)), default=3)
        left = 10 + text_width("x" * max(longest, 3))
        right = panel.width - 18 - max(map(text_width, labels), default=0.0)
        axes = panel.axes(left, _TOP, right, self._bottom)
        axes.set_yscale("log" if log else "linear")
        axes.set_ylim(low, high)
        first, last, log = self._reach
        axes.set_xscale("log" if log else "linear")
        axes.set_xlim(first, last)
        panel.ticks(axes, xlabel=self.along, left=left, bottom=self._bottom + 30)
        if self.zero:
            axes.axhline(0, color=TEXT, linewidth=1)
        # Many bands cover each other.
        opacity = 0.06 if len(self.lines) > _MOST_NAMES else 0.16
        for line in self._shown:
            _draw_line(axes, panel, line, self._text, opacity, self.along)
        ends = [
            (*panel.place(axes, *_end(line)), label, line.style.hex)
            for line, label in zip(self._shown, labels, strict=True)
        ]
        panel.labels(ends, top=_TOP + 5, bottom=self._bottom, column=right + 13)

    @cached_property
    def _shown(self) -> list[Line]:
        """Lines with any value that can be drawn; what is not finite is a gap."""
        found = []
        for line in self.lines:
            steps, values = _thinned(line.series)
            if np.isfinite(values.mean(0)).any():
                values = np.where(np.isfinite(values), values, np.nan)
                found.append(replace(line, series=(steps, values)))
        return found

    @property
    def _keyed(self) -> bool:
        """Keys stand at the ends of the lines, and a legend explains them."""
        names = [line.name for line in self.lines]
        return len(names) > _MOST_NAMES or max(map(len, names), default=0) > _LONGEST_NAME

    @property
    def _labels(self) -> list[str]:
        if self._keyed:
            return [line.key for line in self._shown]
        whole = [f"{line.name} {self._text(_last(line))}" for line in self._shown]
        if max(map(len, whole), default=0) <= _LONGEST_LABEL:
            return whole
        return [line.name for line in self._shown]

    @property
    def _legend_texts(self) -> list[str]:
        return [f"{line.key}  {line.name}" for line in self.lines]

    @property
    def _bottom(self) -> float:
        """Where the horizontal axis is: labels of all lines have room above it."""
        return max(_HEIGHT - _BOTTOM, _TOP + LABEL_HEIGHT * len(self.lines))

    @property
    def _reach(self) -> tuple[float, float, bool]:
        """The horizontal axis: where it begins and ends, and whether it is logarithmic."""
        first = min((float(line.series[0][0]) for line in self._shown), default=0.0)
        last = max((float(line.series[0][-1]) for line in self._shown), default=1.0)
        if self.along != STEP and 0 < 1000 * first <= last:
            return first, last, True
        return min(first, 0.0), max(last, 1.0), False

    @cached_property
    def _span(self) -> tuple[float, float, bool]:
        """The vertical axis: lowest and highest value, and whether it is logarithmic."""
        every = np.concatenate([np.ravel(line.series[1]) for line in self._shown] or [np.zeros(0)])
        every = every[np.isfinite(every)]
        low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
        log = not (self.from_zero or self.zero) and spans_decades([every])
        if self.from_zero or self.zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if not log:
            # What nearly does not change is a flat line, not its last digits.
            short = _LEAST_SPAN * max(abs(low), abs(high)) - (high - low)
            if short > 0 or low == high:
                low, high = low - (short / 2 if low else 0.0), high + (short / 2 or 1.0)
            room = 0.04 * (high - low)
            low, high = low - (room if low else 0.0), high + room
        return low, high, log

    def _text(self, value: float | None) -> str:
        if value is None:
            return ""
        return self.text(float(value)) if math.isfinite(value) else "not finite"


def spans_decades(values: Iterable[np.ndarray]) -> bool:
    """Whether a logarithmic axis shows the values better."""
    found = np.concatenate([np.ravel(v) for v in values] or [np.zeros(0)])
    found = found[np.isfinite(found)]
    return bool(found.size and found.min() > 0 and found.max() > 30 * found.min())


def _step_text(step: float) -> str:
    return f"{int(step):,}" if step == int(step) else f"{step:.4g}"


def _last(line: Line) -> float:
    return float(line.series[1].mean(0)[-1])


def _end(line: Line) -> tuple[float, float]:
    """The last place that can be drawn."""
    steps, means = line.series[0], line.series[1].mean(0)
    last = np.flatnonzero(np.isfinite(means))[-1]
    return float(steps[last]), float(means[last])


def _thinned(series: Series) -> Series:
    """The means of neighbouring points, if there are more than the eye can resolve."""
    steps, values = series
    if len(steps) <= _MOST_POINTS:
        return series
    parts = np.array_split(np.arange(len(steps)), _MOST_POINTS)
    means = np.stack([values[:, part].mean(1) for part in parts], 1)
    return np.array([steps[part[-1]] for part in parts]), means


def _draw_line(
    axes: Axes,
    panel: Panel,
    line: Line,
    text: Callable[[float], str],
    opacity: float,
    along: str,
) -> None:
    (steps, values), style = line.series, line.style
    means = values.mean(0)
    if len(values) > 1:
        axes.fill_between(
            steps,
            values.min(0),
            values.max(0),
            where=np.isfinite(means),
            color=style.hex,
            alpha=opacity,
            linewidth=0,
        )
    axes.plot(steps, means, color=style.hex, linestyle=style.dashes, linewidth=LINE_WIDTH)
    marked = np.unique(np.linspace(0, len(steps) - 1, min(_MARKERS, len(steps))).round())
    marked = marked.astype(int)
    marked = marked[np.isfinite(means[marked])]
    texts = [f"{line.name}, {along} {_step_text(steps[i])}: {text(means[i])}" for i in marked]
    panel.marks(axes, (steps[marked], means[marked]), style, texts)

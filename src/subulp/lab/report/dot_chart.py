"""Numbers of a paper beside ours: a row for each case, each side on its own scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from .figure import TEXT, WIDTH, Panel, text_width
from .styles import LineStyle

_ROW, _TOP, _BOTTOM, _GAP = 17.0, 22.0, 24.0, 22.0
_LONGEST = 38
_LOG_FROM = 50.0
_PAPER = LineStyle("vermilion", "solid", "D")
_HERE = LineStyle("blue", "solid", "o")


@dataclass(frozen=True)
class Row:
    """A case.

    Attributes:
        name: Its name.
        paper: The paper's number; ``None`` if it prints none.
        here: Our mean; ``None`` if it was not measured.
        ends: Of the interval around our mean.
    """

    name: str
    paper: float | None
    here: float | None
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class DotChart:
    """The paper's numbers on the left, ours on the right, case by case.

    Attributes:
        title: Heading of the figure.
        quantity: What the numbers are.
        rows: The cases, in the order of the paper.
        others: Cases of further charts, which have the same scales (default: none).
    """

    title: str
    quantity: str
    rows: Sequence[Row]
    others: Sequence[Row] = ()

    @property
    def unit(self) -> str:
        """What the numbers are, whose, and what bars are."""
        whose = "the paper, and here" if any(row.paper is not None for row in self.rows) else "here"
        has_bars = any(row.ends and row.ends[0] < row.ends[1] for row in self.rows)
        return f"{self.quantity}: {whose}{'; bars are 95 % intervals' if has_bars else ''}"

    @property
    def description(self) -> str:
        """Every number."""
        rows = (
            f"{row.name}: {_words(row.paper)} in the paper, {_words(row.here)} here"
            for row in self.rows
        )
        return f"{self.quantity}. {'; '.join(rows)}."

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in points."""
        return WIDTH, _TOP + _ROW * len(self.rows) + _BOTTOM

    def draw(self, panel: Panel) -> None:
        """The first case is the uppermost; a side without numbers leaves the other its room."""
        # Names are of letters, most of which are narrower than what else is measured so.
        whole = [*self.rows, *self.others]
        longest = min(_LONGEST, max(len(row.name) for row in whole))
        left = 10 + 0.9 * text_width("x" * longest)
        bottom = _TOP + _ROW * len(self.rows)
        sides = [
            (words, style, rows)
            for words, style, rows in (
                ("paper", _PAPER, [(i, r.paper, None) for i, r in enumerate(whole)]),
                ("here", _HERE, [(i, r.here, r.ends) for i, r in enumerate(whole)]),
            )
            if any(value is not None and math.isfinite(value) for _, value, _ in rows)
        ]
        for i, row in enumerate(self.rows):
            panel.text(_short(row.name), left - 6, _TOP + _ROW * (i + 0.5) + 3.4, ha="right")
        width = (panel.width - left - _GAP * max(0, len(sides) - 1) - 8) / max(1, len(sides))
        for place, (words, style, rows) in enumerate(sides):
            begin = left + place * (width + _GAP)
            axes = panel.axes(begin, _TOP, begin + width, bottom)
            self._side(panel, axes, style, rows, (begin, bottom), width)
            panel.text(words, begin, _TOP - 8, color=TEXT, fontweight="bold")

    def _side(
        self,
        panel: Panel,
        axes: Axes,
        style: LineStyle,
        rows: Sequence[tuple[int, float | None, tuple[float, float] | None]],
        corner: tuple[float, float],
        width: float,
    ) -> None:
        known = [(i, v, e or (v, v)) for i, v, e in rows if v is not None and math.isfinite(v)]
        ends = [end for _, _, pair in known for end in pair if math.isfinite(end)]
        low, high = min(ends), max(ends)
        if low > 0 and high > _LOG_FROM * low:
            axes.set_xscale("log")
            axes.set_xlim(low / 1.4, high * 1.4)
        else:
            margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
            axes.set_xlim(low - margin, high + margin)
        known = [row for row in known if row[0] < len(self.rows)]
        axes.set_ylim(len(self.rows), 0)
        panel.ticks(axes, xlabel="", left=corner[0], bottom=corner[1])
        _thin_ticks(axes, width)
        axes.set_yticks([i + 0.5 for i in range(len(self.rows))], [""] * len(self.rows))
        for i, _, (a, b) in known:
            axes.hlines(i + 0.5, a, b, style.hex, lw=1.4)
        texts = [f"{self.rows[i].name}: {_words(v)}" for i, v, _ in known]
        panel.marks(axes, ([v for _, v, _ in known], [i + 0.5 for i, *_ in known]), style, texts)


def _thin_ticks(axes: Axes, width: float) -> None:
    """Leave as many ticks as have room for their labels."""
    labels = [label.get_text() for label in axes.get_xticklabels()]
    room = 1.3 * sum(map(text_width, labels))
    every = max(1, math.ceil(room / width))
    axes.set_xticks([*axes.get_xticks()][::every], labels[::every])


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _words(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4g}"

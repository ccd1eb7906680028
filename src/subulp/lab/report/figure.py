"""Charts as pictures: SVG inside a page, PNG in a run directory. Matplotlib draws both.

A chart draws itself into a :class:`Panel`, whose unit is the point.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import Affine2D

from .styles import COLOURS, LineStyle

TEXT, QUIET, GRID, AXIS, PANEL = (
    COLOURS[name][0] for name in ("text", "quiet", "grid", "axis", "panel")
)
WIDTH = 384.0
"""Points from one side of a chart to the other."""
LINE_WIDTH = 1.7
LABEL_HEIGHT = 12.5
"""Points between the labels of two lines."""
_SIZE = 10.0
_TITLE = 40.0
_DPI = 160
_ACROSS = 3

# What neither XML nor UTF-8 can hold; a file name may.
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

_VARIABLES = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
_HEX = re.compile("|".join(_VARIABLES))
_FONT = re.compile(r" ?font-family:[^;]*;")
_DECIMALS = re.compile(r"(\d+\.\d{2})\d+")
_REFERENCE = re.compile(r"#([\w-]+)")
_TICKS = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
_LOG_TICKS = LogLocator(subs=(1.0, 2.0, 5.0), numticks=12)


class Chart(Protocol):
    """What can be drawn into a panel."""

    @property
    def title(self) -> str:
        """The heading."""

    @property
    def unit(self) -> str:
        """What the values are."""

    @property
    def description(self) -> str:
        """The figure in words, for those who do not see it."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in points."""

    def draw(self, panel: Panel) -> None:
        """Draw everything but the title."""


class Panel:
    """A chart's place in a figure. Places are points right and down from its upper left corner.

    Attributes:
        width: Points from left to right.
        height: Points from top to bottom.
        tips: Texts that a pointer shows over an artist, by the artist's ``gid``.
    """

    def __init__(self, figure: Figure, left: float, top: float, size: tuple[float, float]) -> None:
        self.width, self.height = size
        self.tips: dict[str, Sequence[str]] = {}
        self._figure, self._left, self._top = figure, left, top
        height = 72 * figure.get_figheight()
        points = Affine2D().scale(1, -1).translate(left, height - top).scale(1 / 72)
        self._points = points + figure.dpi_scale_trans

    def part(self, top: float, size: tuple[float, float]) -> Panel:
        """A panel inside this one, from its left edge; they share their tips."""
        inside = Panel(self._figure, self._left, self._top + top, size)
        inside.tips = self.tips
        return inside

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Axes between these places, without a frame."""
        width, height = 72 * self._figure.get_size_inches()
        place = (
            (self._left + left) / width,
            1 - (self._top + bottom) / height,
            (right - left) / width,
            (bottom - top) / height,
        )
        axes = self._figure.add_axes(place)
        axes.set_facecolor("none")
        axes.spines[:].set_visible(False)
        return axes

    def place(self, axes: Axes, x: float, y: float) -> tuple[float, float]:
        """Where a value of the axes lies in the panel."""
        shown = axes.transData.transform((x, y))
        found = self._points.inverted().transform(shown)
        return float(found[0]), float(found[1])

    def text(self, words: str, x: float, y: float, **options: Any) -> None:
        """A text with its baseline at ``y``, clean of what XML cannot hold."""
        options = {"color": TEXT, "fontsize": _SIZE, **options}
        words = UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", words)
        self._figure.text(x, y, words, transform=self._points, parse_math=False, **options)

    def line(self, x: Sequence[float], y: Sequence[float], **options: Any) -> None:
        """A line through places of the panel."""
        self._figure.add_artist(Line2D(x, y, transform=self._points, **options))

    def tip(self, artist: Artist, texts: Sequence[str]) -> None:
        """Show texts at an artist's markers, or one text at an artist."""
        gid = f"tip{len(self.tips)}"
        artist.set_gid(gid)
        self.tips[gid] = texts

    def marks(
        self,
        axes: Axes,
        places: tuple[Sequence[float], Sequence[float]],
        style: LineStyle,
        texts: Sequence[str],
        size: float = 6.0,
    ) -> None:
        """Markers at values of the axes, each with a text for the pointer."""
        look = _marker(style) | {"linestyle": "none", "markersize": size}
        (drawn,) = axes.plot(*places, **look, clip_on=False)
        self.tip(drawn, texts)

    def ticks(self, axes: Axes, *, xlabel: str, left: float, bottom: float) -> None:
        """Ticks, a grid of horizontal lines, and the name of the horizontal axis."""
        low, high = axes.get_ylim()
        y = ticks(low, high, log=axes.get_yscale() == "log")
        axes.set_yticks(y, [tick_text(value) for value in y])
        x = ticks(*axes.get_xlim(), log=axes.get_xscale() == "log")
        axes.set_xticks(x, [tick_text(value) for value in x])
        axes.minorticks_off()
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines["bottom"].set(visible=True, color=AXIS)
        axes.tick_params(labelsize=_SIZE, labelcolor=QUIET, color=AXIS)
        axes.tick_params(axis="y", length=0)
        middle = left + 36 * axes.get_position().width * self._figure.get_figwidth()
        self.text(xlabel, middle, bottom, ha="center", color=QUIET)

    def labels(
        self,
        labels: Sequence[tuple[float, float, str, str]],
        *,
        top: float,
        bottom: float,
        column: float,
    ) -> None:
        """Write labels in a column, each near its place and none over another.

        Args:
            labels: Place, text and colour of each.
            top: Highest place of a label's middle.
            bottom: The lowest.
            column: Where the labels begin.
        """
        heights = apart([y for _, y, *_ in labels], LABEL_HEIGHT, top, bottom)
        for (x, y, words, colour), height in zip(labels, heights, strict=True):
            self.line([x + 4, column - 2], [y, height], color=colour, linewidth=0.6)
            self.text(words, column, height + 3.6)

    def labels_above(
        self, labels: Sequence[tuple[float, str]], *, left: float, right: float, bottom: float
    ) -> None:
        """Write upright labels in a row, each near its place and none over another.

        Args:
            labels: Place and text of each.
            left: Leftmost place of a label's middle.
            right: The rightmost.
            bottom: Where the labels end, 10 points above what they are for.
        """
        places = apart([x for x, _ in labels], LABEL_HEIGHT, left, right)
        for (x, words), place in zip(labels, places, strict=True):
            self.line([x, place], [bottom + 9, bottom + 1], color=AXIS, linewidth=0.6)
            self.text(words, place, bottom, rotation=90, ha="center", va="bottom")

    def legend(self, entries: Sequence[tuple[Artist, str]], top: float) -> None:
        """A legend in columns below ``top``; :func:`legend_height` is its height."""
        columns, texts = _legend_shape([words for _, words in entries])
        found = self._figure.legend(
            [artist for artist, _ in entries],
            texts,
            loc="upper left",
            bbox_to_anchor=(0, top),
            bbox_transform=self._points,
            ncols=columns,
            frameon=False,
            fontsize=_SIZE,
            labelcolor=TEXT,
            handlelength=2.6,
            borderpad=0,
            borderaxespad=0,
            labelspacing=0.3,
            columnspacing=1.4,
        )
        for text in found.get_texts():
            text.set_parse_math(False)


def handle(style: LineStyle) -> Line2D:
    """A line for a legend."""
    return Line2D([], [], linestyle=style.dashes, linewidth=LINE_WIDTH, **_marker(style))


def _marker(style: LineStyle) -> dict[str, Any]:
    edge = {"markeredgecolor": PANEL, "markeredgewidth": 0.6}
    return {"color": style.hex, "marker": style.marker, "markersize": 6, **edge}


def legend_height(texts: Sequence[str]) -> float:
    """Points that a legend takes."""
    columns, wrapped = _legend_shape(texts)
    rows = -(-len(wrapped) // columns)
    # Columns are filled one after the other.
    lines = [text.count("\n") + 1 for text in wrapped]
    most = max((sum(lines[i : i + rows]) for i in range(0, len(lines), rows)), default=0)
    return 13.5 * most + 6


def _legend_shape(texts: Sequence[str]) -> tuple[int, list[str]]:
    """Columns, and texts in lines that fit."""
    most = int((WIDTH - 48) / text_width("x"))
    wrapped = [
        "\n".join(textwrap.wrap(UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text), most) or [""])
        for text in texts
    ]
    longest = max((len(line) for text in wrapped for line in text.split("\n")), default=0)
    columns = max(1, min(4, int(WIDTH / (48 + text_width("x" * longest)))))
    return columns, wrapped


def text_width(words: str) -> float:
    """Points that a text takes, about: enough for the usual fonts of pages and pictures."""
    return 0.61 * _SIZE * len(words)


def ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    found = (_LOG_TICKS if log else _TICKS).tick_values(low, high)
    inside = [float(t) for t in found if low - 1e-9 * abs(low) <= t <= high + 1e-9 * abs(high)]
    if log and len(inside) > 6:
        inside = [t for t in inside if np.isclose(np.log10(t) % 1, 0)] or inside
    return inside


def tick_text(value: float) -> str:
    """A tick in words: thousands and millions are short, and there is no negative zero."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if size <= abs(value) < 1e9:
            return f"{value / size:g}{unit}"
    return f"{value + 0.0:g}"


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


def svg(chart: Chart, prefix: str) -> str:
    """A chart as an element for a page that defines a CSS variable for each of :data:`COLOURS`.

    The same chart gives the same text.

    Args:
        chart: What to draw.
        prefix: Begins the ids in the element, which no other element of the page may have.
    """
    with _drawing():
        figure = _figure(chart.size)
        panel = Panel(figure, 0, 0, chart.size)
        chart.draw(panel)
        figure.patch.set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    root = ET.fromstring(file.getvalue())
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
        for name in list(element.attrib):
            value = _DECIMALS.sub(r"\1", element.attrib.pop(name))
            value = _FONT.sub("", _HEX.sub(lambda found: _VARIABLES[found[0]], value))
            element.set(name.rpartition("}")[2], value.replace("\n", ""))
        element.text = element.text and element.text.strip()
        element.tail = None
    for tag in ("metadata", "defs"):
        # The first definitions are a style for everything, which the page has.
        root.remove(root.find(tag) or ET.Element(tag))
    _add_tips(root, panel.tips)
    _rename(root, prefix)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img"}
    for place, (tag, words) in enumerate((("title", chart.title), ("desc", chart.description))):
        element = ET.Element(tag)
        element.text = words
        root.insert(place, element)
    return ET.tostring(root, encoding="unicode")


def _add_tips(root: ET.Element, tips: dict[str, Sequence[str]]) -> None:
    for group in list(root.iter("g")):
        texts = tips.get(group.get("id", ""), ())
        marks = [*group.iter("use")] or [group]
        for mark, words in zip(marks, texts, strict=False):
            ET.SubElement(mark, "title").text = words


def _rename(root: ET.Element, prefix: str) -> None:
    """Leave the ids that something refers to, with a prefix."""
    referred = {
        name
        for element in root.iter()
        for value in element.attrib.values()
        for name in _REFERENCE.findall(value)
    }
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id" and value not in referred:
                del element.attrib["id"]
            elif name == "id":
                element.set("id", prefix + value)
            elif "#" in value:
                element.set(name, _REFERENCE.sub(rf"#{prefix}\1", value))


def save_png(charts: Sequence[Chart], path: Path, dpi: int = _DPI) -> None:
    """Save charts with their titles, up to three side by side."""
    rows = [charts[i : i + _ACROSS] for i in range(0, len(charts), _ACROSS)]
    gap = 14.0
    width = max(sum(chart.size[0] + gap for chart in row) for row in rows) + gap
    heights = [max(chart.size[1] for chart in row) + _TITLE + gap for row in rows]
    with _drawing():
        figure = _figure((width, sum(heights)))
        top = _TITLE
        for row, height in zip(rows, heights, strict=True):
            left = gap
            for chart in row:
                panel = Panel(figure, left, top, chart.size)
                chart.draw(panel)
                panel.text(chart.title, 0, -_TITLE + 18, fontsize=12)
                panel.text(chart.unit, 0, -_TITLE + 32, color=QUIET)
                left += chart.size[0] + gap
            top += height
        figure.savefig(path, dpi=dpi, facecolor="white")


def _figure(size: tuple[float, float]) -> Figure:
    # At 72 dots to the inch a dot is a point, in which charts measure.
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72)
    FigureCanvasAgg(figure)
    return figure


@contextmanager
def _drawing() -> Iterator[None]:
    """Matplotlib as it comes, whatever the user's settings are; SVG's text is text."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams |= {
            "svg.fonttype": "none",
            "svg.hashsalt": "subulp",
            "hatch.linewidth": 0.7,
        }
        # The reader's fonts may have what Matplotlib's has not.
        warnings.filterwarnings("ignore", message="Glyph")
        yield

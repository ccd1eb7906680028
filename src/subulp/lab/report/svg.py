"""Small pieces of SVG: elements, markers, ticks.

Elements are a tree, so every text is escaped and every figure is well-formed.
"""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

from matplotlib.ticker import LogLocator, MaxNLocator

from .line_styles import Dashes, Look

Element = ET.Element

_TICKS = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
_LOG_TICKS = LogLocator(subs=(1.0, 2.0, 5.0), numticks=12)
_LINE_WIDTH = 1.8


def figure(width: float, height: float, title: str, description: str) -> Element:
    """The root of a figure that fills its place's width and speaks to screen readers."""
    root = Element(
        "svg",
        {
            "viewBox": f"0 0 {number(width)} {number(height)}",
            "role": "img",
            "preserveAspectRatio": "xMidYMid meet",
        },
    )
    child(root, "title").text = title
    child(root, "desc").text = description
    return root


def child(parent: Element, tag: str, **attributes: str | float) -> Element:
    """An element in another one; ``class_`` becomes ``class``, ``text_anchor`` ``text-anchor``."""
    found = {
        name.rstrip("_").replace("_", "-"): value if isinstance(value, str) else number(value)
        for name, value in attributes.items()
    }
    return ET.SubElement(parent, tag, found)


def text(parent: Element, words: str, x: float, y: float, **attributes: str | float) -> Element:
    """A text at a place."""
    element = child(parent, "text", x=x, y=y, **attributes)
    element.text = words
    return element


def tooltip(element: Element, words: str) -> None:
    """What a pointer over the element shows."""
    child(element, "title").text = words


def markup(root: Element) -> str:
    """The text of a figure."""
    return ET.tostring(root, encoding="unicode")


def number(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    found = (_LOG_TICKS if log else _TICKS).tick_values(low, high)
    inside = [float(t) for t in found if low - 1e-9 * abs(low) <= t <= high + 1e-9 * abs(high)]
    if log and len(inside) > 6:
        inside = [t for t in inside if math.isclose(math.log10(t) % 1, 0, abs_tol=1e-6)] or inside
    return inside


def tick_text(value: float) -> str:
    """A tick in words; there is no negative zero."""
    return f"{value + 0.0:g}"


def dash_array(dashes: Dashes) -> str:
    """Matplotlib's dashes as SVG's."""
    if isinstance(dashes, str):
        return "none"
    return " ".join(number(_LINE_WIDTH * length) for length in dashes[1])


def marker(parent: Element, look: Look, x: float, y: float, radius: float = 3.4) -> Element:
    """A marker of a look around a place."""
    return child(parent, "path", d=_marker(look.marker, x, y, radius), class_="marker")


def _marker(letter: str, x: float, y: float, r: float) -> str:
    if letter in "o.":
        r *= 1.0 if letter == "o" else 0.62
        return (
            f"M{number(x - r)} {number(y)}a{number(r)} {number(r)} 0 1 0 {number(2 * r)} 0"
            f"a{number(r)} {number(r)} 0 1 0 {number(-2 * r)} 0z"
        )
    points = " ".join(f"{number(x + r * a)} {number(y + r * b)}" for a, b in _POLYGONS[letter])
    return f"M{points}z"


def _regular(corners: int, *, turn: float = -90.0, inner: float | None = None) -> list[Point]:
    """A regular polygon, or a star with its ``inner`` radius."""
    count = corners if inner is None else 2 * corners
    angles = [math.radians(turn + 360 * i / count) for i in range(count)]
    radii = [1.15 if inner is None or i % 2 == 0 else inner for i in range(count)]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


Point = tuple[float, float]
_ARM = 0.38
_PLUS = [
    *((-_ARM, -1.1), (_ARM, -1.1), (_ARM, -_ARM), (1.1, -_ARM), (1.1, _ARM), (_ARM, _ARM)),
    *((_ARM, 1.1), (-_ARM, 1.1), (-_ARM, _ARM), (-1.1, _ARM), (-1.1, -_ARM), (-_ARM, -_ARM)),
]
_POLYGONS: dict[str, list[Point]] = {
    "s": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "^": _regular(3),
    "v": _regular(3, turn=90),
    "<": _regular(3, turn=180),
    ">": _regular(3, turn=0),
    "D": _regular(4),
    "d": [(0, -1.25), (0.7, 0), (0, 1.25), (-0.7, 0)],
    "p": _regular(5),
    "h": _regular(6),
    "*": _regular(5, inner=0.5),
    "P": _PLUS,
    "X": [((a - b) * 0.75, (a + b) * 0.75) for a, b in _PLUS],
}

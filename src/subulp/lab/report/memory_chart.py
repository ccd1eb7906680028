"""Bytes by category as stacked bars, one for each variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.patches import Patch, Rectangle

from .figure import PANEL, QUIET, WIDTH, Panel, legend_height, text_width
from .styles import COLOURS

_ROW, _BAR = 42.0, 16.0
_HATCHES = {"gradients": "////", "activations": "\\\\\\\\"}
_ON_FILL = COLOURS["on-fill"][0]


@dataclass(frozen=True)
class Bar:
    """A variant's memory.

    Attributes:
        name: Name of the variant.
        parts: Sizes by name, in the order in which they are stacked.
        total: What is written beside the name.
    """

    name: str
    parts: dict[str, float]
    total: str


@dataclass(frozen=True)
class MemoryChart:
    """Stacked bars with a legend.

    Attributes:
        title: Heading of the figure.
        unit: Unit of the sizes.
        bars: What is shown.
        categories: The category of each part, which decides its colour and hatch: weights,
            gradients, states or activations.
        text: Formats a size.
    """

    title: str
    unit: str
    bars: Sequence[Bar]
    categories: dict[str, str]
    text: Callable[[float], str]

    @property
    def description(self) -> str:
        """Every size."""
        described = "; ".join(
            f"{bar.name}: " + ", ".join(f"{n} {self.text(v)}" for n, v in bar.parts.items())
            for bar in self.bars
        )
        return f"{self.unit}. {described}."

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in points."""
        return WIDTH, _ROW * len(self.bars) + 6 + legend_height(self._parts)

    def draw(self, panel: Panel) -> None:
        """A bar for each variant, with its name and total above it."""
        bottom = _ROW * len(self.bars)
        axes = panel.axes(0, 0, panel.width, bottom)
        axes.set_axis_off()
        axes.set_xlim(0, max((sum(bar.parts.values()) for bar in self.bars), default=0.0) or 1.0)
        axes.set_ylim(bottom, 0)
        scale = panel.width / axes.get_xlim()[1]
        for row, bar in enumerate(self.bars):
            top, begin = _ROW * row, 0.0
            room = (panel.width - text_width(bar.total)) / text_width("x")
            name = bar.name if len(bar.name) < room else bar.name[: int(room) - 1] + "…"
            panel.text(name, 0, top + 12)
            panel.text(bar.total, panel.width, top + 12, ha="right", color=QUIET)
            for part, size in bar.parts.items():
                if size > 0:
                    place = Rectangle((begin, top + 17), size, _BAR, **self._look(part))
                    panel.tip(place, [f"{part}: {self.text(size)}"])
                    axes.add_patch(place)
                    self._name(panel, part, size, begin * scale, top + 29, size * scale)
                begin += size
        panel.legend([(Patch(**self._look(part)), part) for part in self._parts], bottom + 6)

    @property
    def _parts(self) -> list[str]:
        return list(dict.fromkeys(itertools.chain.from_iterable(bar.parts for bar in self.bars)))

    def _look(self, part: str) -> dict[str, Any]:
        category = self.categories[part]
        fill, hatch = COLOURS[category][0], _HATCHES.get(category)
        return {"facecolor": fill, "edgecolor": PANEL, "hatch": hatch, "linewidth": 1.2}

    def _name(self, panel: Panel, part: str, size: float, x: float, y: float, width: float) -> None:
        """The part's name inside it, or its size, or nothing if there is no room."""
        words = next((w for w in (part, self.text(size)) if text_width(w) + 6 < width), None)
        if words is not None:
            panel.text(words, x + width / 2, y, ha="center", color=_ON_FILL)

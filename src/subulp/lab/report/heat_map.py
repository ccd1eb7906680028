"""Representations of the operands of matrix products, by layer and role."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ...diagnostics import OperandMix, RepresentationMix
from ...numerics import BF16, E5M2
from .figure import QUIET, TEXT, Panel, save_png, text_width

_CELL = (78.0, 42.0)
_HEADING = 36.0


@dataclass(frozen=True)
class HeatCell:
    """The mean decision about an operand.

    Attributes:
        share: Percent of the elements in FP8.
        texts: The same, the share in E5M2 and the error in words.
    """

    share: float
    texts: tuple[str, ...]


@dataclass(frozen=True)
class HeatMap:
    """The operands of a variant: a table on the page, a picture in the run directory.

    Attributes:
        title: Name of the variant.
        roles: The columns.
        rows: Layer, and a cell for each role that it has.
    """

    title: str
    roles: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HeatCell | None, ...]], ...]

    unit = "elements in FP8, those in E5M2, mean relative error in FP8"
    description = unit

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in points."""
        width = self._left + _CELL[0] * len(self.roles)
        return max(width, text_width(self.unit)), _HEADING + _CELL[1] * len(self.rows)

    def draw(self, panel: Panel) -> None:
        """A shade of grey and its numbers for each operand."""
        bottom, right = panel.height, self._left + _CELL[0] * len(self.roles)
        axes = panel.axes(self._left, _HEADING, right, bottom)
        axes.set_axis_off()
        shares = [[np.nan if c is None else c.share for c in cells] for _, cells in self.rows]
        axes.imshow(shares, cmap="Greys", vmin=0, vmax=130, aspect="auto")
        for column, role in enumerate(self.roles):
            middle = self._left + _CELL[0] * (column + 0.5)
            for line, words in enumerate(reversed(textwrap.wrap(role, 12))):
                place = _HEADING - 6 - 12 * line
                panel.text(words, middle, place, ha="center", color=QUIET)
        for row, (layer, cells) in enumerate(self.rows):
            top = _HEADING + _CELL[1] * row
            panel.text(layer, 0, top + _CELL[1] / 2 + 3.6)
            panel.line([self._left, right], [top, top], color="white", linewidth=2)
            for column, cell in enumerate(cells):
                self._write(panel, cell, self._left + _CELL[0] * (column + 0.5), top)
        for column in range(1, len(self.roles)):
            x = self._left + _CELL[0] * column
            panel.line([x, x], [_HEADING, bottom], color="white", linewidth=2)

    @property
    def _left(self) -> float:
        return 8 + max(text_width(layer) for layer, _ in self.rows)

    def _write(self, panel: Panel, cell: HeatCell | None, x: float, top: float) -> None:
        texts = ("not used",) if cell is None else cell.texts
        colour = "white" if cell is not None and cell.share > 75 else TEXT
        first = top + _CELL[1] / 2 + 3.2 - 5.5 * (len(texts) - 1)
        for line, words in enumerate(texts):
            panel.text(words, x, first + 11 * line, ha="center", color=colour, fontsize=8)


def heat_map(title: str, operands: Iterable[Mapping[str, Any]]) -> HeatMap | None:
    """The heat map of the mean of decisions, or ``None`` where there are none.

    Args:
        title: Name of what decided.
        operands: Decisions as plain JSON: fields of :class:`subulp.diagnostics.OperandMix`, of
            which layer, role, elements and error are needed.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for operand in operands:
        found.setdefault((operand["layer"], operand["role"]), []).append(operand)
    roles = tuple(dict.fromkeys(role for _, role in found))
    layers = dict.fromkeys(layer for layer, _ in found)
    rows = tuple(
        (layer, tuple(_cell(found.get((layer, role), [])) for role in roles)) for layer in layers
    )
    return HeatMap(title, roles, rows) if rows else None


def plot_mix(mix: RepresentationMix | Iterable[OperandMix], path: Path | str) -> None:
    """Save the heat map of what :func:`subulp.diagnostics.representation_mix` found.

    Args:
        mix: What was found.
        path: The PNG file to write.

    Raises:
        ValueError: There is nothing to show.
    """
    operands = mix.operands if isinstance(mix, RepresentationMix) else mix
    found = heat_map("Representations of operands", map(asdict, operands))
    if found is None:
        raise ValueError("mix is empty: there is nothing to show")
    save_png([found], Path(path))


def _cell(operands: Sequence[Mapping[str, Any]]) -> HeatCell | None:
    if not operands:
        return None
    narrow = [1.0 - operand["elements"].get(BF16.name, 0.0) for operand in operands]
    wide = 100 * fmean(operand["elements"].get(E5M2.name, 0.0) for operand in operands)
    texts = [f"{100 * fmean(narrow):.1f} %"]
    if wide:
        texts.append(f"E5M2 {wide:.1f} %")
    if sum(narrow):
        error = sum(o["error"] * n for o, n in zip(operands, narrow, strict=True)) / sum(narrow)
        texts.append(f"error {100 * error:.2f} %")
    return HeatCell(100 * fmean(narrow), tuple(texts))

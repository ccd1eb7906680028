"""The distribution of accesses over rows, after the cache paper's Figure 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...report.figure import (
    LINE_WIDTH,
    QUIET,
    Panel,
    handle,
    legend_height,
)
from ...report.styles import COLOURS, STYLES

Counts = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

_WIDTH, _TOP, _BOTTOM = 520.0, 20.0, 250.0
_STYLES = [style._replace(marker="") for style in STYLES[:4]]


@dataclass(frozen=True)
class AccessChart:
    """The cumulative share of the accesses against the share of the rows.

    All tables are thin lines. Four of them have names: the one whose most used rows have the
    largest share, the one where it is smallest, and two between.

    Attributes:
        counts: Accesses of each row, by table.
        cache_fractions: Cache sizes to mark; the legend gives the share of the accesses that the
            rows of the smallest would serve.
        examples: Examples that were counted.
    """

    counts: Mapping[str, Counts]
    cache_fractions: Sequence[float]
    examples: int

    unit = "% of the accesses against the most used rows, % of the table"

    @property
    def title(self) -> str:
        """How much was counted."""
        return f"Accesses of {self.examples:,} training examples, {len(self.counts)} tables"

    @property
    def description(self) -> str:
        """The tables that have names."""
        return "; ".join(self._named())

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in points."""
        return _WIDTH, _BOTTOM + 40 + legend_height(list(self._named()))

    def draw(self, panel: Panel) -> None:
        """Rows on a logarithmic axis."""
        axes = panel.axes(34, _TOP, panel.width - 10, _BOTTOM)
        shares = self._shares()
        axes.set_xscale("log")
        axes.set_xlim(100 * min(1 / len(share) for share in shares.values()), 100)
        axes.set_ylim(0, 100)
        named = self._named()
        for name, share in shares.items():
            if name not in named.values():
                axes.plot(*_curve(share), color=COLOURS["activations"][0], linewidth=0.6)
        for name, style in zip(named.values(), _STYLES, strict=False):
            axes.plot(
                *_curve(shares[name]),
                color=style.hex,
                linestyle=style.dashes,
                linewidth=LINE_WIDTH,
            )
        panel.ticks(axes, xlabel="most used rows, %", left=34, bottom=_BOTTOM + 33)
        for mark in self._marks():
            axes.axvline(100 * mark, color=QUIET, linewidth=0.8, linestyle=(0, (2, 2)))
            x, _ = panel.place(axes, 100 * mark, 100)
            panel.text(f"{100 * mark:g} %", x, _TOP - 6, ha="center")
        entries = [(handle(style), text) for text, style in zip(named, _STYLES, strict=False)]
        panel.legend(entries, _BOTTOM + 40)

    def _shares(self) -> dict[str, Shares]:
        return {
            name: np.sort(count)[::-1].cumsum() / max(1, count.sum())
            for name, count in self.counts.items()
        }

    def _marks(self) -> list[float]:
        return sorted(fraction for fraction in self.cache_fractions if 0 < fraction < 1)

    def _named(self) -> dict[str, str]:
        """Tables that have names, by their text in the legend."""
        at = next(iter(self._marks()), 0.05)
        served = {name: _at(share, at) for name, share in self._shares().items()}
        ranked = sorted(served, key=lambda name: -served[name])
        places = np.unique(np.linspace(0, len(ranked) - 1, len(_STYLES)).round().astype(int))
        return {
            f"{name}: {100 * served[name]:.0f} % from {100 * at:g} % of the rows": name
            for name in (ranked[i] for i in places)
        }


def _curve(share: Shares) -> tuple[Shares, Shares]:
    """Percent of rows and of accesses; few enough points for tables of millions of rows."""
    rows = len(share)
    chosen = np.unique(np.geomspace(1, rows, 400).round().astype(int)) - 1
    return 100 * (chosen + 1) / rows, 100 * share[chosen]


def _at(share: Shares, fraction: float) -> float:
    return float(share[max(1, int(fraction * len(share))) - 1])

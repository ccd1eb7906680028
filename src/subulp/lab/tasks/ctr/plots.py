"""The figures of a click-through-rate comparison, after the cache paper's Figures 3 and 7."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from ...engine.metrics import Metric, Spread, Summary, excess_over_baseline
from ...report.plots import TEXT, new_figure, save_figure

Counts = npt.NDArray[np.int64]


class _Look(NamedTuple):
    color: str
    dashes: str | tuple[float, Sequence[float]]
    marker: str


# Filled markers are with a cache, hollow ones without; shapes and dashes tell the rounding.
_LOOKS = {
    ("nearest", None): _Look("#D55E00", (0, (5, 2)), "s"),
    ("stochastic", None): _Look("#0072B2", (0, (1, 1.5)), "o"),
    ("nearest", "lfu"): _Look("#D55E00", "solid", "s"),
    ("stochastic", "lfu"): _Look("#0072B2", "solid", "o"),
    ("nearest", "lru"): _Look("#CC79A7", (0, (5, 2, 1, 2)), "D"),
    ("stochastic", "lru"): _Look("#009E73", (0, (5, 2, 1, 2)), "^"),
}
_SHOWN_TABLES = 4
_TABLE_LOOKS = (
    _Look("#000000", "solid", ""),
    _Look("#D55E00", (0, (5, 2)), ""),
    _Look("#0072B2", (0, (5, 2, 1, 2)), ""),
    _Look("#009E73", (0, (1, 1.5)), ""),
)


def plot_compression(summaries: Sequence[Summary], entropy: Metric, path: Path) -> None:
    """Save accuracy drop and normalised entropy against memory compression (Figure 7).

    A line for each rounding and cache policy, and for no cache; FP32 is the line at zero. Points
    are means over seeds, bars span them. Without runs in FP32 there is nothing to compare with, and
    the values themselves are shown.

    Args:
        summaries: All runs.
        entropy: The metric of normalised entropy.
        path: The PNG file to write.
    """
    narrow = [s for s in summaries if s.precision != "fp32"]
    paired = len(narrow) < len(summaries)
    figure, axes = new_figure(2, height=4.4)
    if paired:
        _draw(axes[0], narrow, lambda s: s.metrics["accuracy_drop"])
        _draw(axes[1], narrow, lambda s: excess_over_baseline(entropy, s, summaries) or 0.0)
        for ax in axes:
            ax.axhline(0, color="#000000", linewidth=1)
        _describe(axes[0], "Accuracy drop below fp32", "% (lower is better)")
        _describe(axes[1], "Normalised entropy above fp32", "% (lower is better)")
    else:
        _draw(axes[0], narrow, lambda s: 100 * s.metrics["accuracy"])
        _draw(axes[1], narrow, lambda s: s.metrics[entropy.name])
        _describe(axes[0], "Accuracy", "% (higher is better)")
        _describe(axes[1], "Normalised entropy", "(lower is better)")
    for ax in axes:
        _name_points(ax, narrow)
    if narrow:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=len(labels) if len(labels) < 5 else 3,
            frameon=False,
            fontsize=9,
            labelcolor=TEXT,
            handlelength=3.5,
        )
    save_figure(figure, path)


def _draw(ax: Axes, runs: Sequence[Summary], value: Callable[[Summary], float]) -> None:
    sizes = list(_by_compression(runs))
    span = max(sizes, default=0.0) - min(sizes, default=0.0)
    for (rounding, policy), look in _LOOKS.items():
        kind = {"rounding": rounding, "policy": policy}
        chosen = [s for s in runs if all(s.settings[name] == v for name, v in kind.items())]
        groups = _by_compression(chosen)
        if not groups:
            continue
        # Equal memory, two roundings: side by side, so that their bars can be told apart.
        aside = 0.004 * span if rounding == "nearest" else -0.004 * span
        spreads = [Spread.of(map(value, group)).mean for group in groups.values()]
        ends = np.array([[min(map(value, g)), max(map(value, g))] for g in groups.values()])
        ax.errorbar(
            [x + aside for x in groups],
            spreads,
            yerr=np.abs(ends.T - np.array(spreads)),
            color=look.color,
            linestyle=look.dashes,
            marker=look.marker,
            markersize=6,
            markerfacecolor="white" if policy is None else look.color,
            linewidth=1.6,
            elinewidth=0.8,
            capsize=2,
            label=f"{rounding}, {'no cache' if policy is None else f'{policy.upper()} cache'}",
        )


def _by_compression(runs: Sequence[Summary]) -> dict[float, list[Summary]]:
    groups: dict[float, list[Summary]] = {}
    for run in sorted(runs, key=lambda s: s.metrics["compression"]):
        groups.setdefault(run.metrics["compression"], []).append(run)
    return groups


def _name_points(ax: Axes, runs: Sequence[Summary]) -> None:
    """Write precision and cache above the plot, where their compression is.

    LFU's counts make its caches larger than LRU's of the same rows: the name stands between.
    """
    sizes: dict[str, set[float]] = {}
    for run in runs:
        cache = run.settings["cache_fraction"]
        name = run.precision + (f" + {100 * cache:g} %" if cache else "")
        sizes.setdefault(name, set()).add(run.metrics["compression"])
    if not sizes:
        return
    ax.margins(x=0.06)
    # Less memory stands on the right, as in the paper.
    ax.invert_xaxis()
    left, right = ax.get_xlim()
    places = [(sum(found) / len(found) - left) / (right - left) for found in sizes.values()]
    for x, place, name in zip(places, _apart(places, 0.045), sizes, strict=True):
        ax.annotate(
            name,
            xy=(x, 1.0),
            xytext=(place, 1.05),
            xycoords="axes fraction",
            textcoords="axes fraction",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=8,
            color=TEXT,
            arrowprops={"arrowstyle": "-", "color": "#AAAAAA", "linewidth": 0.6, "shrinkB": 0},
        )


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """The places, moved until neighbours are at least ``gap`` apart."""
    order = np.argsort(places)
    moved = np.array(places, float)[order]
    for _ in range(200):
        short = gap - np.diff(moved)
        if not (short > 1e-6).any():
            break
        push = np.maximum(short, 0) / 2
        moved[:-1] -= push
        moved[1:] += push
    result = np.empty_like(moved)
    result[order] = moved
    return [float(place) for place in result]


def plot_accesses(
    counts: Mapping[str, Counts], cache_fractions: Sequence[float], path: Path, *, examples: int
) -> None:
    """Save the cumulative share of accesses against the share of rows (Figure 3).

    All tables are thin lines. Four of them have names: the one whose most used rows have the
    largest share, the one where it is smallest, and two between.

    Args:
        counts: Accesses of each row, by table.
        cache_fractions: Cache sizes to mark; the share of accesses that their rows would serve
            stands in the legend, for the smallest.
        path: The PNG file to write.
        examples: Examples that were counted.
    """
    figure, axes = new_figure(1, height=4.2, width=7.6)
    ax = axes[0]
    marks = sorted(fraction for fraction in cache_fractions if 0 < fraction < 1)
    shares = {
        name: np.sort(count)[::-1].cumsum() / max(1, count.sum()) for name, count in counts.items()
    }
    at = marks[0] if marks else 0.05
    served = {name: _at(share, at) for name, share in shares.items()}
    ranked = sorted(served, key=lambda name: -served[name])
    named = [
        ranked[i]
        for i in np.unique(np.linspace(0, len(ranked) - 1, _SHOWN_TABLES).round().astype(int))
    ]
    lowest = min(1 / len(share) for share in shares.values())
    for name, share in shares.items():
        if name not in named:
            ax.plot(*_curve(share), color="#BBBBBB", linewidth=0.6)
    for name, look in zip(named, _TABLE_LOOKS, strict=False):
        ax.plot(
            *_curve(shares[name]),
            color=look.color,
            linestyle=look.dashes,
            linewidth=1.8,
            label=f"{name}: {100 * served[name]:.0f} % from {100 * at:g} % of the rows",
        )
    for mark in marks:
        ax.axvline(100 * mark, color=TEXT, linewidth=0.8, linestyle=(0, (2, 2)))
        ax.text(
            100 * mark, 101, f"{100 * mark:g} %", ha="center", va="bottom", fontsize=8, color=TEXT
        )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlim(100 * lowest, 100)
    ax.set_ylim(0, 100)
    ax.set_title(
        f"Accesses of {examples:,} training examples, {len(shares)} tables",
        loc="left",
        fontsize=11,
        color=TEXT,
        pad=18,
    )
    ax.set_xlabel("most used rows, % of the table", fontsize=9, color=TEXT)
    ax.set_ylabel("% of the accesses", fontsize=9, color=TEXT)
    figure.legend(
        *ax.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=1,
        frameon=False,
        fontsize=9,
        labelcolor=TEXT,
        handlelength=3.5,
    )
    save_figure(figure, path)


def _curve(share: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], ...]:
    """Percent of rows and of accesses; few enough points for tables of millions of rows."""
    rows = len(share)
    chosen = np.unique(np.geomspace(1, rows, 400).round().astype(int)) - 1
    return 100 * (chosen + 1) / rows, 100 * share[chosen]


def _at(share: npt.NDArray[np.float64], fraction: float) -> float:
    return float(share[max(1, int(fraction * len(share))) - 1])


def _describe(ax: Axes, title: str, unit: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, color=TEXT, pad=70)
    ax.set_xlabel("memory of the tables, as a share of fp32", fontsize=9, color=TEXT)
    ax.set_ylabel(unit, fontsize=9, color=TEXT)

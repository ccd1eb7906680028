"""Figures of a comparison of memory: over time by category, and the peaks side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import MultipleLocator

from subulp.diagnostics.memory import Moment
from subulp.lab.report.figure import TEXT

mpl.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, which the common kinds of colour blindness tell apart, and hatches for
# print without colour; the longest-lived lies at the bottom.
_AREAS = {
    "weights": ("weights", "#0072B2", ""),
    "states": ("optimizer state, extra bits", "#56B4E9", "...."),
    "gradients": ("gradients", "#D55E00", "////"),
    "activations": ("FP16 copies, activations, temporaries", "#F0E442", "xxxx"),
}
_TITLES = {
    "standard": "Standard mixed precision",
    "standard-late-zero-grad": "Standard, zero_grad() before backward()",
    "standard-backward-inside": "Standard, backward() inside autocast",
    "standard-foreach-decay": "Standard, weight decay, foreach=True",
    "extra-bits-8-unfused": "subulp FP16 + 8 bits, not fused",
    "extra-bits-13": "subulp FP16 + 13 bits",
    "extra-bits-8": "subulp FP16 + 8 bits",
    "extra-bits-8-decay": "subulp FP16 + 8 bits, weight decay",
    "extra-bits-4": "subulp FP16 + 4 bits",
    "collage-light": "subulp collage-light",
}


def plot_timelines(timelines: Mapping[str, list[Moment]], parameters: int, path: Path) -> None:
    """Save live bytes over the steps, an area for each category, a panel for each loop.

    Within a step, allocations and releases are evenly spaced: the shape is the loop's own, and the
    same on fast and slow machines.
    """
    figure, axes = plt.subplots(
        1,
        len(timelines),
        figsize=(0.8 + 3 * len(timelines), 4.1),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (name, timeline) in zip(axes[0], timelines.items(), strict=True):
        _areas(ax, timeline, parameters)
        ax.set_title(_TITLES[name], loc="left", fontsize=10, color=TEXT)
    axes[0, 0].set_ylabel("live bytes a parameter", fontsize=9, color=TEXT)
    axes[0, 0].set_ylim(0, axes[0, 0].get_ylim()[1] * 1.06)
    _legend(figure, axes[0, 0])
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def plot_peaks(rows: Sequence[Mapping[str, Any]], parameters: int, path: Path) -> None:
    """Save each loop's peak as a bar of its categories, and its resident memory as a black mark."""
    figure, ax = plt.subplots(figsize=(10.5, 1.2 + 0.4 * len(rows)), layout="constrained")
    heights = range(len(rows), 0, -1)
    left = [0.0] * len(rows)
    for category, (label, colour, hatch) in _AREAS.items():
        widths = [row["peak_bytes"][category] / parameters for row in rows]
        ax.barh(
            heights,
            widths,
            left=left,
            height=0.62,
            label=label,
            facecolor=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.6,
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    resident = [row["resident_bytes"] / parameters for row in rows]
    ax.plot(resident, heights, "|", color="black", ms=15, mew=2)
    for y, live, real in zip(heights, left, resident, strict=True):
        ax.annotate(
            f"{live:.2f} live, {real:.2f} resident",
            (max(live, real), y),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=TEXT,
        )
    ax.set_yticks(heights, [_TITLES[row["name"]] for row in rows])
    ax.set_xlabel("bytes a parameter at the peak", fontsize=9, color=TEXT)
    # Room for the longest bar's label.
    ax.set_xlim(0, max(*left, *resident) * 1.32)
    ax.xaxis.set_major_locator(MultipleLocator(2))
    _plain(ax)
    _legend(figure, ax)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def _areas(ax: Axes, timeline: Sequence[Moment], parameters: int) -> None:
    before = [moment for moment in timeline if not moment.mark]
    during = [moment for moment in timeline if moment.mark]
    x = [0.0, *_positions(during)]
    moments = [before[-1], *during]
    bottom = [0.0] * len(moments)
    for category, (label, colour, hatch) in _AREAS.items():
        top = [
            b + moment.bytes[category] / parameters
            for b, moment in zip(bottom, moments, strict=True)
        ]
        ax.fill_between(
            x,
            bottom,
            top,
            step="post",
            label=label,
            facecolor=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
        )
        bottom = top
    peak = max(bottom)
    ax.axhline(peak, color="black", linewidth=0.8, linestyle=(0, (4, 2)))
    ax.annotate(
        f"peak {peak:.2f} bytes, {peak * parameters / 1e9:.1f} GB",
        (0, peak),
        (2, 3),
        textcoords="offset points",
        fontsize=9,
        color="black",
    )
    _steps(ax, x, moments)
    _plain(ax)


def _positions(moments: Iterable[Moment]) -> list[float]:
    """Where each moment lies: the number of its step, and its place among the step's moments."""
    steps: dict[int, int] = {}
    places = []
    for moment in moments:
        step = _step(moment)
        steps[step] = steps.get(step, -1) + 1
        places.append((step, steps[step]))
    return [step + place / (steps[step] + 1) for step, place in places]


def _step(moment: Moment) -> int:
    return int(moment.mark.split()[0])


def _steps(ax: Axes, x: Sequence[float], moments: Sequence[Moment]) -> None:
    """Lines between steps, and a tick where each backward pass begins."""
    count = _step(moments[-1]) + 1
    for i in range(1, count):
        ax.axvline(i, color="black", linewidth=0.6)
    backward = [
        next(at for at, m in zip(x, moments, strict=True) if m.mark == f"{i} backward")
        for i in range(count)
    ]
    ax.set_xlim(0, count)
    ax.set_xticks([i + 0.5 for i in range(count)], [f"step {i + 1}" for i in range(count)])
    ax.set_xticks(backward, minor=True)
    ax.tick_params(axis="x", which="major", length=0)
    ax.tick_params(axis="x", which="minor", length=5)


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(colors=TEXT, labelsize=9)


def _legend(figure: Any, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
        fontsize=9,
        labelcolor=TEXT,
    )

"""The figures of a comparison: quality, and how much of each update survived."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .metrics import Metric, Record, baseline_of

# Okabe and Ito's colours, which the common kinds of colour blindness tell apart, and a dash
# pattern and a marker for print without colour. Named strategies look the same in every figure.
_Dashes = str | tuple[float, Sequence[float]]
_Style = tuple[str, _Dashes, str]
_STYLES: dict[str, _Style] = {
    "fp32": ("#000000", (0, (1, 1)), "."),
    "master": ("#000000", "solid", "o"),
    "nearest": ("#D55E00", (0, (5, 2)), "s"),
    "collage-light": ("#0072B2", (0, (5, 2, 1, 2)), "^"),
    "collage-plus": ("#009E73", (0, (1, 1.5)), "D"),
    "kahan": ("#CC79A7", (0, (8, 3)), "v"),
    "stochastic": ("#E69F00", (0, (3, 1.5)), "P"),
    "fp32-states": ("#56B4E9", (0, (3, 1, 1, 1, 1, 1)), "X"),
    "amp": ("#7A5195", (0, (6, 1)), "p"),
}
_SPARE_STYLES: tuple[_Style, ...] = (
    ("#7F7F7F", (0, (2, 2)), "<"),
    ("#8C564B", (0, (6, 2, 2, 2)), ">"),
    ("#4B0092", (0, (4, 1)), "*"),
    ("#5D5D00", (0, (1, 3)), "h"),
    ("#D55E00", (0, (5, 2)), "s"),
    ("#0072B2", (0, (5, 2, 1, 2)), "^"),
    ("#009E73", (0, (1, 1.5)), "D"),
    ("#CC79A7", (0, (8, 3)), "v"),
    ("#E69F00", (0, (3, 1.5)), "P"),
    ("#56B4E9", (0, (3, 1, 1, 1, 1, 1)), "X"),
    ("#7A5195", (0, (6, 1)), "p"),
    ("#000000", (0, (3, 3)), "d"),
)
TEXT = "#333333"
"""Colour of titles, labels and legends."""
_LEGEND_INSIDE = 8
"""Lines that leave room for their legend."""

Series = tuple[np.ndarray, np.ndarray]
"""Steps, and values of shape (seeds, steps)."""


def plot_quality(records: Sequence[Record], metrics: Sequence[Metric], path: Path) -> None:
    """Save the first metric against steps; beside it, the last one.

    A metric that compares by ratio is shown as its excess over the baseline (master weights, else
    FP32) where there is one: the differences between strategies are a hundredth of the value
    itself, and pairing the seeds takes the luck of a seed out of them. Lines are means over seeds,
    bands span all of them, labels give the values at the last step.

    Args:
        records: Logged steps of all runs.
        metrics: What the task measures.
        path: The PNG file to write.
    """
    first, last = metrics[0], metrics[-1]
    shown = _metric_series(records, last)
    baseline = baseline_of(shown)
    others = {name: s for name, s in shown.items() if name != baseline}
    paired = baseline is not None and bool(others)
    losses = _metric_series(records, first)
    panels = 1 if last.versus == "ratio" and not paired else 2
    figure, axes = new_figure(panels, height=3.6 + 0.25 * max(0, len(losses) - _LEGEND_INSIDE) / 2)
    _draw(axes[0], losses)
    few = len(losses) <= _LEGEND_INSIDE
    _describe(axes[0], first.title, first.unit, legend=few)
    if not few:
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=4,
            frameon=False,
            fontsize=9,
            labelcolor=TEXT,
            handlelength=3.5,
        )
    if _spans_decades(losses):
        axes[0].set_yscale("log")
    if last.versus == "ratio" and paired and baseline is not None:
        steps, reference = shown[baseline]
        excess = {
            name: (steps, last.excess(values, reference)) for name, (_, values) in others.items()
        }
        axes[1].axhline(0, color=_styles(shown)[baseline][0], linewidth=1)
        _draw(axes[1], excess)
        _describe(axes[1], f"{last.title} above {baseline}", "%", legend=False)
        _label_ends(axes[1], excess, last.excess_text)
    elif last.versus != "ratio":
        scaled = {name: (steps, last.factor * y) for name, (steps, y) in shown.items()}
        _draw(axes[1], scaled)
        _describe(axes[1], last.title, last.unit, legend=False)
        _label_ends(axes[1], scaled, last.style.format)
    save_figure(figure, path)


def _spans_decades(series: dict[str, Series]) -> bool:
    values = np.concatenate([values.ravel() for _, values in series.values()])
    values = values[np.isfinite(values)]
    return bool(values.size and values.min() > 0 and values.max() > 30 * values.min())


def _metric_series(records: Iterable[Record], metric: Metric) -> dict[str, Series]:
    return _series(records, lambda record: record.metrics.get(metric.name))


def plot_descent_quality(records: Sequence[Record], path: Path) -> None:
    """Save effective descent quality as a share of the intended update, against steps.

    Args:
        records: Logged steps of all runs.
        path: The PNG file to write.
    """
    shares = _series(
        records, lambda record: None if record.descent_share is None else 100 * record.descent_share
    )
    lost = _series(
        records,
        lambda record: None if record.lost_arithmetic is None else 100 * record.lost_arithmetic,
    )
    figure, axes = new_figure(2)
    _draw(axes[0], shares)
    _describe(axes[0], "Effective descent quality", "% of the intended update")
    _from_zero(axes[0])
    _draw(axes[1], lost)
    _describe(axes[1], "Updates lost to rounding", "% of nonzero updates")
    _from_zero(axes[1])
    save_figure(figure, path)


def _from_zero(ax: Axes) -> None:
    """Shares are read against zero; a marker there may cross the axis."""
    values = [y for line in ax.get_lines() for y in np.asarray(line.get_ydata()) if y < 0]
    ax.set_ylim(bottom=min(values, default=0))
    for line in ax.get_lines():
        line.set_clip_on(False)


def _series(
    records: Iterable[Record], value: Callable[[Record], float | None]
) -> dict[str, Series]:
    """The measured values of each variant, one row per seed."""
    runs: dict[str, dict[int, dict[int, float]]] = {}
    for record in records:
        y = value(record)
        if y is not None:
            runs.setdefault(record.name, {}).setdefault(record.seed, {})[record.step] = y
    series = {}
    for name, seeds in runs.items():
        steps = sorted(set.intersection(*(set(values) for values in seeds.values())))
        rows = [[seeds[seed][step] for step in steps] for seed in sorted(seeds)]
        series[name] = (np.array(steps), np.array(rows))
    return series


def _styles(names: Iterable[str]) -> dict[str, _Style]:
    spare = itertools.cycle(_SPARE_STYLES)
    return {name: _STYLES.get(name) or next(spare) for name in names}


def new_figure(
    panels: int, *, width: float = 5.6, height: float = 3.6
) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, ``width`` x ``height`` inches each."""
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(colors=TEXT, labelsize=9)
    return figure, axes


def _draw(ax: Axes, series: dict[str, Series]) -> None:
    styles = _styles(series)
    for name, (steps, values) in series.items():
        color, dashes, marker = styles[name]
        ax.plot(
            steps,
            values.mean(0),
            color=color,
            linestyle=dashes,
            marker=marker,
            label=name,
            markersize=4,
            markevery=max(1, len(steps) // 8),
            linewidth=1.6,
        )
        if len(values) > 1:
            ax.fill_between(
                steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0
            )


def _label_ends(ax: Axes, series: dict[str, Series], text: Callable[[float], str]) -> None:
    """Write each line's name and last value beside its end, moved apart where they would touch."""
    styles = _styles(series)
    low, high = ax.get_ylim()
    ends = {name: float(values.mean(0)[-1]) for name, (_, values) in series.items()}
    heights: dict[str, float] = {}
    height = -math.inf
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if math.isfinite(end):
            height = heights[name] = max((end - low) / (high - low), height + 0.075)
    # Lines that end at the top would push the labels out of the frame.
    excess = max(0.0, height - 1.0)
    for name, place in heights.items():
        end, height = ends[name], place - excess
        ax.annotate(
            f"{name} {text(end)}",
            (1.01, height),
            xycoords="axes fraction",
            va="center",
            fontsize=9,
            color=styles[name][0],
        )


def _describe(ax: Axes, title: str, unit: str, *, legend: bool = True) -> None:
    ax.set_title(title, loc="left", fontsize=11, color=TEXT)
    ax.set_xlabel("step", fontsize=9, color=TEXT)
    ax.set_ylabel(unit, fontsize=9, color=TEXT)
    if legend and ax.get_lines():
        ax.legend(frameon=False, fontsize=9, labelcolor=TEXT, handlelength=3.5)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG file."""
    figure.savefig(path, dpi=160, facecolor="white")

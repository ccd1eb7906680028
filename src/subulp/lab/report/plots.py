"""The figures of a comparison: quality, and how much of each update survived."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..engine.metrics import Metric, Record, baseline_of
from .line_styles import looks
from .series import Series, metric_series, series, spans_decades

TEXT = "#333333"
"""Colour of titles, labels and legends."""
_LEGEND_INSIDE = 8
"""Lines that leave room for their legend."""


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
    shown = metric_series(records, last)
    baseline = baseline_of(shown)
    others = {name: s for name, s in shown.items() if name != baseline}
    paired = baseline is not None and bool(others)
    losses = metric_series(records, first)
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
    if spans_decades(values for _, values in losses.values()):
        axes[0].set_yscale("log")
    if last.versus == "ratio" and paired and baseline is not None:
        steps, reference = shown[baseline]
        excess = {
            name: (steps, last.excess(values, reference)) for name, (_, values) in others.items()
        }
        axes[1].axhline(0, color=looks(shown)[baseline].color, linewidth=1)
        _draw(axes[1], excess)
        _describe(axes[1], f"{last.title} above {baseline}", "%", legend=False)
        _label_ends(axes[1], excess, last.excess_text)
    elif last.versus != "ratio":
        scaled = {name: (steps, last.factor * y) for name, (steps, y) in shown.items()}
        _draw(axes[1], scaled)
        _describe(axes[1], last.title, last.unit, legend=False)
        _label_ends(axes[1], scaled, last.style.format)
    save_figure(figure, path)


def plot_descent_quality(records: Sequence[Record], path: Path) -> None:
    """Save effective descent quality as a share of the intended update, against steps.

    Args:
        records: Logged steps of all runs.
        path: The PNG file to write.
    """
    shares = series(
        records, lambda record: None if record.descent_share is None else 100 * record.descent_share
    )
    lost = series(
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


def _draw(ax: Axes, lines: dict[str, Series]) -> None:
    styles = looks(lines)
    for name, (steps, values) in lines.items():
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


def _label_ends(ax: Axes, lines: dict[str, Series], text: Callable[[float], str]) -> None:
    """Write each line's name and last value beside its end, moved apart where they would touch."""
    styles = looks(lines)
    low, high = ax.get_ylim()
    ends = {name: float(values.mean(0)[-1]) for name, (_, values) in lines.items()}
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
            color=styles[name].color,
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

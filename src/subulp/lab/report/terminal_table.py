"""The table at the end of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...diagnostics.memory import CATEGORIES
from ..engine.metrics import Metric, Spread, Summary, baseline_of, by_name, excess_over_baseline
from ..engine.run_list import ListedRun

_MIB = 2**20
_HEADINGS = {"gradients": "grads", "activations": "activ."}


@dataclass(frozen=True)
class _Column:
    """A quantity: its heading, and the text of its cell from the runs of one variant."""

    heading: str
    cell: Callable[[Sequence[Summary]], str]


def print_comparison(
    console: Console, metrics: Sequence[Metric], summaries: Sequence[Summary]
) -> None:
    """One row per variant: quality, what rounding lost, memory and time.

    With several seeds the metrics are mean ± sample standard deviation, and the other columns
    means. Runs are compared with the baseline (master weights, else FP32) seed by seed. A console
    too narrow for the table gets it in two parts.
    """
    quality, cost = _quality_columns(metrics, summaries), _cost_columns(summaries)
    title = _title(summaries)
    caption = (
        "Descent quality: the share of the intended update, by its length, that took effect. "
        "Lost updates: the share of its single numbers, however small, that moved nothing. "
        "MiB: live bytes at the peak of one training step"
    )
    ranks = {s.ranks for s in summaries if s.ranks}
    caption += f", on the one of {max(ranks)} ranks that has the most." if ranks else "."
    if any(s.simulated for s in summaries):
        caption += " A format that is simulated in wider storage has no bytes of its own."
    skipped = _counts(summaries, lambda summary: summary.skipped_steps)
    if skipped:
        caption += f" Steps skipped because a gradient was not finite: {skipped}."
    rollbacks = _counts(summaries, lambda summary: summary.rollbacks)
    if rollbacks:
        caption += f" Rollbacks to a checkpoint, with smaller steps afterwards: {rollbacks}."
    whole = _table(summaries, [*quality, *cost], title, caption)
    # Measured as if there were room: rich cuts a measure to the width of the console.
    roomy = console.options.update_width(1000)
    if console.measure(whole, options=roomy).maximum <= console.width:
        console.print(whole)
        return
    console.print(_table(summaries, quality, title, None))
    console.print(_table(summaries, cost, None, caption))


def _counts(summaries: Sequence[Summary], count: Callable[[Summary], int]) -> str:
    """The sum over seeds of each variant that has one."""
    sums = {name: sum(map(count, runs)) for name, runs in by_name(summaries).items()}
    return ", ".join(f"{name} {value:,}" for name, value in sums.items() if value)


def _quality_columns(metrics: Sequence[Metric], summaries: Sequence[Summary]) -> list[_Column]:
    names = [s.name for s in summaries]
    baseline = baseline_of(names)
    columns = []
    for metric in metrics:
        columns.append(_Column(metric.heading, partial(_metric, metric)))
        if metric.versus and baseline is not None and len(set(names)) > 1:
            columns.append(_Column(f"vs\n{baseline}", partial(_excess, metric, summaries)))
    if not any("loss" in metric.name for metric in metrics):
        columns.append(
            _Column("train\nloss", lambda runs: _spread("{:.4g}", (s.train_loss for s in runs)))
        )
    return [
        *columns,
        _Column(
            "descent\nquality", lambda runs: _mean("{:.1f} %", _percent("descent_share", runs))
        ),
        _Column("lost\nupdates", lambda runs: _mean("{:.1f} %", _percent("lost_arithmetic", runs))),
    ]


def _cost_columns(summaries: Sequence[Summary]) -> list[_Column]:
    def bytes_per_parameter(runs: Sequence[Summary]) -> str:
        return _mean("{:.4g}", (s.bytes_per_parameter["total"] for s in runs))

    def peak(category: str) -> _Column:
        return _Column(
            f"{_HEADINGS.get(category, category)}\nMiB",
            lambda runs: _real(runs, "{:.2f}", (s.peak_bytes[category] / _MIB for s in runs)),
        )

    columns = [
        _Column("bytes/\nparam", bytes_per_parameter),
        *map(peak, (*CATEGORIES, "total")),
        _Column(
            "ms/\nstep",
            lambda runs: _real(runs, "{:.1f}", (1e3 * s.seconds_per_step for s in runs)),
        ),
    ]
    if all(s.seconds_per_epoch is not None for s in summaries):
        columns.append(
            _Column(
                "s/\nepoch",
                lambda runs: _real(runs, "{:.1f}", (s.seconds_per_epoch or 0.0 for s in runs)),
            )
        )
    return columns


def _table(
    summaries: Sequence[Summary], columns: Iterable[_Column], title: str | None, caption: str | None
) -> Table:
    table = Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        title_justify="left",
        caption_justify="left",
    )
    columns = list(columns)
    table.add_column("precision", no_wrap=True, style="bold", vertical="bottom")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True, vertical="bottom")
    for name, runs in by_name(summaries).items():
        table.add_row(name, *(column.cell(runs) for column in columns))
    return table


def _title(summaries: Sequence[Summary]) -> str:
    first, seeds = summaries[0], len({s.seed for s in summaries})
    title = f"{first.parameters:,} parameters, {first.steps:,} steps"
    if "activations" in first.settings:
        title += f", {str(first.settings['activations']).upper()} activations"
    return title if seeds == 1 else f"{title}, {seeds} seeds (mean ± standard deviation)"


def _percent(name: str, runs: Sequence[Summary]) -> Iterable[float]:
    return (100 * getattr(run, name) for run in runs)


def _metric(metric: Metric, runs: Sequence[Summary]) -> str:
    # Metrics of mixtures of representations: not every variant has them.
    if metric.name not in runs[0].metrics:
        return ""
    values = [metric.factor * s.metrics[metric.name] for s in runs]
    # A drop below the baseline, and there is no baseline.
    if metric.drop_of is not None and not all(map(math.isfinite, values)):
        return "-"
    # No AUC of examples that are all of one class; where all is NaN, the run diverged.
    if any(map(math.isnan, values)) and all(
        any(map(math.isfinite, s.metrics.values())) for s in runs
    ):
        return "-"
    return _spread(metric.style, values)


def _excess(metric: Metric, summaries: Sequence[Summary], runs: Sequence[Summary]) -> str:
    if runs[0].name == baseline_of(s.name for s in summaries):
        return ""
    found = (excess_over_baseline(metric, run, summaries) for run in runs)
    mean = Spread.of(excess for excess in found if excess is not None).mean
    return metric.excess_text(mean) if math.isfinite(mean) else "-"


def _mean(style: str, values: Iterable[float]) -> str:
    mean = Spread.of(values).mean
    return style.format(mean) if math.isfinite(mean) else "-"


def _real(runs: Sequence[Summary], style: str, values: Iterable[float]) -> str:
    """A mean of what only storage that is not simulated has."""
    return "-" if runs[0].simulated else _mean(style, values)


def _spread(style: str, values: Iterable[float]) -> str:
    spread = Spread.of(values)
    if not math.isfinite(spread.mean):
        return "diverged"
    if spread.deviation is None:
        return style.format(spread.mean)
    return f"{style.format(spread.mean)} ± {style.format(spread.deviation)}"


def print_runs(console: Console, runs: Sequence[ListedRun]) -> None:
    """A line for each run directory."""
    if not runs:
        console.print("no runs")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("run", "task", "data", "quality", "state"):
        table.add_column(heading, overflow="fold", vertical="top")
    for run in runs:
        values = (f"{name} {value:.4g}" for name, value in run.quality.items())
        measured = f"{run.metric}: {', '.join(values)}" if run.quality else ""
        state = run.state if run.step is None else f"{run.state}, step {run.step:,}"
        cells = (run.path, run.task, run.data, measured, run.problem or state)
        table.add_row(*map(Text, cells))
    console.print(table)


def print_evaluations(
    console: Console, metrics: Sequence[Metric], found: Sequence[tuple[str, int, dict[str, float]]]
) -> None:
    """A line for each model, with the metrics that it has, the table's way."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("precision", no_wrap=True, style="bold", vertical="bottom")
    table.add_column("seed", justify="right", vertical="bottom")
    shown = [m for m in metrics if any(m.name in measured for _, _, measured in found)]
    for metric in shown:
        table.add_column(metric.heading, justify="right", no_wrap=True, vertical="bottom")
    for variant, seed, measured in found:
        values = [
            m.style.format(m.factor * measured[m.name]) if m.name in measured else "" for m in shown
        ]
        table.add_row(Text(variant), str(seed), *values)
    console.print(table)

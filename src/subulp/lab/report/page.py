"""What a report shows of a group of runs: its figures, tables and texts, without markup."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from ...diagnostics.memory import CATEGORIES
from ..engine.metrics import Metric, Record, Spread, Summary
from ..engine.mixture_log import with_mixture_metrics
from ..engine.task import TASKS, task_named
from .conclusion import conclusions
from .configuration import Configuration, configuration, value_text
from .group import MISSING, Group, Variant, spread_of, spread_text
from .heat_map import HeatMap, heat_map
from .line_chart import LineChart
from .memory_chart import Bar, MemoryChart
from .styles import STYLES
from .trade_off import Path, Point, TradeOff

_MIB = 2**20
_WATCHED = ("effective_descent_quality", "descent_share", "lost_arithmetic")
_CACHE = ("compression", "hit_rate")


@dataclass(frozen=True)
class Cell:
    """A text, and a smaller one beneath it."""

    text: str
    below: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows; the others hold numbers.

    Attributes:
        caption: What the table shows, for those who do not see it.
        columns: Headings, that of the rows' names first.
        rows: Name, key in figures or nothing, and cells.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, str, Sequence[Cell]]]


@dataclass(frozen=True)
class Section:
    """A group of runs as the report shows it.

    Attributes:
        title: What the task is called.
        id: Name of the task.
        conclusions: What was lost, at how many bytes, beside what: a sentence for each run
            directory.
        runs: Name, data and state of each run directory.
        notes: What a reader should know before the figures.
        quality: Metrics, and differences to the baseline.
        versus: Names of the baselines.
        training: Loss and quality against steps.
        headline: The two most telling of these: the first metric, and the last one or its
            excess over the baseline.
        lost: Descent quality and lost updates against steps.
        measured: Live bytes at the peak, by category.
        counted: Bytes of one number, by tensor.
        memory: Both, in numbers.
        cache: Hits of the caches against steps.
        compression: Quality against the memory of the tables.
        mixtures: Representations of the operands, by layer and role.
        configuration: Options, versions, and machine.
        measures: Everything that was measured.
    """

    title: str
    id: str
    conclusions: list[str]
    runs: list[dict[str, Any]]
    notes: list[str]
    quality: Table
    versus: str
    training: list[LineChart]
    headline: list[LineChart]
    lost: list[LineChart]
    measured: MemoryChart | None
    counted: MemoryChart | None
    memory: Table | None
    cache: list[LineChart]
    compression: list[TradeOff]
    mixtures: list[HeatMap]
    configuration: Configuration
    measures: Table


def section(group: Group) -> Section:
    """Everything about a group."""
    metrics = _metrics(group)
    compared = [metric for metric in metrics if metric.drop_of is None]
    measured, counted = _memory_charts(group)
    return Section(
        title=TASKS[group.task],
        id=group.task,
        conclusions=conclusions(group, [m for m in compared if m.name not in _CACHE]),
        runs=[_run(group, index) for index in range(len(group.runs))],
        notes=_notes(group),
        quality=_quality(group, metrics),
        versus=" and ".join(group.baselines),
        training=_training(group, [m for m in compared if m.name not in _CACHE]),
        headline=_headline(group, compared),
        lost=_lost(group),
        measured=measured,
        counted=counted,
        memory=_memory_table(group),
        cache=_cache(group, [m for m in compared if m.name == "hit_rate"]),
        compression=_compression(group, metrics),
        mixtures=_mixtures(group),
        configuration=configuration(group),
        measures=_measures(group),
    )


def _metrics(group: Group) -> list[Metric]:
    """The task's metrics that any of the runs has measured."""
    measured = {name for v in group.variants for result in v.results for name in result.metrics}
    metrics = with_mixture_metrics(task_named(group.task).METRICS)
    return [metric for metric in metrics if metric.name in measured]


def _run(group: Group, index: int) -> dict[str, Any]:
    """Name, data and state of a run directory."""
    run = group.runs[index]
    variants = [v for v in group.variants if v.run == index]
    seeds = {result.seed for v in variants for result in v.results}
    sizes = [
        f"{size:,} {name.replace('_', ' ')}"
        for name, size in run.data.items()
        if isinstance(size, int) and not isinstance(size, bool)
    ]
    name = run.data.get("name") or run.config.get("data")
    facts = [f"{_plural(len(variants), 'variant')}, {_plural(len(seeds), 'seed')}"]
    if run.summaries:
        first = run.summaries[0]
        facts.append(f"{first.parameters:,} parameters, {first.steps:,} steps")
    else:
        reached = max((record.step for record in run.records), default=0)
        facts.append(f"unfinished: the last logged step is {reached:,}")
    return {
        "label": group.labels[index],
        "data": ": ".join(filter(None, [str(name) if name else "", ", ".join(sizes)])),
        "facts": facts,
        "ended": bool(run.summaries),
    }


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _notes(group: Group) -> list[str]:
    notes = []
    for run, label in zip(group.runs, group.labels, strict=True):
        of = f" of {label}" if len(group.runs) > 1 else ""
        if not run.summaries:
            notes.append(
                f"The comparison{of} is not finished. Tables show the last evaluation of each run; "
                "memory and time are measured at the end."
            )
        if run.cut:
            notes.append(f"The last line of metrics.jsonl{of} is incomplete and was ignored.")
        if run.data.get("skipped_lines"):
            notes.append(
                f"{run.data['skipped_lines']} lines of the data{of} were skipped; the first: "
                f"{run.data.get('first_skipped', '')}"
            )
    for variant in group.variants:
        bad = [r.seed for r in variant.results if any(map(math.isnan, _shown(r.metrics)))]
        if bad:
            notes.append(f"{variant.name}: not finite with seed {', '.join(map(str, bad))}.")
        for summary in variant.summaries:
            name = f"{variant.name}, seed {summary.seed}"
            if summary.skipped_steps:
                notes.append(
                    f"{name}: {summary.skipped_steps:,} of {summary.steps:,} steps were skipped "
                    "because a gradient was not finite."
                )
            if summary.rollbacks:
                times = _plural(summary.rollbacks, "time")
                notes.append(
                    f"{name} rolled back to a checkpoint {times}, with smaller steps afterwards."
                )
    if any(s.simulated for v in group.variants for s in v.summaries):
        notes.append("A format that is simulated in wider storage has no bytes or time of its own.")
    return notes


def _shown(metrics: Mapping[str, float]) -> list[float]:
    """All but the differences to a baseline, which are NaN where there is none."""
    return [value for name, value in metrics.items() if not name.endswith("_drop")]


def _quality(group: Group, metrics: Sequence[Metric]) -> Table:
    """A row for each variant: mean and deviation, and beneath them the same of the differences."""
    unfinished = any(not run.summaries for run in group.runs)
    columns = ["variant", *(["step"] if unfinished else []), *map(_heading, metrics)]
    columns += ["train loss", "descent quality, %", "lost updates, %"]
    rows = []
    for variant in group.variants:
        steps = [Cell(" / ".join(f"{step:,}" for step in _steps(variant)))] if unfinished else []
        cells = [_compared(variant, metric) for metric in metrics]
        ends = variant.summaries
        cells += [
            Cell(spread_text(spread_of(s.train_loss for s in ends), "{:.4f}".format)),
            _watched(s.descent_share for s in ends),
            _watched(s.lost_arithmetic for s in ends),
        ]
        rows.append((variant.name, variant.key, [*steps, *cells]))
    return Table("Quality of each variant", columns, rows)


def _watched(shares: Iterable[float]) -> Cell:
    """In percent, over the runs that watched any step."""
    found = (100 * share for share in shares if not math.isnan(share))
    return Cell(spread_text(spread_of(found), "{:.2f}".format))


def _steps(variant: Variant) -> list[int]:
    return list(dict.fromkeys(result.step for result in variant.results))


def _heading(metric: Metric) -> str:
    words = " ".join(metric.heading.split())
    return words if "%" in words or metric.unit != "%" else f"{words}, %"


def _compared(variant: Variant, metric: Metric) -> Cell:
    text = spread_text(variant.spread(metric), metric.style.format)
    compares = metric.drop_of is None and metric.name not in _CACHE
    excess = spread_of(variant.excesses(metric)) if compares else None
    if excess is None:
        return Cell(text)
    if not math.isfinite(excess.mean):
        return Cell(text, "not finite")
    digits = metric.style if metric.versus != "ratio" else "{:.2f}"
    below = _signed(excess.mean, digits)
    if excess.deviation is not None:
        below += f" ± {digits.format(excess.deviation)}"
    return Cell(text, below + (" %" if metric.versus == "ratio" else ""))


def _signed(value: float, digits: str) -> str:
    text = digits.format(abs(value))
    zero = not any(character in "123456789" for character in text)
    return ("+" if value > 0 or zero else "\N{MINUS SIGN}") + text


def _training(group: Group, metrics: Sequence[Metric]) -> list[LineChart]:
    charts = []
    for metric in metrics:
        charts += _metric_chart(group, metric)
        if metric.versus is not None:
            charts += _excess_chart(group, metric)

    def loss(record: Record) -> float | None:
        return record.loss

    chart = LineChart("Training loss", "of each logged batch", group.lines(loss), "{:.4g}".format)
    return [*charts, *_drawn(group, chart, loss)]


def _headline(group: Group, metrics: Sequence[Metric]) -> list[LineChart]:
    if not metrics:
        return []
    first, last = metrics[0], metrics[-1]
    excess = _excess_chart(group, last) if last.versus == "ratio" else []
    # By itself, what compares by ratio says what the first metric says.
    alone = [] if last is first or last.versus == "ratio" else _metric_chart(group, last)
    charts = _metric_chart(group, first)
    if excess:
        # Differences stand in that one.
        charts = [replace(chart, below=None) for chart in charts]
    return [*charts, *(excess or alone)]


def _metric_chart(group: Group, metric: Metric) -> list[LineChart]:
    def value(record: Record) -> float | None:
        found = record.metrics.get(metric.name)
        return None if found is None else metric.factor * found

    # What is compared by ratio has a figure of its own.
    told_apart = metric.versus is None
    chart = LineChart(metric.title, metric.unit, group.lines(value), metric.style.format)
    return _drawn(group, chart, value if told_apart else None)


def _drawn(
    group: Group, chart: LineChart, value: Callable[[Record], float | None] | None
) -> list[LineChart]:
    """A chart that has a line, with the differences to the baseline where its lines coincide."""
    # A single point is a number, and in the tables.
    if all(len(line.series[0]) < 2 for line in chart.lines):
        return []
    if value is None or not chart.coincide:
        return [chart]
    above = " and ".join(group.baselines)
    lines = group.difference_lines(value)
    if not lines:
        return [chart]
    below = LineChart(f"Above {above}", chart.quantity, lines, _difference_text, zero=above)
    return [replace(chart, below=below)]


def _difference_text(value: float) -> str:
    return f"{value + 0.0:+.2g}"


def _excess_chart(group: Group, metric: Metric) -> list[LineChart]:
    lines = group.excess_lines(metric)
    if all(len(line.series[0]) < 2 for line in lines):
        return []
    above = " and ".join(group.baselines)
    return [
        LineChart(
            f"{metric.title} above {above}",
            "%, seed by seed" if metric.versus == "ratio" else f"{metric.unit}, seed by seed",
            lines,
            metric.excess_text,
            zero=above,
        )
    ]


def _lost(group: Group) -> list[LineChart]:
    charts = []
    for title, unit, name in (
        ("Effective descent quality", "% of the intended update", "descent_share"),
        ("Updates lost to rounding", "% of nonzero updates", "lost_arithmetic"),
    ):
        lines = group.lines(_percent(name))
        charts += _drawn(
            group, LineChart(title, unit, lines, "{:.2f}".format, from_zero=True), None
        )
    # Collage, Figures 3 (right), 2 and 5.
    for title, name in (
        ("Effective descent quality, absolute", "effective_descent_quality"),
        ("Norm of the intended update", "update_norm"),
        ("Norm of the weights", "parameter_norm"),
        ("Norm of the gradients", "gradient_norm"),
    ):
        lines = group.lines(attrgetter(name))
        charts += _drawn(group, LineChart(title, "Euclidean norm", lines, "{:.4g}".format), None)
    return charts


def _percent(name: str) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        found = getattr(record, name)
        return None if found is None else 100 * found

    return value


def _memory_charts(group: Group) -> tuple[MemoryChart | None, MemoryChart | None]:
    measured, counted = [], []
    kinds: dict[str, str] = {}
    for variant in group.variants:
        real = [s for s in variant.summaries if not s.simulated]
        if real:
            parts = {c: _mean(s.peak_bytes[c] for s in real) / _MIB for c in CATEGORIES}
            total = sum(parts.values())
            measured.append(Bar(variant.name, parts, f"{total:,.2f} MiB"))
        if variant.summaries:
            tensors = variant.summaries[0].bytes_per_parameter
            parts = {n.replace("_", " "): v for n, v in tensors.items() if n != "total" and v}
            kinds |= {name: _kind(name) for name in parts}
            counted.append(Bar(variant.name, parts, f"{tensors['total']:.4g} bytes"))
    of = task_named(group.task).COUNTED
    return (
        MemoryChart(
            "Measured at the peak of a training step",
            "MiB of live tensors",
            measured,
            {name: name for name in CATEGORIES},
            "{:,.2f}".format,
        )
        if measured
        else None,
        MemoryChart(f"Counted for one {of}", "bytes by tensor", counted, kinds, "{:.4g}".format)
        if counted
        else None,
    )


def _kind(tensor: str) -> str:
    """The category of a tensor that ``bytes_per_parameter`` names."""
    if tensor == "parameter":
        return "weights"
    return "gradients" if tensor == "gradient" else "states"


def _memory_table(group: Group) -> Table | None:
    """The arithmetic beside the measurement."""
    ended = [variant for variant in group.variants if variant.summaries]
    if not ended:
        return None
    of = task_named(group.task).COUNTED
    in_epochs = any(s.seconds_per_epoch is not None for v in ended for s in v.summaries)
    columns = [
        "variant",
        f"counted: bytes a {of}",
        "counted, no gradient",
        "measured weights + states, bytes a parameter",
        *(f"{category}, MiB" for category in CATEGORIES),
        "total, MiB",
        "ms a step",
        *(["s an epoch"] if in_epochs else []),
    ]
    rows = []
    for variant in ended:
        runs = variant.summaries
        tensors = runs[0].bytes_per_parameter
        arithmetic = " + ".join(
            f"{value:.4g} {name.replace('_', ' ')}"
            for name, value in tensors.items()
            if name != "total" and value
        )
        kept = tensors["total"] - tensors.get("gradient", 0.0)
        real = not runs[0].simulated
        own = _mean(
            (s.peak_bytes["weights"] + s.peak_bytes["states"]) / max(1, s.parameters) for s in runs
        )
        peaks = [_mean(s.peak_bytes[c] for s in runs) / _MIB for c in (*CATEGORIES, "total")]
        epochs = [s.seconds_per_epoch for s in runs if s.seconds_per_epoch is not None]
        cells = [
            Cell(f"{tensors['total']:.4g}", arithmetic),
            Cell(f"{kept:.4g}"),
            Cell(f"{own:.4g}" if real else MISSING),
            *(Cell(f"{peak:,.2f}" if real else MISSING) for peak in peaks),
            Cell(_real(real, [1e3 * s.seconds_per_step for s in runs])),
            *([Cell(_real(real, epochs))] if in_epochs else []),
        ]
        rows.append((variant.name, variant.key, cells))
    return Table("Memory and time of each variant", columns, rows)


def _real(real: bool, values: Sequence[float]) -> str:
    return f"{_mean(values):.1f}" if real and values else MISSING


def _mean(values: Iterable[float]) -> float:
    return Spread.of(values).mean


def _cache(group: Group, metrics: Sequence[Metric]) -> list[LineChart]:
    charts = []
    for metric in metrics:
        for chart in _metric_chart(group, metric):
            # A run without a cache has no hits.
            lines = [line for line in chart.lines if line.series[1].any()]
            if lines:
                charts.append(
                    LineChart(
                        "Lookups that the caches served",
                        "% of those in training so far",
                        lines,
                        metric.style.format,
                        from_zero=True,
                    )
                )
    return charts


def _compression(group: Group, metrics: Sequence[Metric]) -> list[TradeOff]:
    """Quality against the memory of the tables, as the cache paper's Figure 7."""
    charts = []
    for metric in metrics:
        if metric.versus is None and metric.drop_of is None:
            continue
        compared = metric.drop_of is not None or any(v.excesses(metric) for v in group.variants)
        found = []
        for variant in group.variants:
            sizes = [
                r.metrics["compression"] for r in variant.results if "compression" in r.metrics
            ]
            values = _compared_values(variant, metric, compared)
            if values and sizes and math.isfinite(sum(sizes)):
                ends = min(values), max(values)
                point = Point(variant.name, "", _mean(sizes), _mean(values), ends)
                found.append((variant, point))
        if found:
            below = "below" if metric.drop_of is not None else "above"
            over = f" {below} {' and '.join(group.baselines)}" if compared else ""
            unit = "%" if metric.versus == "ratio" and compared else metric.unit
            axis = "memory of the tables over FP32's"
            charts.append(TradeOff(f"{metric.title}{over}", unit, axis, _paths(group, found)))
    return charts


def _compared_values(variant: Variant, metric: Metric, compared: bool) -> list[float]:
    """A variant's differences to the baseline, or its values where nothing has a baseline."""
    if metric.drop_of is not None or not compared:
        found = [
            metric.factor * r.metrics[metric.name]
            for r in variant.results
            if metric.name in r.metrics and not (compared and variant.is_baseline)
        ]
    else:
        found = variant.excesses(metric)
    return [value for value in found if math.isfinite(value)]


def _paths(group: Group, found: Sequence[tuple[Variant, Point]]) -> list[Path]:
    """Points joined where only the precision differs, each with its precision beside it."""
    paths: dict[tuple[int, str], list[Point]] = {}
    for variant, point in found:
        precision, _, others = variant.own.partition(" ")
        points = paths.setdefault((variant.run, others), [])
        points.append(replace(point, label=precision))
    names = [
        ": ".join(filter(None, [group.labels[run] if len(group.runs) > 1 else "", others]))
        for run, others in paths
    ]
    names = [name or "as they are" for name in names]
    joined = zip(names, itertools.cycle(STYLES[1:]), paths.values())
    return [Path(name, style, points) for name, style, points in joined]


def _mixtures(group: Group) -> list[HeatMap]:
    """A map for each variant with mixtures: the mean over its records and seeds."""
    found = []
    for variant in group.variants:
        records = group.runs[variant.run].records
        mixes = (record.mix or () for record in records if record.name == variant.own)
        linear = {str(summary.settings.get("linear", "")) for summary in variant.summaries}
        # A run of one kind of layers does not name it.
        kind = [name for name in linear if name and name not in variant.name]
        title = " ".join([variant.name, *kind])
        found.append(heat_map(title, itertools.chain.from_iterable(mixes)))
    return [each for each in found if each is not None]


def _measures(group: Group) -> Table:
    """Every number of every run's summary."""
    runs = [(variant, summary) for variant in group.variants for summary in variant.summaries]
    flat = [_flat(summary) for _, summary in runs]
    names = list(dict.fromkeys(name for numbers in flat for name in numbers))
    rows = [
        (
            f"{variant.name}, seed {summary.seed}",
            variant.key,
            [Cell(_exact(numbers.get(name))) for name in names],
        )
        for (variant, summary), numbers in zip(runs, flat, strict=True)
    ]
    return Table("Everything that was measured", ["run", *names], rows)


def _flat(summary: Summary) -> dict[str, Any]:
    found: dict[str, Any] = {**summary.settings, **summary.metrics}
    for name, value in vars(summary).items():
        if name in ("precision", "seed", "metrics", "settings", "variant"):
            continue
        if isinstance(value, dict):
            found |= {f"{name}: {part}": number for part, number in value.items()}
        else:
            # Not measured at all, if no step was watched.
            found[name] = None if name in _WATCHED and math.isnan(value) else value
    return found


def _exact(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "not finite"
    if isinstance(value, bool) or not isinstance(value, int):
        return "" if value is None else value_text(value)
    return f"{value:,}"

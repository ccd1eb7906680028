"""Runs of one task side by side: names, styles, results, and differences to the baseline."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engine.metrics import Metric, Record, Spread, Summary, baseline_of
from .line_chart import Line, Series
from .run_reader import Run
from .styles import LineStyle, line_styles

MISSING = "\N{EN DASH}"
"""Stands where there is no number."""


@dataclass(frozen=True)
class Result:
    """What one run of a variant and seed has reached.

    Attributes:
        seed: Seed of the run.
        step: The last evaluated step, or the last step.
        metrics: What the last evaluation measured; empty before the first.
        baseline: Metrics of the baseline with the same seed at the same step, if there are any.
        summary: ``None`` while the comparison has not ended.
    """

    seed: int
    step: int
    metrics: dict[str, float]
    baseline: dict[str, float] | None
    summary: Summary | None


@dataclass(frozen=True)
class Variant:
    """All seeds of one variant of one run directory.

    Attributes:
        name: Unique among the variants of the group.
        key: The same in one or two letters.
        style: Style of its lines.
        run: Index of its run directory.
        own: Its name in its run directory.
        results: One for each seed.
        is_baseline: Others of its run directory are compared with it.
    """

    name: str
    key: str
    style: LineStyle
    run: int
    own: str
    results: tuple[Result, ...]
    is_baseline: bool

    @property
    def summaries(self) -> list[Summary]:
        """The summaries of all seeds; empty while the comparison has not ended."""
        return [result.summary for result in self.results if result.summary is not None]

    def spread(self, metric: Metric) -> Spread | None:
        """The metric in its unit, over the seeds that have it."""
        return spread_of(
            metric.factor * result.metrics[metric.name]
            for result in self.results
            if metric.name in result.metrics
        )

    def excesses(self, metric: Metric) -> list[float]:
        """How far each seed is above the baseline's run of the same seed."""
        return [
            float(metric.excess(result.metrics[metric.name], result.baseline[metric.name]))
            for result in self.results
            if result.baseline is not None
            and metric.name in result.metrics
            and metric.has_excess(result.baseline.get(metric.name))
        ]


@dataclass(frozen=True)
class Group:
    """The run directories of one task.

    Attributes:
        task: Name of the task.
        runs: What the directories hold.
        labels: What the page calls the directories.
        variants: The variants of all directories.
    """

    task: str
    runs: tuple[Run, ...]
    labels: tuple[str, ...]
    variants: tuple[Variant, ...]

    @classmethod
    def of(cls, task: str, runs: Sequence[Run]) -> Group:
        """Put runs of one task side by side."""
        labels = run_labels([run.path for run in runs])
        found: list[tuple[int, str, str]] = []
        for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
            for own in _variant_names(run):
                found.append((index, own, own if len(runs) == 1 else f"{label}: {own}"))
        styles = line_styles(own for _, own, _ in found)
        variants = []
        for place, ((index, own, name), style) in enumerate(zip(found, styles, strict=True)):
            baseline = baseline_of(_variant_names(runs[index]))
            variants.append(
                Variant(
                    name,
                    _key(place),
                    style,
                    index,
                    own,
                    _results(runs[index], own, baseline),
                    own == baseline,
                )
            )
        return cls(task, tuple(runs), labels, tuple(variants))

    def lines(self, value: Callable[[Record], float | None]) -> list[Line]:
        """A line for each variant that has values."""
        found = [series(_in_step(run.records, value), value) for run in self.runs]
        return [
            Line(v.name, v.key, v.style, found[v.run][v.own])
            for v in self.variants
            if v.own in found[v.run] and len(found[v.run][v.own][0])
        ]

    def excess_lines(self, metric: Metric) -> list[Line]:
        """A metric above the baseline's, seed by seed, for each variant but the baselines."""
        records = [_in_step(run.records, _value_of(metric)) for run in self.runs]
        lines = []
        for variant in self.variants:
            run = records[variant.run]
            baseline = baseline_of(_variant_names(self.runs[variant.run]))
            if baseline is None or variant.is_baseline:
                continue
            value = _value_of(metric)
            paired = _paired(run, variant.own, baseline, value, metric.excess_of_floats)
            if len(paired[0]):
                lines.append(Line(variant.name, variant.key, variant.style, paired))
        return lines

    def difference_lines(self, value: Callable[[Record], float | None]) -> list[Line]:
        """A value less the baseline's, seed by seed, for each variant but the baselines."""
        lines = []
        for variant in self.variants:
            run = self.runs[variant.run]
            baseline = baseline_of(_variant_names(run))
            if baseline is None or variant.is_baseline:
                continue
            records = _in_step(run.records, value)
            paired = _paired(records, variant.own, baseline, value, lambda own, other: own - other)
            if len(paired[0]):
                lines.append(Line(variant.name, variant.key, variant.style, paired))
        return lines

    @property
    def baselines(self) -> list[str]:
        """Names of the variants that others are compared with, each once."""
        return list(dict.fromkeys(v.own for v in self.variants if v.is_baseline))


def series(records: Iterable[Record], value: Callable[[Record], float | None]) -> dict[str, Series]:
    """The measured values of each variant, at the steps where all of its seeds have one.

    Args:
        records: Logged steps of all runs.
        value: The value of a record, or ``None`` where the step did not measure it.
    """
    runs: dict[str, dict[int, dict[int, float]]] = {}
    for record in records:
        y = value(record)
        if y is not None:
            runs.setdefault(record.name, {}).setdefault(record.seed, {})[record.step] = y
    found = {}
    for name, seeds in runs.items():
        steps = sorted(set.intersection(*(set(values) for values in seeds.values())))
        rows = [[seeds[seed][step] for step in steps] for seed in sorted(seeds)]
        found[name] = (np.array(steps), np.array(rows))
    return found


def run_labels(paths: Sequence[Path]) -> tuple[str, ...]:
    """Names of folders, with as many of their parents as it takes to distinguish them."""
    whole = [Path(os.path.abspath(path)).parts for path in paths]
    for length in range(1, max(map(len, whole), default=1) + 1):
        names = tuple("/".join(parts[-length:]) for parts in whole)
        if len(set(names)) == len(names):
            return names
    # The same folder twice.
    return tuple(f"{name} ({index + 1})" for index, name in enumerate(names))


def _variant_names(run: Run) -> list[str]:
    """In the order of the summary, or in that of the configuration and of appearance."""
    if run.summaries:
        return list(dict.fromkeys(s.name for s in run.summaries))
    seen = dict.fromkeys(r.name for r in run.records)
    planned = run.config.get("precision")
    first = [name for name in planned if name in seen] if isinstance(planned, list) else []
    return list(dict.fromkeys([*first, *seen]))


def _key(place: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    letters = ""
    place += 1
    while place:
        place, letter = divmod(place - 1, 26)
        letters = chr(ord("A") + letter) + letters
    return letters


def _results(run: Run, name: str, baseline: str | None) -> tuple[Result, ...]:
    ended = {s.seed: s for s in run.summaries if s.name == name}
    of_baseline = {s.seed: s.metrics for s in run.summaries if s.name == baseline}
    logged: dict[int, Record] = {}
    at_step: dict[tuple[int, int], dict[str, float]] = {}
    for record in run.records:
        if record.name == baseline and record.metrics:
            at_step[record.seed, record.step] = record.metrics
        if record.name == name:
            last = logged.get(record.seed)
            if last is None or (bool(record.metrics), record.step) >= (
                bool(last.metrics),
                last.step,
            ):
                logged[record.seed] = record
    results = []
    for seed in dict.fromkeys([*ended, *logged]):
        summary = ended.get(seed)
        if summary is not None:
            step, metrics, reference = summary.steps, summary.metrics, of_baseline.get(seed)
        else:
            step, metrics = logged[seed].step, logged[seed].metrics
            reference = at_step.get((seed, step))
        results.append(
            Result(seed, step, metrics, None if name == baseline else reference, summary)
        )
    return tuple(results)


def _value_of(metric: Metric) -> Callable[[Record], float | None]:
    return lambda record: record.metrics.get(metric.name)


def _in_step(records: Sequence[Record], value: Callable[[Record], float | None]) -> list[Record]:
    """Records without the seeds that are far behind others of their variant: those still train."""
    last: dict[str, dict[int, int]] = {}
    for record in records:
        if value(record) is not None:
            seeds = last.setdefault(record.name, {})
            seeds[record.seed] = max(record.step, seeds.get(record.seed, 0))
    return [
        record
        for record in records
        if record.name in last
        and last[record.name].get(record.seed, 0) >= 0.9 * max(last[record.name].values())
    ]


def _paired(
    records: Sequence[Record],
    name: str,
    baseline: str,
    value: Callable[[Record], float | None],
    excess: Callable[[float, float], float],
) -> Series:
    """A variant's excess over the baseline's run with the same seed, where both have values."""
    reference = {(r.seed, r.step): value(r) for r in records if r.name == baseline}

    def paired(record: Record) -> float | None:
        own, other = value(record), reference.get((record.seed, record.step))
        if own is None or other is None:
            return None
        return float(excess(own, other))

    found = series((record for record in records if record.name == name), paired)
    return found.get(name, (np.zeros(0, int), np.zeros((0, 0))))


def spread_of(values: Iterable[float]) -> Spread | None:
    """The spread of values, if there are any."""
    found = list(values)
    return Spread.of(found) if found else None


def spread_text(spread: Spread | None, style: Callable[[float], str]) -> str:
    """Mean and sample standard deviation."""
    if spread is None:
        return MISSING
    if not math.isfinite(spread.mean):
        return "not finite"
    if spread.deviation is None:
        return style(spread.mean)
    return f"{style(spread.mean)} ± {style(spread.deviation)}"

"""Measured values against steps, by variant and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..engine.metrics import Metric, Record

Series = tuple[np.ndarray, np.ndarray]
"""Steps, and values of shape (seeds, steps)."""


def series(records: Iterable[Record], value: Callable[[Record], float | None]) -> dict[str, Series]:
    """The measured values of each variant, at the steps where all of its seeds have one.

    Args:
        records: Logged steps of all runs.
        value: Of a record, or ``None`` where the step did not measure it.
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


def metric_series(records: Iterable[Record], metric: Metric) -> dict[str, Series]:
    """:func:`series` of a metric."""
    return series(records, lambda record: record.metrics.get(metric.name))


def spans_decades(values: Iterable[np.ndarray]) -> bool:
    """Whether a logarithmic axis shows the values better."""
    found = np.concatenate([np.ravel(v) for v in values] or [np.zeros(0)])
    found = found[np.isfinite(found)]
    return bool(found.size and found.min() > 0 and found.max() > 30 * found.min())

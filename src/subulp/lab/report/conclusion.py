"""What a comparison has found, in one sentence: what was lost, at how many bytes, beside what."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..engine.metrics import Metric
from ..engine.task import task_named
from .group import Group, Variant, spread_of

_MOST = 4


def conclusions(group: Group, metrics: Sequence[Metric]) -> list[str]:
    """A sentence for each run directory.

    Args:
        group: The runs.
        metrics: The task's metrics that any of them has measured; the last one compares.
    """
    if not metrics:
        return ["Nothing has been measured yet."]
    metric = next((m for m in reversed(metrics) if m.versus is not None), metrics[0])
    found = []
    for index in range(len(group.runs)):
        variants = [variant for variant in group.variants if variant.run == index]
        sentence = _of_run(variants, metric, task_named(group.task).COUNTED)
        found.append(f"{group.labels[index]}: {sentence}" if len(group.runs) > 1 else sentence)
    return found


def _of_run(variants: Sequence[Variant], metric: Metric, counted: str) -> str:
    ended = [variant for variant in variants if variant.summaries]
    if not ended:
        return "No conclusion yet: the comparison is not finished."
    name = _lowered(metric.title)
    baseline = next((variant for variant in ended if variant.is_baseline), None)
    others = [variant for variant in ended if variant is not baseline]
    if baseline is None or not others:
        first, *rest = ended[:_MOST]
        values = [f"{_value(first, metric)} under {_called(first, counted)}"]
        values += [f"{_value(variant, metric)} under {_called(variant)}" for variant in rest]
        alone = "nothing to compare with" if len(ended) == 1 else "no baseline (master or fp32)"
        return _sentence(f"{name} is {_joined(values)}; there is {alone}.")
    chosen = sorted(others, key=lambda variant: _loss(variant, metric))
    left = len(chosen) - _MOST
    # The best ones, and the smallest one whatever it lost.
    if left > 0:
        smallest = min(chosen, key=_bytes)
        chosen = chosen[: _MOST - 1] + [v for v in [smallest] if v not in chosen[: _MOST - 1]]
        left = len(others) - len(chosen)
    parts = [f"{_difference(variant, metric)} under {_called(variant)}" for variant in chosen]
    more = f"; the table has {left} more" if left > 0 else ""
    return _sentence(f"beside {_called(baseline, counted)}, {name} is {_joined(parts)}{more}.")


def _lowered(title: str) -> str:
    """A title inside a sentence; an abbreviation stays as it is."""
    return title[:1].lower() + title[1:] if title[1:2].islower() else title


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _called(variant: Variant, counted: str | None = None) -> str:
    """A variant and its bytes; of what they are is said where it is given."""
    size = f"{_bytes(variant):.4g}" + ("" if counted is None else f" bytes a {counted}")
    simulated = ", simulated" if variant.summaries[0].simulated else ""
    return f"{variant.own} ({size}{simulated})"


def _bytes(variant: Variant) -> float:
    return variant.summaries[0].bytes_per_parameter["total"]


def _value(variant: Variant, metric: Metric) -> str:
    spread = variant.spread(metric)
    if spread is None or not math.isfinite(spread.mean):
        return "not finite"
    return metric.style.format(spread.mean) + (" %" if metric.unit == "%" else "")


def _loss(variant: Variant, metric: Metric) -> float:
    """How much worse than the baseline; what is not finite is worst."""
    spread = spread_of(variant.excesses(metric))
    if spread is None or not math.isfinite(spread.mean):
        return math.inf
    return -spread.mean if metric.higher_is_better else spread.mean


def _difference(variant: Variant, metric: Metric) -> str:
    spread = spread_of(variant.excesses(metric))
    if spread is None or not math.isfinite(spread.mean):
        return "not finite"
    unit = "%" if metric.versus == "ratio" else "points" if metric.unit == "%" else metric.unit
    text = f"{abs(spread.mean):.2f}"
    by = "" if spread.deviation is None else f" ± {spread.deviation:.2f}"
    if not float(text):
        return f"the same{by and f' ({by.strip()} {unit})'}"
    return f"{text}{by} {unit} {'higher' if spread.mean > 0 else 'lower'}"


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

"""Measurements of runs: metrics of a task, one record per logged step, one summary per run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """A measure of quality.

    Attributes:
        name: Its key in records, summaries and JSON.
        heading: Heading of its column in the table.
        style: Format of its value there.
        title: What plots call it.
        unit: Unit of its axis.
        factor: Factor from the value to the unit (default: 1).
        versus: How runs are compared with the baseline: by ``"ratio"``, by ``"difference"``, or
            not (default: ``None``).
        drop_of: Measured by comparison, when all runs are there: the drop of the metric of this
            name below the baseline with the same seed, in percent of the baseline's
            (default: ``None``).
        higher_is_better: Otherwise lower is (default: ``False``).
    """

    name: str
    heading: str
    style: str
    title: str
    unit: str
    factor: float = 1.0
    versus: Literal["ratio", "difference"] | None = None
    drop_of: str | None = None
    higher_is_better: bool = False

    def excess(self, value: Any, baseline: Any) -> Any:
        """``value`` above the baseline's, floats or arrays: in percent of it, or in units."""
        if self.versus == "ratio":
            return 100 * (value / baseline - 1)
        return self.factor * (value - baseline)

    def has_excess(self, baseline: float | None) -> bool:
        """Whether something can be compared with a baseline: nothing is in percent of zero."""
        return baseline is not None and (self.versus != "ratio" or baseline != 0.0)

    def excess_of_floats(self, value: float, baseline: float) -> float:
        """:meth:`excess` of numbers, NaN in percent of zero."""
        return float(self.excess(value, baseline)) if self.has_excess(baseline) else math.nan

    def excess_text(self, excess: float) -> str:
        """An excess with two decimals and a sign; what rounds to zero is ``+0.00``."""
        return f"{round(excess, 2) + 0.0:+.2f}" + (" %" if self.versus == "ratio" else "")


@dataclass(frozen=True)
class Record:
    """One logged step of one run; fields that the step did not measure are empty.

    Attributes:
        precision: Strategy of the run.
        seed: Seed of the run.
        step: Step number, from 1.
        loss: Training loss of the step's batch.
        lr: Learning rate of the step.
        seconds: Duration of the step.
        metrics: What the task measures on the validation part after the step.
        effective_descent_quality: Collage, equation 3: the effective update's length in the
            direction of the intended one.
        update_norm: Norm of the intended update.
        effective_update_norm: Norm of the effective one.
        parameter_norm: Norm of the parameters before the step.
        gradient_norm: Norm of all dense gradients of the step; ``None`` where the step is fused
            into the backward pass, which frees them one by one.
        descent_share: ``effective_descent_quality / update_norm``: 1 when nothing is lost.
        lost_arithmetic: Share of the nonzero updates that left their parameter unchanged.
        mix: Mean decision about each operand of the linear layers since the record before with
            one, each the fields of :class:`subulp.diagnostics.OperandMix`.
        variant: Name of the run among those of its seed, where the precision alone does not
            distinguish them.
        rollbacks: Times that the run had gone back to a checkpoint, with smaller steps; ``None``
            before the first.
        skipped_steps: Steps skipped so far because they were not finite; ``None`` before
            the first.
    """

    precision: str
    seed: int
    step: int
    loss: float
    lr: float
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    effective_descent_quality: float | None = None
    update_norm: float | None = None
    effective_update_norm: float | None = None
    parameter_norm: float | None = None
    descent_share: float | None = None
    lost_arithmetic: float | None = None
    mix: list[dict[str, Any]] | None = None
    variant: str | None = None
    rollbacks: int | None = None
    skipped_steps: int | None = None
    gradient_norm: float | None = None

    @property
    def name(self) -> str:
        """Name of the run among those of its seed."""
        return self.variant or self.precision


@dataclass(frozen=True)
class Summary:
    """The result of one run.

    Attributes:
        precision: Strategy of the run.
        seed: Seed of the run.
        metrics: What the task measures on the validation part after the last step.
        train_loss: Mean training loss of the last tenth of the steps, of those that computed it.
        bytes_per_parameter: What the optimizer keeps of one parameter, by tensor, and the total.
        peak_bytes: Live bytes of a training step at the moment of the highest total: weights,
            gradients, states, activations, total.
        category_peak_bytes: The highest live bytes of each of them on its own.
        seconds_per_step: Median over the steps that measured nothing else.
        effective_descent_quality: Mean over the watched steps.
        descent_share: Mean of ``effective_descent_quality / update_norm`` over the watched steps.
        lost_arithmetic: Mean share of lost updates over the watched steps.
        steps: Training steps.
        skipped_steps: Those that were skipped because they were not finite, by
            ``nonfinite="skip"`` or by a scaler of the loss.
        parameters: Number of parameters of the model.
        simulated: The storage is wider than the format that it stands for: memory and time mean
            nothing.
        seconds_per_epoch: Training time of one pass over the training part, without evaluations:
            the mean of the steps that measured nothing else, times the steps of a pass. ``None``
            where there are no such passes.
        variant: Name of the run among those of its seed, where the precision alone does not
            distinguish them.
        settings: Settings of the variant beside the precision.
        rollbacks: Times that the run went back to a checkpoint, with smaller steps, because it was
            not finite.
        ranks: Processes that made its last steps together; ``None`` for one alone. Bytes are those
            of the rank that needed the most.
    """

    precision: str
    seed: int
    metrics: dict[str, float]
    train_loss: float
    bytes_per_parameter: dict[str, float]
    peak_bytes: dict[str, int]
    category_peak_bytes: dict[str, int]
    seconds_per_step: float
    effective_descent_quality: float
    descent_share: float
    lost_arithmetic: float
    steps: int
    skipped_steps: int
    parameters: int
    simulated: bool = False
    seconds_per_epoch: float | None = None
    variant: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    rollbacks: int = 0
    ranks: int | None = None

    @property
    def name(self) -> str:
        """Name of the run among those of its seed."""
        return self.variant or self.precision


@dataclass(frozen=True)
class RunProgress:
    """How far a run is.

    Attributes:
        name: Name of the run among those of its seed.
        seed: Seed of the run.
        step: Steps made.
    """

    name: str
    seed: int
    step: int


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of one quantity over seeds.

    Attributes:
        mean: Arithmetic mean.
        deviation: Sample standard deviation; ``None`` for a single seed.
    """

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value; NaN if one of them is not finite."""
        values = list(values)
        if not all(map(math.isfinite, values)):
            return cls(math.nan, None)
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(math.fsum(values) / len(values), deviation)


def by_name(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The runs of each variant, both in the order given."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary.name, []).append(summary)
    return groups


def baseline_of(names: Iterable[str]) -> str | None:
    """The variant that others are compared with: master weights, else FP32, else the one that all
    others vary, else none.
    """
    names = list(dict.fromkeys(names))
    for name in ("master", "fp32"):
        if name in names:
            return name
    for name in names:
        others = [other for other in names if other != name]
        if others and all(other.startswith(f"{name} ") for other in others):
            return name
    return None


def excess_over_baseline(
    metric: Metric, summary: Summary, summaries: Iterable[Summary]
) -> float | None:
    """:meth:`Metric.excess` over the baseline with the same seed; ``None`` without a baseline."""
    other = _baseline_run(summary, list(summaries))
    if other is None:
        return None
    return metric.excess_of_floats(summary.metrics[metric.name], other.metrics[metric.name])


def with_drops(metrics: Iterable[Metric], summaries: Sequence[Summary]) -> list[Summary]:
    """The runs with every metric that has ``drop_of``; without a baseline it is NaN."""
    metrics = [metric for metric in metrics if metric.drop_of is not None]
    return [
        replace(run, metrics={**run.metrics, **{m.name: _drop(m, run, summaries) for m in metrics}})
        for run in summaries
    ]


def _drop(metric: Metric, summary: Summary, summaries: Sequence[Summary]) -> float:
    baseline = _baseline_run(summary, summaries)
    if baseline is None:
        return math.nan
    assert metric.drop_of is not None
    whole, part = (run.metrics[metric.drop_of] for run in (baseline, summary))
    return 100 * (whole - part) / whole if whole else math.nan


def _baseline_run(summary: Summary, summaries: Sequence[Summary]) -> Summary | None:
    baseline = baseline_of(s.name for s in summaries)
    return next((s for s in summaries if (s.name, s.seed) == (baseline, summary.seed)), None)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text of plain data and of this module's dataclasses; NaN and infinity become null.

    A diverged run has a NaN loss, and strict readers refuse Python's ``NaN``.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Record | Summary):
        return _plain(_flat(asdict(value)))
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Metrics among the other fields, where readers look for them; without what is missing."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if name in ("metrics", "settings"):
            flat.update(value)
        elif value is not None:
            flat[name] = value
    return flat

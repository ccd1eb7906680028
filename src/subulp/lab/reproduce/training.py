"""Parts of experiments that are comparisons of ``subulp train``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...numerics import E4M3
from ..compare import Comparison, compare, resume
from ..engine.config import RunConfig
from ..engine.config_json import plain_fields
from ..engine.metrics import Record, Summary
from ..engine.run_directory import CONFIG
from .claim import Watch
from .found import Curve, Found, Observation

MEASURES: Mapping[str, Callable[[Summary], float]] = {
    "training loss": lambda run: run.train_loss,
    "descent share": lambda run: run.descent_share,
    "effective descent quality": lambda run: run.effective_descent_quality,
    "lost arithmetic": lambda run: run.lost_arithmetic,
    "bytes per parameter": lambda run: run.bytes_per_parameter["total"],
    "peak MiB": lambda run: run.peak_bytes["total"] / 2**20,
    "seconds per step": lambda run: run.seconds_per_step,
}
"""What every run measures beside the metrics of its task."""

_CURVES: Mapping[str, Callable[[Record], float | None]] = {
    "training loss": lambda record: record.loss,
    "effective descent quality": lambda record: record.effective_descent_quality,
    "descent share": lambda record: record.descent_share,
    "lost arithmetic": lambda record: record.lost_arithmetic,
    "parameter norm": lambda record: record.parameter_norm,
    "update norm": lambda record: record.update_norm,
    "gradient norm": lambda record: record.gradient_norm,
    "percent of inputs in E4M3": lambda record: _in_e4m3(record, "input"),
    "percent of weights in E4M3": lambda record: _in_e4m3(record, "weight"),
    "percent of output gradients in E4M3": lambda record: _in_e4m3(record, "output gradient"),
}

LAYERS = "percent of a layer's operands in E4M3"
"""A curve for each layer, whose case is the variant's with the layer's name behind it."""


def _in_e4m3(record: Record, role: str) -> float | None:
    """Of the elements of the operands with a role, used in either direction; all layers alike."""
    shares = [o["elements"].get(E4M3.name, 0.0) for o in record.mix or () if _has(o, role)]
    return 100 * statistics.fmean(shares) if shares else None


def _layers(record: Record) -> dict[str, float]:
    """Of all operands of each layer, by elements."""
    elements: dict[str, float] = {}
    narrow: dict[str, float] = {}
    for operand in record.mix or ():
        layer, count = operand["layer"], operand["count"]
        elements[layer] = elements.get(layer, 0.0) + count
        narrow[layer] = narrow.get(layer, 0.0) + operand["elements"].get(E4M3.name, 0.0) * count
    return {layer: 100 * narrow[layer] / count for layer, count in elements.items()}


def _has(operand: Mapping[str, Any], role: str) -> bool:
    return operand["role"] in (role, f"{role} transposed")


@dataclass(frozen=True)
class Training:
    """One comparison: all its precisions and seeds.

    Attributes:
        name: Its folder in the experiment's.
        config: What is compared.
        case: What every case is called before the variant, if a claim compares several trainings
            (default: nothing).
        curves: Curves that are kept (default: none).
        called: Other names of variants, if a claim's sizes have different ones (default: none).
    """

    name: str
    config: RunConfig
    case: str = ""
    curves: tuple[str, ...] = ()
    called: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> Mapping[str, object]:
        """The task and its options, without those that are what versions without them did."""
        earlier = self.config.earlier
        given = plain_fields(self.config).items()
        return {
            "task": self.config.task,
            **{k: v for k, v in given if (k, v) not in earlier.items()},
        }

    def run(self, folder: Path, watch: Watch) -> Found:
        """Train, or go on, or read what is complete."""
        watch.tell(f"{self.name}: {', '.join(self.config.variants)}")
        if (folder / CONFIG).exists():
            return self.found(resume(folder, jobs=watch.jobs, reporter=watch.reporter))
        done = compare(self.config, out=folder, jobs=watch.jobs, reporter=watch.reporter)
        return self.found(done)

    def found(self, done: Comparison) -> Found:
        """The numbers of a finished comparison."""
        seconds = sum(run.seconds_per_step * run.steps for run in done.summaries)
        observations = [o for run in done.summaries for o in self._observations(run)]
        curves = list(self._curves(done.records))
        observations += [_last(curve) for curve in curves if curve.quantity in _CURVES]
        return Found(tuple(observations), tuple(c.thinned() for c in curves), seconds)

    @property
    def cases(self) -> list[str]:
        """What the variants are called in what it finds."""
        return [self._case(name) for name in self.config.variants]

    def _case(self, name: str) -> str:
        return f"{self.case} {self.called.get(name, name)}".strip()

    def _observations(self, run: Summary) -> Iterable[Observation]:
        measured = {**run.metrics, **{name: of(run) for name, of in MEASURES.items()}}
        for name, value in measured.items():
            yield Observation(self._case(run.name), name.replace("_", " "), value, run.seed)

    def _curves(self, records: Sequence[Record]) -> Iterable[Curve]:
        runs: dict[tuple[str, int], list[Record]] = {}
        for record in records:
            runs.setdefault((record.name, record.seed), []).append(record)
        for (name, seed), own in runs.items():
            if LAYERS in self.curves:
                yield from self._by_layer(self._case(name), own, seed)
            for quantity in self.curves:
                if quantity == LAYERS:
                    continue
                points = [
                    (r.step, value) for r in own if (value := _value(r, quantity)) is not None
                ]
                if points:
                    steps, values = zip(*points, strict=True)
                    yield Curve(self._case(name), quantity, steps, values, seed)

    def _by_layer(self, case: str, records: Sequence[Record], seed: int) -> Iterable[Curve]:
        mixes = [(record.step, found) for record in records if (found := _layers(record))]
        for layer in mixes[0][1] if mixes else ():
            steps, values = zip(*((step, found[layer]) for step, found in mixes), strict=True)
            yield Curve(f"{case} {layer}", LAYERS, steps, values, seed)


def _last(curve: Curve) -> Observation:
    """Where a curve ends; of a metric, the summary says it."""
    return Observation(curve.case, f"last {curve.quantity}", curve.values[-1], curve.seed)


def _value(record: Record, quantity: str) -> float | None:
    found = _CURVES[quantity](record) if quantity in _CURVES else None
    return record.metrics.get(quantity.replace(" ", "_")) if found is None else found

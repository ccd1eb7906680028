"""Mixtures of representations in a run: its layers, and what their training steps decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from ...diagnostics.representation_mix import MeanMix, operand_mix
from ...nn import MoR, convert_to_mor
from ...nn.mor_convert import Filter
from ...nn.mor_linear import MixtureLayer
from ...numerics import E4M3, E5M2
from ...numerics.mixture import ALWAYS_E4M3, ALWAYS_E5M2, DEFAULT_THRESHOLD, Recipe, Summary
from ...ops import look_ahead
from .linear_operands import Variant
from .metrics import Metric

METRICS = (
    Metric("fp8_share", "FP8\n%", "{:.2f}", "Operands in FP8", "%", factor=100),
    Metric("e4m3_share", "E4M3\n%", "{:.2f}", "Operands in E4M3", "%", factor=100),
    Metric("e5m2_share", "E5M2\n%", "{:.2f}", "Operands in E5M2", "%", factor=100),
    Metric("fp8_error", "FP8\nerror %", "{:.2f}", "Mean relative error", "%", factor=100),
)
"""Means over all training steps so far. A tensor counts by the share of its elements, and all
tensors count alike; the error is that of the elements in FP8."""

_GRANULARITIES: dict[str, str | Recipe] = {
    "e4m3": ALWAYS_E4M3,
    "e5m2": ALWAYS_E5M2,
    "mor-tensor": "tensor",
    "mor-2way": "subtensor-2way",
    "mor-3way": "subtensor-3way",
}


def with_mixture_metrics(metrics: Sequence[Metric]) -> tuple[Metric, ...]:
    """A task's metrics with those of mixtures before the last one, which compares runs."""
    return (*metrics[:-1], *METRICS, metrics[-1])


def convert(model: nn.Module, variant: Variant, filter: Filter | None = None) -> MixtureLog | None:
    """Give a model the linear layers of a variant, in place.

    Args:
        model: A module with linear layers.
        variant: What they multiply.
        filter: See :func:`subulp.nn.convert_to_mor` (default: all layers).

    Returns:
        What they decide from now on; ``None`` where they stay as they are.
    """
    if not variant.is_mixture:
        return None
    mor = _represented(variant, variant.linear)
    if variant.gradients is not None:
        own = _represented(variant, variant.gradients)
        mor = replace(mor, roles={"output gradient": own})
    convert_to_mor(model, mor, filter=filter, quiet=True)
    return MixtureLog(model)


def _represented(variant: Variant, name: str) -> MoR:
    threshold = variant.threshold if name == "mor-tensor" else None
    return MoR(
        _GRANULARITIES[name],
        variant.partition or "block-128x128",
        threshold or DEFAULT_THRESHOLD,
    )


class MixtureLog:
    """What the mixtures of a model decide in training steps; evaluations do not count.

    Args:
        model: A module with converted layers, observed from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._all, self._recent = MeanMix(), MeanMix()
        for name, layer in model.named_modules():
            if isinstance(layer, MixtureLayer):
                self._observe(name, layer)

    def _observe(self, name: str, layer: MixtureLayer) -> None:
        def observe(role: str, summary: Summary) -> None:
            # The pass that looks ahead comes again.
            if layer.training and not look_ahead.is_under_way():
                operand = operand_mix(name, role, summary)
                self._all.add(operand)
                self._recent.add(operand)

        layer.observers = (*layer.observers, observe)

    def metrics(self) -> dict[str, float]:
        """The values of :data:`METRICS`."""
        shares, error = self._all.shares, self._all.error
        narrow = [shares.get(fmt.name, 0.0) for fmt in (E4M3, E5M2)]
        names = ("fp8_share", "e4m3_share", "e5m2_share", "fp8_error")
        return dict(zip(names, (sum(narrow), *narrow, error), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """All decisions so far, and those since the last call of :meth:`recent`."""
        return {"all": self._all.state_dict(), "recent": self._recent.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of another log."""
        self._all.load_state_dict(state_dict["all"])
        self._recent.load_state_dict(state_dict["recent"])

    def recent(self) -> list[dict[str, Any]]:
        """The mean decision on each operand since the last call, as plain JSON: the fields of
        :class:`subulp.diagnostics.OperandMix`.
        """
        found = [asdict(operand) for operand in self._recent.operands]
        self._recent = MeanMix()
        return found

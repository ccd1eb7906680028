"""Which representation each operand of a layer's products was in, and how good it was."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from torch import nn

from ..nn.mor_linear import ROLES, MixtureLayer
from ..numerics.mixture import WIDE_FORMATS, Summary
from ..numerics.whole import is_whole

_WIDE = tuple(fmt.name for fmt in WIDE_FORMATS)
OPERAND_ROLES = [name for role in ROLES for name in (role, f"{role} transposed")]


@dataclass(frozen=True)
class OperandMix:
    """One decision about an operand.

    Attributes:
        layer: Name of the layer in the model.
        role: ``"input"``, ``"weight"`` or ``"output gradient"``; with ``" transposed"`` after it
            where the other direction of use was quantised by itself.
        elements: Share of the elements by format name; adds up to 1.
        blocks: Share of the blocks by format name.
        count: Elements.
        error: Mean relative error of what is in FP8; 0 if nothing is.
        first_error: Mean relative error if all were in the recipe's first format.
        amax: Largest magnitude; infinite if not all values are finite.
        dynamic_range: Binades between largest and smallest non-zero magnitude; NaN for zeros.
    """

    layer: str
    role: str
    elements: dict[str, float]
    blocks: dict[str, float]
    count: int
    error: float
    first_error: float
    amax: float
    dynamic_range: float

    @property
    def narrow(self) -> float:
        """Share of the elements that are neither in BF16 nor in FP16."""
        return 1.0 - sum(self.elements.get(name, 0.0) for name in _WIDE)


@dataclass(frozen=True)
class RepresentationMix:
    """Decisions about the operands of a model.

    Attributes:
        operands: One for each layer and role.
    """

    operands: tuple[OperandMix, ...]

    @property
    def tensors(self) -> dict[str, float]:
        """Share of the operands by the format that most of their elements have."""
        most = [max(o.elements, key=o.elements.__getitem__) for o in self.operands]
        return {name: most.count(name) / len(most) for name in self._names}

    @property
    def elements(self) -> dict[str, float]:
        """Share of all elements by format name."""
        whole = sum(o.count for o in self.operands)
        return {
            name: sum(o.elements.get(name, 0.0) * o.count for o in self.operands) / whole
            for name in self._names
        }

    @property
    def narrow(self) -> float:
        """Share of the operands of which most elements are neither in BF16 nor in FP16."""
        return 1.0 - sum(self.tensors.get(name, 0.0) for name in _WIDE)

    @property
    def _names(self) -> list[str]:
        found = dict.fromkeys(name for o in self.operands for name in o.elements)
        wide = [name for name in _WIDE if name in found]
        return [*(name for name in found if name not in _WIDE), *wide]


def representation_mix(model: nn.Module) -> RepresentationMix:
    """The decisions of the last step.

    Args:
        model: A module with converted layers, see :func:`subulp.nn.convert_to_mor`, that have
            computed something.

    Raises:
        ValueError: There is no such layer, or none has computed anything.
    """
    layers = _layers(model)
    found = [
        operand_mix(name, role, layer.mix[role])
        for name, layer in layers.items()
        for role in OPERAND_ROLES
        if role in layer.mix
    ]
    if not found:
        raise ValueError(
            f"none of the {len(layers)} converted layers has decided anything: run the model first"
        )
    return RepresentationMix(tuple(found))


class MixRecord:
    """Decisions while a ``with`` block runs; see :func:`record_mix`.

    Attributes:
        history: One dict a decision: ``step``, counted for each layer and role from 1, and the
            fields of :class:`OperandMix`.
    """

    def __init__(self, layers: dict[str, MixtureLayer], every: int) -> None:
        self._layers, self._every = layers, every
        self._seen: dict[tuple[str, str], int] = {}
        self._observers: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        if self._observers:
            raise RuntimeError("this record is being kept already: leave its block first")
        for name, layer in self._layers.items():
            self._observers[name] = self._observer(name)
            layer.observers = (*layer.observers, self._observers[name])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, layer in self._layers.items():
            mine = self._observers.pop(name)
            layer.observers = tuple(each for each in layer.observers if each is not mine)

    def _observer(self, name: str) -> Any:
        def observe(role: str, summary: Summary) -> None:
            step = self._seen.get((name, role), 0) + 1
            self._seen[name, role] = step
            if (step - 1) % self._every == 0:
                self.history.append({"step": step, **asdict(operand_mix(name, role, summary))})

        return observe


def record_mix(model: nn.Module, every: int = 1) -> MixRecord:
    """Keep every decision while a ``with`` block runs.

    What is recorded is known anyway: it costs a Python dict a decision. A step counts the decisions
    on one layer's one role, so a forward pass that activation checkpointing repeats counts twice.

    Args:
        model: A module with converted layers (:func:`subulp.nn.convert_to_mor`).
        every: Record every so many steps, the first included (default: 1).

    Raises:
        ValueError: ``every`` is no whole number or below 1, or there is no such layer.
        RuntimeError: The block is entered while it is.

    Example::

        with diagnostics.record_mix(model, every=100) as record:
            train()
        record.history[-1]["elements"]
    """
    if not is_whole(every) or every < 1:
        raise ValueError(
            f"every={every!r} is out of range: a whole number of steps, 1 or more, between records"
        )
    return MixRecord(_layers(model), every)


class MeanMix:
    """The mean of many decisions about the operands of a model."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], _Sums] = {}

    def add(self, operand: OperandMix) -> None:
        """Count a decision."""
        self._of.setdefault((operand.layer, operand.role), _Sums()).add(operand)

    def state_dict(self) -> dict[str, Any]:
        """The sums, as plain numbers."""
        return {"of": [[layer, role, dict(vars(s))] for (layer, role), s in self._of.items()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._of = {}
        for layer, role, saved in state_dict["of"]:
            sums = self._of[layer, role] = _Sums()
            for name, value in saved.items():
                setattr(sums, name, Counter(value) if isinstance(value, dict) else value)

    @property
    def operands(self) -> tuple[OperandMix, ...]:
        """One for each layer and role: mean shares and errors, largest magnitude and range."""
        return tuple(sums.mean(*of) for of, sums in self._of.items())

    @property
    def shares(self) -> dict[str, float]:
        """Mean share of an operand's elements by format name; every decision counts alike."""
        whole = sum(sums.decisions for sums in self._of.values())
        added: Counter[str] = Counter()
        for sums in self._of.values():
            added.update(sums.elements)
        return {name: share / whole for name, share in added.items()}

    @property
    def error(self) -> float:
        """Mean relative error of what is in FP8; 0 if nothing is."""
        narrow = sum(sums.narrow for sums in self._of.values())
        return sum(sums.error for sums in self._of.values()) / narrow if narrow else 0.0


class _Sums:
    """Running sums of the decisions about one operand."""

    def __init__(self) -> None:
        self.decisions = self.count = 0
        self.elements: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.narrow = self.error = self.first_error = self.amax = 0.0
        self.dynamic_range = math.nan

    def add(self, o: OperandMix) -> None:
        self.decisions += 1
        self.count = o.count
        self.elements.update(o.elements)
        self.blocks.update(o.blocks)
        self.narrow += o.narrow
        self.error += o.error * o.narrow
        self.first_error += o.first_error
        self.amax = max(self.amax, o.amax)
        # Zeros have no range.
        if not o.dynamic_range <= self.dynamic_range and not math.isnan(o.dynamic_range):
            self.dynamic_range = o.dynamic_range

    def mean(self, layer: str, role: str) -> OperandMix:
        n = self.decisions
        return OperandMix(
            layer,
            role,
            {name: share / n for name, share in self.elements.items()},
            {name: share / n for name, share in self.blocks.items()},
            self.count,
            self.error / self.narrow if self.narrow else 0.0,
            self.first_error / n,
            self.amax,
            self.dynamic_range,
        )


def _layers(model: nn.Module) -> dict[str, MixtureLayer]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, MixtureLayer)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer with a mixture of representations: see "
            "nn.convert_to_mor"
        )
    return found


def operand_mix(layer: str, role: str, summary: Summary) -> OperandMix:
    """A layer's decision as its shares and ranges."""
    elements, blocks = sum(summary.elements), sum(summary.blocks)
    if not math.isfinite(summary.amax):
        span = math.inf
    else:
        span = math.log2(summary.amax / summary.smallest) if summary.amax else math.nan
    return OperandMix(
        layer,
        role,
        {n: e / elements for n, e in zip(summary.names, summary.elements, strict=True)},
        {n: b / blocks for n, b in zip(summary.names, summary.blocks, strict=True)},
        elements,
        summary.error,
        summary.first_error,
        summary.amax,
        span,
    )

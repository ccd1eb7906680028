"""What an experiment finds: numbers by case, quantity and seed, and curves over steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_POINTS = 48
"""Points of a curve in a record: more than a figure shows apart."""


@dataclass(frozen=True)
class Observation:
    """One number.

    Attributes:
        case: What was varied, such as a precision.
        quantity: What was measured, with its unit where it has one.
        value: The number.
        seed: Of the run; ``None`` if chance has no part in it.
    """

    case: str
    quantity: str
    value: float
    seed: int | None = None


@dataclass(frozen=True)
class Curve:
    """Numbers over the steps of a run.

    Attributes:
        case: What was varied.
        quantity: What was measured.
        steps: Where.
        values: The numbers.
        seed: Of the run; ``None`` if chance has no part in it.
    """

    case: str
    quantity: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    seed: int | None = None

    def thinned(self) -> Curve:
        """The same curve with at most :data:`MOST_POINTS` points, the last one among them."""
        every = -(-len(self.steps) // MOST_POINTS)
        kept = range(len(self.steps) - 1, -1, -every)[::-1]
        steps, values = (tuple(of[i] for i in kept) for of in (self.steps, self.values))
        return Curve(self.case, self.quantity, steps, values, self.seed)


@dataclass(frozen=True)
class Found:
    """All that one part of an experiment, or all of it, has found.

    Attributes:
        observations: Numbers.
        curves: Curves.
        seconds: How long its steps took, one after the other, or its measurements.
    """

    observations: tuple[Observation, ...] = ()
    curves: tuple[Curve, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of_all(cls, parts: Iterable[Found]) -> Found:
        """What several parts have found together."""
        parts = list(parts)
        return cls(
            tuple(o for part in parts for o in part.observations),
            tuple(c for part in parts for c in part.curves),
            sum(part.seconds for part in parts),
        )

    def values(self, case: str, quantity: str) -> dict[int | None, float]:
        """The numbers of a case, by seed."""
        return {
            o.seed: o.value for o in self.observations if (o.case, o.quantity) == (case, quantity)
        }


@dataclass(frozen=True)
class Numbers:
    """A quantity of all cases: what a table or a figure shows.

    Attributes:
        quantity: What it is.
        rows: Of each case, the numbers by seed.
    """

    quantity: str
    rows: dict[str, dict[int | None, float]] = field(default_factory=dict)


def numbers(found: Found) -> list[Numbers]:
    """All that was found, quantity by quantity, in the order in which it was found."""
    table: dict[str, Numbers] = {}
    for o in found.observations:
        rows = table.setdefault(o.quantity, Numbers(o.quantity)).rows
        rows.setdefault(o.case, {})[o.seed] = o.value
    return list(table.values())

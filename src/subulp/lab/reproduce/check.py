"""What of a claim can be decided by numbers, and when the numbers are enough to decide it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import t as student

from .found import Found, Observation

LEAST_SEEDS = 3
"""Seeds without which no verdict is given where chance has a part."""

CONFIDENCE = 0.95
"""Of the intervals; each check is looked at alone."""

Role = Literal["claim", "premise", "aside"]

Verdict = Literal["holds", "holds in part", "does not hold", "undecided", "not run"]


@dataclass(frozen=True)
class Check:
    """A number, or two that are compared, and the range in which the claim has it.

    Attributes:
        says: The claim in words.
        quantity: What is compared.
        case: Of which case.
        than: Another case: its number with the same seed is subtracted, or divided by; ``None``
            takes the number itself.
        low: Lower end of the range.
        high: Upper end.
        how: How two cases are compared.
        of: Another quantity for ``than`` (default: the same).
        role: What it decides. ``"claim"``: what the paper says. ``"premise"``: that the experiment
            can tell anything at all; unless it holds, nothing is decided. ``"aside"``: nothing, it
            is a comparison that the paper does not make (default: ``"claim"``).
    """

    says: str
    quantity: str
    case: str
    than: str | None = None
    low: float = -math.inf
    high: float = math.inf
    how: Literal["difference", "ratio"] = "difference"
    of: str | None = None
    role: Role = "claim"

    def on(self, found: Found) -> Outcome:
        """What some numbers say about it."""
        compared = compare(
            found.values(self.case, self.quantity),
            None if self.than is None else found.values(self.than, self.of or self.quantity),
            self.how,
        )
        if not compared:
            return Outcome(self, math.nan, math.nan, math.nan, 0, "undecided")
        mean, low, high = interval(compared, ratio=self.how == "ratio" and self.than is not None)
        chance = None not in found.values(self.case, self.quantity)
        decided = not chance or len(compared) >= LEAST_SEEDS
        return Outcome(self, mean, low, high, len(compared), self._verdict(low, high, decided))

    def published(self, numbers: Iterable[Observation]) -> float | None:
        """The same comparison of the numbers that the paper prints; ``None`` if it lacks one."""
        own = Found(tuple(numbers))
        compared = compare(
            own.values(self.case, self.quantity),
            None if self.than is None else own.values(self.than, self.of or self.quantity),
            self.how,
        )
        return compared[0] if compared else None

    def _verdict(self, low: float, high: float, decided: bool) -> Verdict:
        if not decided or math.isnan(low) or math.isnan(high):
            return "undecided"
        if self.low <= low and high <= self.high:
            return "holds"
        return "does not hold" if high < self.low or low > self.high else "undecided"


@dataclass(frozen=True)
class Outcome:
    """What numbers say about a check.

    Attributes:
        check: The check.
        mean: Of the compared numbers; of ratios, the geometric one.
        low: Lower end of their interval.
        high: Upper end.
        seeds: How many numbers there are.
        verdict: ``"undecided"`` where the interval reaches over an end of the range, or where there
            are too few seeds.
    """

    check: Check
    mean: float
    low: float
    high: float
    seeds: int
    verdict: Verdict


def compare(
    own: dict[int | None, float],
    other: dict[int | None, float] | None,
    how: Literal["difference", "ratio"],
) -> list[float]:
    """Numbers by seed, less those of another case with the same seed, or divided by them."""
    if other is None:
        return list(own.values())
    if how == "difference":
        return [value - other[seed] for seed, value in own.items() if seed in other]
    return [
        value / other[seed] if other[seed] else math.nan
        for seed, value in own.items()
        if seed in other
    ]


def interval(values: Sequence[float], *, ratio: bool = False) -> tuple[float, float, float]:
    """Mean of numbers that were compared seed by seed, and Student's interval around it.

    Args:
        values: The numbers; a single one has no spread.
        ratio: They are ratios: the mean is geometric, and the interval that of their logarithms
            (default: ``False``).

    Returns:
        Mean, and lower and upper end; NaN if a number is not finite.
    """
    if not all(map(math.isfinite, values)) or (ratio and min(values) <= 0):
        return math.nan, math.nan, math.nan
    if ratio:
        mean, low, high = interval([math.log(value) for value in values])
        return math.exp(mean), math.exp(low), math.exp(high)
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return mean, mean - half, mean + half


def verdict_of(outcomes: Sequence[Outcome]) -> Verdict:
    """The verdict on a claim from those on its checks."""
    if any(o.verdict != "holds" for o in outcomes if o.check.role == "premise"):
        return "undecided"
    found = {outcome.verdict for outcome in outcomes if outcome.check.role == "claim"}
    if len(found) == 1:
        return found.pop()
    if not found or "holds" not in found:
        return "undecided" if not found else "does not hold"
    return "holds in part"

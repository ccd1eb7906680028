"""The index, and what was found, on the terminal and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .check import Outcome
from .claim import PAPERS, Claim
from .record import Written


def number_text(value: float, digits: int = 4) -> str:
    """A number with as many digits that count; what was not finite is ``"not finite"``."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{int(value):,}"
    return f"{value:.{digits}g}" if 1e-3 <= size < 1e6 else f"{value:.3e}"


def outcome_text(outcome: Outcome) -> str:
    """Mean, and its interval if there are several seeds."""
    if outcome.seeds == 0:
        return "not measured"
    # Ratios lie around 1, and differ in what follows it.
    is_ratio = outcome.check.than is not None and outcome.check.how == "ratio"
    digits = 5 if is_ratio else 4
    mean = number_text(outcome.mean, digits)
    if outcome.seeds == 1:
        return mean
    return f"{mean} [{number_text(outcome.low, digits)}, {number_text(outcome.high, digits)}]"


def range_text(outcome: Outcome) -> str:
    """The range that the claim gives the number."""
    low, high = outcome.check.low, outcome.check.high
    if low == high:
        return f"= {number_text(low)}"
    if math.isinf(low):
        return f"at most {number_text(high)}"
    if math.isinf(high):
        return f"at least {number_text(low)}"
    return f"{number_text(low)} to {number_text(high)}"


def print_index(console: Console, claims: Iterable[Claim]) -> None:
    """All claims, paper by paper."""
    table = Table("Claim", "Says", "Sizes", box=box.SIMPLE_HEAD)
    last = None
    for claim in claims:
        if claim.paper != last:
            table.add_section()
            table.add_row(Text(PAPERS[claim.paper], "bold"), "", "")
            last = claim.paper
        sizes = (
            ", ".join(claim.experiment.sizes) if claim.experiment else f"not run: {claim.not_run}"
        )
        table.add_row(claim.name, claim.says, sizes)
    console.print(table)


def index_object(claims: Iterable[Claim]) -> dict[str, Any]:
    """All claims as plain JSON."""
    return {
        "claims": [
            {
                "name": claim.name,
                "paper": claim.paper,
                "place": claim.place,
                "says": claim.says,
                "sizes": dict(claim.experiment.sizes) if claim.experiment else {},
                "not_run": claim.not_run,
            }
            for claim in claims
        ]
    }


def print_record(console: Console, claim: Claim, written: Written) -> None:
    """The checks of a claim: the paper's number, ours, and what follows."""
    table = Table(
        *("Check", "Claimed", "Paper", "Here", "Verdict"),
        title=f"{claim.name}: {claim.says}",
        caption=f"{written.experiment}; seeds {seeds_text(written.seeds)}; in brackets 95 % of "
        f"Student's distribution over paired seeds. Verdict: {written.verdict(claim)}",
        box=box.SIMPLE_HEAD,
    )
    for outcome in written.outcomes(claim):
        paper = outcome.check.published(claim.published)
        table.add_row(
            outcome.check.says,
            range_text(outcome),
            "" if paper is None else number_text(paper),
            outcome_text(outcome),
            outcome.verdict,
        )
    console.print(table)


def seeds_text(seeds: Sequence[int]) -> str:
    """Seeds in words."""
    return ", ".join(map(str, seeds)) or "none"

"""Figures of a record: the paper's numbers beside ours, and curves over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from string import ascii_uppercase

import numpy as np

from ..report.dot_chart import DotChart, Row
from ..report.figure import Chart
from ..report.line_chart import Line, LineChart
from ..report.styles import STYLES, line_styles
from .check import interval
from .claim import Claim
from .found import Curve, Found, numbers
from .record import Written
from .table import number_text

MOST_ROWS = 40
"""Cases of a chart; those of a larger grid are shared out over several with the same scales."""


def charts(claim: Claim, written: Written) -> list[Chart]:
    """All figures of a claim."""
    return [*_dots(claim, written.found), *_lines(claim, written.found)]


def _dots(claim: Claim, found: Found) -> list[DotChart]:
    printed = Found(claim.published)
    shown = []
    for table in numbers(found):
        if table.quantity not in _quantities(claim):
            continue
        rows = []
        for case, by_seed in table.rows.items():
            mean, low, high = interval(list(by_seed.values()))
            paper = printed.values(case, table.quantity).get(None)
            rows.append(Row(case, paper, mean, (low, high)))
        shown += _panels(claim.place, table.quantity, rows)
    return shown


def _panels(title: str, quantity: str, rows: list[Row]) -> list[DotChart]:
    """Charts of about as many rows each, in their order."""
    count = math.ceil(len(rows) / MOST_ROWS)
    if count == 1:
        return [DotChart(title, quantity, rows)]
    ends = [round(i * len(rows) / count) for i in range(count + 1)]
    return [
        DotChart(
            f"{title}, part {i + 1} of {count}",
            quantity,
            rows[first:last],
            rows[:first] + rows[last:],
        )
        for i, (first, last) in enumerate(pairwise(ends))
    ]


def _quantities(claim: Claim) -> set[str]:
    """What is compared or printed: a record may hold more."""
    compared = {check.quantity for check in claim.checks}
    return compared | {number.quantity for number in claim.published}


def _lines(claim: Claim, found: Found) -> list[LineChart]:
    charts = []
    for quantity in claim.curves:
        own = [curve for curve in found.curves if curve.quantity == quantity]
        cases = list(dict.fromkeys(curve.case for curve in own))
        if not cases or len(cases) > len(STYLES):
            continue
        common = _common(cases)
        names = [case.removeprefix(common) for case in cases]
        lines = [
            Line(name, key, style, _series(own, case))
            for name, key, style, case in zip(
                names, ascii_uppercase, line_styles(names), cases, strict=False
            )
        ]
        title = f"{claim.place}: {quantity}"
        charts.append(LineChart(title, "", lines, number_text, along=claim.along))
    return charts


def _common(cases: Sequence[str]) -> str:
    """Words that all cases begin with."""
    words = [case.split(" ") for case in cases]
    count = 0
    while all(len(w) > count + 1 for w in words) and len({w[count] for w in words}) == 1:
        count += 1
    return "".join(f"{word} " for word in words[0][:count])


def _series(curves: Sequence[Curve], case: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps that all seeds share, and their values."""
    own = [curve for curve in curves if curve.case == case]
    steps = sorted(set.intersection(*(set(curve.steps) for curve in own)))
    values = [[dict(zip(c.steps, c.values, strict=True))[s] for s in steps] for c in own]
    return np.array(steps), np.array(values, float)

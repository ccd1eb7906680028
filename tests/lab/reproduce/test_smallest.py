"""The smallest size of every experiment runs, and measures what its claims are checked by.

The smallest size of a grid leaves cases out, whose checks have no number then; records are held to
all of them (``test_page.py``). The share of a
drop that is recovered has none where nothing dropped, as after a dozen steps;
``test_cached_tables.py`` holds it against numbers by hand.
"""

import math

import pytest

from subulp.lab import report
from subulp.lab.reproduce.cached_tables.experiments import DROP, PLAIN, RECOVERED
from subulp.lab.reproduce.claim import Options, Watch
from subulp.lab.reproduce.figures import charts
from subulp.lab.reproduce.index import CLAIMS
from subulp.lab.reproduce.pages import read_records, write_report
from subulp.lab.reproduce.run import RECORDS, reproduce

EXPERIMENTS = {}
for each in CLAIMS:
    if each.experiment is not None:
        EXPERIMENTS.setdefault(each.experiment.name, []).append(each)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_checks_have_numbers(name, tmp_path, monkeypatch):
    # The page of each training, with all its figures, takes longer than the training.
    monkeypatch.setattr(report, "write_run_report", lambda folder: None)
    claims = EXPERIMENTS[name]
    for claim in claims:
        written = reproduce(claim, Options("smallest"), tmp_path, Watch(jobs=1))
        outcomes = written.outcomes(claim)
        assert any(outcome.seeds for outcome in outcomes), claim.name
        measured = {o.quantity for o in written.found.observations}
        narrow = [
            o.value
            for o in written.found.observations
            if o.quantity == DROP and o.case.startswith(f"{PLAIN} int")
        ]
        if narrow and max(narrow) <= 0:
            measured.add(RECOVERED)
        for outcome in outcomes:
            check = outcome.check
            assert {check.quantity, check.of or check.quantity} <= measured, check.says
            assert not outcome.seeds or math.isfinite(outcome.mean), check.says
        assert {curve.quantity for curve in written.found.curves} == set(claim.curves), claim.name
        # What the paper prints is looked up by the same words.
        for number in claim.published:
            assert number.quantity in measured, f"{claim.name}: {number}"
        assert all(chart.size for chart in charts(claim, written))
    write_report(tmp_path / RECORDS, claims, tmp_path / "report.html")
    assert all(row.written is not None for row in read_records(tmp_path / RECORDS, claims))

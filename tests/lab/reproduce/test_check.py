"""Intervals against SciPy's paired test, and verdicts at the ends of ranges."""

import math

import pytest
from scipy.stats import ttest_rel

from subulp.lab.reproduce.check import Check, interval, verdict_of
from subulp.lab.reproduce.found import Curve, Found, Observation

OWN, OTHER = (1.02, 0.97, 1.08, 1.01), (1.00, 0.99, 1.02, 0.95)


def found(own=OWN, other=OTHER, seeds=None):
    seeds = range(len(own)) if seeds is None else seeds
    return Found(
        tuple(Observation("a", "q", value, seed) for seed, value in zip(seeds, own, strict=True))
        + tuple(
            Observation("b", "q", value, seed) for seed, value in zip(seeds, other, strict=True)
        )
    )


def test_intervals_are_those_of_the_paired_test():
    outcome = Check("", "q", "a", than="b").on(found())
    expected = ttest_rel(OWN, OTHER).confidence_interval(0.95)
    assert (outcome.low, outcome.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert outcome.seeds == 4


def test_intervals_of_ratios_are_those_of_their_logarithms():
    outcome = Check("", "q", "a", than="b", how="ratio").on(found())
    expected = ttest_rel([math.log(v) for v in OWN], [math.log(v) for v in OTHER])
    ends = expected.confidence_interval(0.95)
    assert math.log(outcome.low) == pytest.approx(ends.low, rel=1e-12)
    assert math.log(outcome.high) == pytest.approx(ends.high, rel=1e-12)


def test_pairs_are_found_by_seed_in_any_order():
    mixed = Found(tuple(reversed(found().observations)))
    check = Check("", "q", "a", than="b")
    assert check.on(mixed).mean == pytest.approx(check.on(found()).mean, rel=1e-12)


def test_seeds_without_a_partner_are_left_out():
    one_more = Found((*found().observations, Observation("a", "q", 99.0, 7)))
    assert Check("", "q", "a", than="b").on(one_more).seeds == 4


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-1.0, 1.0, "holds"),
        (0.5, 1.0, "does not hold"),
        (-1.0, -0.5, "does not hold"),
        (0.03, 1.0, "undecided"),
    ],
)
def test_a_verdict_needs_the_whole_interval(low, high, verdict):
    assert Check("", "q", "a", than="b", low=low, high=high).on(found()).verdict == verdict


def test_two_seeds_decide_nothing():
    check = Check("", "q", "a", than="b", low=-9, high=9)
    assert check.on(found(OWN[:2], OTHER[:2])).verdict == "undecided"
    assert check.on(found(OWN[:3], OTHER[:3])).verdict == "holds"


def test_without_chance_one_number_decides():
    exact = Found((Observation("a", "q", 8.0),))
    assert Check("", "q", "a", low=8, high=8).on(exact).verdict == "holds"
    assert Check("", "q", "a", low=9, high=9).on(exact).verdict == "does not hold"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_that_diverged_decides_nothing(value):
    check = Check("", "q", "a", than="b", high=9.0)
    assert check.on(found((value, *OWN[1:]))).verdict == "undecided"


def test_what_was_not_measured_is_undecided():
    outcome = Check("", "nothing", "a").on(found())
    assert (outcome.verdict, outcome.seeds) == ("undecided", 0)


def test_the_papers_numbers_are_compared_in_the_same_way():
    printed = (Observation("a", "q", 15.18), Observation("b", "q", 15.03))
    assert Check("", "q", "a", than="b", how="ratio").published(printed) == 15.18 / 15.03
    assert Check("", "q", "a", than="b").published(printed[:1]) is None


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "does not hold"], "holds in part"),
        (["holds", "undecided"], "holds in part"),
        (["does not hold", "undecided"], "does not hold"),
        (["undecided"], "undecided"),
        (["does not hold"], "does not hold"),
        ([], "undecided"),
    ],
)
def test_the_verdict_on_a_claim(verdicts, whole):
    check = Check("", "q", "a")
    exact = Found((Observation("a", "q", 8.0),))
    made = []
    for verdict in verdicts:
        outcome = check.on(exact)
        object.__setattr__(outcome, "verdict", verdict)
        made.append(outcome)
    assert verdict_of(made) == whole


@pytest.mark.parametrize(
    ("role", "own", "claim", "whole"),
    [
        ("premise", "holds", "undecided", "undecided"),
        ("premise", "holds", "holds", "holds"),
        ("premise", "undecided", "holds", "undecided"),
        ("premise", "does not hold", "holds", "undecided"),
        ("aside", "does not hold", "holds", "holds"),
        ("aside", "holds", "does not hold", "does not hold"),
    ],
)
def test_checks_of_ours_make_no_claim_hold(role, own, claim, whole):
    exact = Found((Observation("a", "q", 8.0),))
    ranges = {"holds": (8.0, 8.0), "does not hold": (9.0, 9.0), "undecided": (0.0, 0.0)}
    outcomes = []
    for kind, verdict in ((role, own), ("claim", claim)):
        low, high = ranges[verdict]
        case = "missing" if verdict == "undecided" else "a"
        outcomes.append(Check("", "q", case, low=low, high=high, role=kind).on(exact))
    assert verdict_of(outcomes) == whole


def test_a_single_number_is_its_own_interval():
    assert interval([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("points", [1, 47, 48, 49, 1000])
def test_thinned_curves_keep_their_end(points):
    curve = Curve("a", "q", tuple(range(points)), tuple(map(float, range(points))), 0)
    thinned = curve.thinned()
    assert len(thinned.steps) <= 48
    assert thinned.steps[-1] == points - 1
    assert thinned.steps == thinned.values

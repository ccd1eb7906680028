"""Collage's exact measurements: right where the library is, able to tell where it is not."""

import pytest
import torch

from subulp.diagnostics.watch import _Sums as Sums
from subulp.lab.reproduce.collage import (
    algorithms,
    descent_quality,
    fast2sum,
    lost_arithmetic,
    second_moment,
)
from subulp.numerics import expansion as mcf


def value(found, case, quantity):
    (number,) = found.values(case, quantity).values()
    return number


def test_errors_reach_half_an_ulp_and_no_more():
    found = fast2sum.pairs(10)
    for quantity in (fast2sum.INEXACT, fast2sum.WRONG, fast2sum.ABOVE):
        assert value(found, fast2sum.ORDERED, quantity) == 0
    assert value(found, fast2sum.ORDERED, fast2sum.REACHED) > 0
    # Without the order the error is not caught.
    assert value(found, fast2sum.REVERSED, fast2sum.INEXACT) > 0


@pytest.mark.parametrize(
    ("number", "rounded", "unit"),
    [
        # 8 bits: a tie to an even number, one to an even one above, a carry, and none.
        (0b100000001_0, 0b100000000_0, 4),
        (0b100000011_0, 0b100000100_0, 4),
        (0b111111111, 0b1000000000, 4),
        (-0b10000000, -0b10000000, 1),
        (0, 0, 1),
    ],
)
def test_integers_are_rounded_to_a_significand(number, rounded, unit):
    got = fast2sum._rounded(torch.tensor([number]))
    assert [int(t) for t in got] == [rounded, unit]


def test_fast2sum_without_its_last_step_is_found_out(monkeypatch):
    monkeypatch.setattr(mcf, "fast2sum", lambda a, b, fmt: (mcf.add(a, b, fmt), 0 * a))
    found = fast2sum.pairs(4)
    assert value(found, fast2sum.ORDERED, fast2sum.INEXACT) > 0
    assert value(found, fast2sum.ORDERED, fast2sum.WRONG) == 0


def test_where_the_remark_holds():
    found = lost_arithmetic.additions(200)
    for case in (lost_arithmetic.BELOW, lost_arithmetic.INSIDE, lost_arithmetic.EVEN):
        assert value(found, case, lost_arithmetic.CHANGED) == 0
        assert value(found, case, "sums") > 10_000
    for case in (lost_arithmetic.ODD, lost_arithmetic.EDGE_HALF):
        assert value(found, case, lost_arithmetic.CHANGED) == 1
        assert value(found, case, "sums") > 0
    assert 0 < value(found, lost_arithmetic.EDGE, lost_arithmetic.CHANGED) < 1
    assert value(found, "drawn", lost_arithmetic.WRONG) == 0


def test_sums_that_are_cut_are_found_out(monkeypatch):
    def cut(a, b, fmt):
        exact = (a.double() + b.double()).float()
        return (exact.view(torch.int32) & -0x10000).view(torch.float32)

    monkeypatch.setattr(lost_arithmetic.mcf, "add", cut)
    found = lost_arithmetic.additions(200)
    assert value(found, "drawn", lost_arithmetic.WRONG) > 0
    assert value(found, lost_arithmetic.INSIDE, lost_arithmetic.CHANGED) > 0


@pytest.mark.parametrize("strategy", ["nearest", "collage-light", "fp32"])
def test_descent_quality_is_the_papers(strategy):
    found = descent_quality.steps([strategy], 64, 3, [0])
    assert found.values(strategy, descent_quality.ERROR)[0] < 2.0**-48
    assert found.values(strategy, descent_quality.LOST)[0] == 0
    share = found.values(strategy, descent_quality.SHARE)[0]
    assert (abs(share - 1) < 1e-3) == (strategy != "nearest")


def test_another_descent_quality_is_found_out(monkeypatch):
    exact = Sums.add
    monkeypatch.setattr(Sums, "add", lambda own, p, meant, _: exact(own, p, meant, meant))
    found = descent_quality.steps(["nearest"], 64, 3, [0])
    assert found.values("nearest", descent_quality.ERROR)[0] > 1e-3
    assert found.values("nearest", descent_quality.LOST)[0] > 0


def test_decays_that_bf16_does_not_have():
    found = second_moment.decays([0.99, 1 - 2.0**-9 - 1e-9, 1 - 2.0**-9, 0.999])
    rounded = [o.value for o in found.observations if o.quantity == second_moment.ROUNDED]
    assert rounded == [0.98828125, 1 - 2.0**-8, 1.0, 1.0]


def test_a_moment_that_cannot_fall():
    found = second_moment.moments(["collage-light", "collage-plus"], [0.999], 4, 60, [0])
    assert found.values("collage-light, β2 0.999", second_moment.FELL) == {0: 0}
    assert found.values("collage-plus, β2 0.999", second_moment.FELL) == {0: 1}
    assert abs(found.values("collage-plus, β2 0.999", second_moment.BESIDE)[0] - 1) < 0.01


def test_what_grow_adds():
    found = algorithms.grown(200)
    for name in ("BF16", "FP16"):
        for kind in algorithms.ADDENDS:
            assert value(found, f"{kind}, {name}", algorithms.OF_FIRST) < 3
        few = value(found, f"nearly cancelling, {name}", "sums below half of the first component")
        assert few == 200


@pytest.mark.parametrize("kind", ["as large", "of all magnitudes"])
def test_grow_without_the_low_part_is_found_out(kind, monkeypatch):
    monkeypatch.setattr(mcf, "grow", lambda hi, lo, a, fmt: mcf.fast2sum(hi, a, fmt))
    found = algorithms.grown(200)
    assert value(found, f"{kind}, BF16", algorithms.OF_FIRST) > 3

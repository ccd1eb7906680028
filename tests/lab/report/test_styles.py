"""Line styles: a strategy has the same one in every figure."""

import itertools

from subulp.lab.report.styles import line_styles
from subulp.ops.strategy import FIXED


def test_every_strategy_has_a_style_of_its_own():
    alone = {name: line_styles([name])[0] for name in FIXED}
    assert len(set(alone.values())) == len(FIXED)
    for names in itertools.combinations(FIXED, 3):
        assert line_styles(["another", *names])[1:] == [alone[name] for name in names]


def test_other_names_take_styles_that_are_free():
    names = ["master", "extra-bits-8", "int8", "nearest", "int4 lfu 5%"]
    assert len(set(line_styles(names))) == len(names)

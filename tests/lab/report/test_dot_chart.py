import math
import re

import pytest

from subulp.lab.report.dot_chart import DotChart, Row
from subulp.lab.report.figure import save_png, svg


def chart(*rows):
    return DotChart("Table 1", "perplexity", rows)


BOTH = Row("light", 5.99, 6.1, (6.0, 6.2))


@pytest.mark.parametrize(
    "rows",
    [
        (BOTH,),
        (BOTH, Row("no number in the paper", None, 1.0, (1.0, 1.0))),
        (Row("diverged", 3.0, math.nan, (math.nan, math.nan)), BOTH),
        (Row("a name that is much longer than there is room for", None, 0.0, (0.0, 0.0)),),
        (Row("small", 1e-7, 1e-7, None), Row("large", 0.5, 0.5, None)),
        (Row("negative", -1.0, -2.0, (-3.0, -1.0)), Row("zero", 0.0, 0.0, None)),
        (Row("nothing was measured", 3.0, math.nan, None),),
    ],
)
def test_it_is_drawn_and_told(rows, tmp_path):
    shown = chart(*rows)
    drawn = svg(shown, "a-")
    assert drawn == svg(shown, "a-")
    assert "NaN" not in drawn.replace("nan here", "")
    assert all(row.name in shown.description for row in rows)
    save_png([shown], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_bars_are_explained_where_there_are_any():
    assert "95 % intervals" in chart(BOTH).unit
    assert "intervals" not in chart(Row("exact", 8.0, 8.0, (8.0, 8.0))).unit


def test_the_papers_side_is_left_out_where_it_prints_nothing():
    assert ">paper<" not in svg(chart(Row("a", None, 1.0, None)), "a-")
    assert ">paper<" in svg(chart(BOTH), "a-")


def test_charts_of_one_grid_have_the_same_scales(tmp_path):
    rows = [Row("a", None, 1.0, None), Row("b", 2.0, 9.0, None)]
    first, second = (
        DotChart("Table 1", "perplexity", [row], [other]) for row, other in (rows, rows[::-1])
    )
    drawn = [svg(each, "a-") for each in (first, second)]

    def labels(text):
        return re.findall(r">([-.0-9]+)</text>", text)

    assert labels(drawn[0]) == labels(drawn[1])
    assert labels(drawn[0]) != labels(svg(DotChart("Table 1", "perplexity", rows[:1]), "a-"))
    # A side is there if any of the charts has numbers on it.
    assert all(">paper<" in text for text in drawn)
    assert "b:" not in first.description
    save_png([first, second], tmp_path / "chart.png")

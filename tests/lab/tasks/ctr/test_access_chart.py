"""Accesses of tables are drawn with and without caches to mark."""

import numpy as np
import pytest

from subulp.lab.report.figure import save_png
from subulp.lab.tasks.ctr.access_chart import AccessChart


@pytest.mark.parametrize("fractions", [(0.0,), (0.0, 0.05, 0.3)])
def test_accesses_are_drawn(tmp_path, fractions):
    counts = {f"table {i}": np.arange(10 + i) for i in range(6)}
    chart = AccessChart(counts, fractions, 10)
    assert "table 0: " in chart.description
    save_png([chart], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

"""What the figures show is drawn where it belongs; whether it reads well, eyes must tell."""

import numpy as np
import pytest

from subulp.lab.engine.metrics import with_drops
from subulp.lab.tasks.ctr import plots
from subulp.lab.tasks.ctr.task import METRICS
from tests.lab.engine.test_metrics import summary


def runs(precisions=("fp32", "int8", "int4")):
    found = []
    for precision in precisions:
        for seed in (0, 1):
            fp32 = precision == "fp32"
            made = summary(precision, seed)
            made.metrics.update(
                accuracy=0.8, normalised_entropy=0.5, compression=1.0 if fp32 else 0.2
            )
            made.settings.update(
                rounding=None if fp32 else "nearest", cache_fraction=0.0, policy=None, ways=None
            )
            found.append(made)
    return with_drops(METRICS, found)


@pytest.mark.parametrize("precisions", [("fp32", "int8"), ("int8", "int4"), ("fp32",)])
def test_compression_is_drawn_with_and_without_a_baseline(tmp_path, precisions):
    plots.plot_compression(runs(precisions), METRICS[-1], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("fractions", [(0.0,), (0.0, 0.05, 0.3)])
def test_accesses_are_drawn(tmp_path, fractions):
    counts = {f"table {i}": np.arange(10 + i) for i in range(6)}
    plots.plot_accesses(counts, fractions, tmp_path / "a.png", examples=10)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_labels_move_apart():
    places = [0.5, 0.1, 0.51, 0.52, 0.9]
    moved = plots._apart(places, 0.05)
    assert np.diff(sorted(moved)).min() >= 0.05 - 1e-6
    assert np.argsort(moved).tolist() == np.argsort(places).tolist()
    assert (moved[1], moved[4]) == (0.1, 0.9)

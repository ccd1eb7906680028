"""Counts of a stream are those of all its numbers, however they come in."""

import numpy as np
import pytest

from subulp.lab.data import counts as module
from subulp.lab.data.counts import Counts


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_counts_merge(monkeypatch, dtype):
    monkeypatch.setattr(module, "_PENDING", 10)
    generator = np.random.default_rng(0)
    counts, seen = Counts(dtype), []
    for _ in range(20):
        seen.append(generator.integers(0, 50, 30).astype(dtype))
        counts.add(seen[-1])
    values, numbers = np.unique(np.concatenate(seen), return_counts=True)
    found = counts.most_frequent(100, 12)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values[numbers >= 12])
    best = sorted(zip(-numbers, values, strict=True))[:5]
    np.testing.assert_array_equal(counts.most_frequent(5), sorted(v for _, v in best))


def test_nothing_is_counted():
    assert Counts(np.uint32).most_frequent(5).tolist() == []

"""Measures against their definitions written as loops, by hand, and against scikit-learn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from subulp.lab.tasks.xmc.metrics import (
    BANDS,
    KS,
    MISSING,
    PROPENSITIES,
    Bands,
    RankingMetrics,
    inverse_propensities,
    remove_pairs,
)
from subulp.lab.tasks.xmc.readers.load import load_bundled

COUNTS = np.array([40, 20, 9, 9, 4, 2, 2, 1, 0])
LABELS = len(COUNTS)
TRAINED = 60


def mean(values):
    return sum(values) / len(values)


def precision(top, truth, k, gain):
    return sum(gain[label] for label in top[:k] if label in truth) / k


def ndcg(top, truth, k, gain):
    summed = sum(gain[y] / math.log2(r + 1) for r, y in enumerate(top[:k], 1) if y in truth)
    ideal = sum(1 / math.log2(r + 1) for r in range(1, min(k, len(truth)) + 1))
    return summed / ideal if truth else 0


def naive(tops, truths, ks, propensity):
    """The definitions, one instance and one label at a time."""
    c = (math.log(TRAINED) - 1) * (propensity.b + 1) ** propensity.a
    weight = [1 + c * (n + propensity.b) ** -propensity.a for n in COUNTS.tolist()]
    one = [1.0] * LABELS
    bests = [sorted(truth, key=lambda label: -weight[label]) for truth in truths]
    result = {}
    for k in ks:
        for name, measure in (("P", precision), ("nDCG", ndcg)):
            result[f"{name}@{k}"] = mean(
                [measure(t, y, k, one) for t, y in zip(tops, truths, strict=True)]
            )
            scored, most = (
                sum(measure(t, y, k, weight) for t, y in zip(ranked, truths, strict=True))
                for ranked in (tops, bests)
            )
            result[f"PS{name}@{k}"] = scored / most if most else 0
        result[f"R@{k}"] = mean(
            [len(set(t[:k]) & y) / len(y) if y else 0 for t, y in zip(tops, truths, strict=True)]
        )
        found = set().union(*[set(t[:k]) & y for t, y in zip(tops, truths, strict=True)])
        result[f"C@{k}"] = len(found) / max(len(set().union(*truths)), 1)
        for number, band in enumerate(BANDS):
            inside = [float(b == number) for b in Bands.split(COUNTS).of_label]
            result[f"P@{k} {band}"] = mean(
                [precision(t, y, k, inside) for t, y in zip(tops, truths, strict=True)]
            )
    return {name: 100 * value for name, value in result.items()}


def pairs(truths):
    found = [(row, label) for row, truth in enumerate(truths) for label in sorted(truth)]
    return np.array(found, np.int64).reshape(-1, 2).T


def padded(tops, width=LABELS):
    return np.array([[*top, *[MISSING] * (width - len(top))] for top in tops], np.int64)


def measured(tops, truths, ks=KS, propensity=PROPENSITIES["default"], batch=None):
    metrics = RankingMetrics(COUNTS, TRAINED, propensity, ks)
    for start in range(0, len(tops), batch or len(tops)):
        part = slice(start, start + (batch or len(tops)))
        metrics.update(padded(tops[part]), *pairs(truths[part]))
    return metrics.result()


rankings = st.permutations(range(LABELS)).flatmap(
    lambda order: st.integers(0, LABELS).map(lambda n: order[:n])
)
cases = st.lists(
    st.tuples(rankings, st.sets(st.integers(0, LABELS - 1), max_size=LABELS)),
    min_size=1,
    max_size=6,
)


@given(cases, st.sampled_from([(1, 3, 5), (2,), (7, 1)]), st.sampled_from(list(PROPENSITIES)))
def test_every_measure_is_its_definition(case, ks, name):
    tops, truths = zip(*case, strict=True)
    expected = naive(tops, truths, ks, PROPENSITIES[name])
    found = measured(tops, truths, ks, PROPENSITIES[name])
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    for batch in (1, 2):
        batched = measured(tops, truths, ks, PROPENSITIES[name], batch)
        assert batched == pytest.approx(found, rel=1e-12, abs=1e-12)


def test_by_hand():
    found = measured([[0, 7, 1], [5, 4, 3]], [{0, 1, 2}, {4}])
    # Hits at places 1 and 3, and at place 2.
    assert found["P@1"] == pytest.approx(100 / 2)
    assert found["P@3"] == pytest.approx(100 * (2 / 3 + 1 / 3) / 2)
    assert found["P@5"] == pytest.approx(100 * (2 / 5 + 1 / 5) / 2)
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert found["nDCG@3"] == pytest.approx(100 * ((1 + 1 / 2) / ideal + 1 / math.log2(3)) / 2)
    assert found["R@3"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert found["C@1"] == pytest.approx(100 / 4)
    assert found["C@3"] == pytest.approx(100 * 3 / 4)
    weight = inverse_propensities(COUNTS, TRAINED)
    assert found["PSP@1"] == pytest.approx(100 * weight[0] / (weight[2] + weight[4]))
    assert found["PSP@3"] == pytest.approx(
        100 * (weight[0] + weight[1] + weight[4]) / weight[[0, 1, 2, 4]].sum()
    )


def test_propensities_by_hand():
    # Jain et al. (2016): p = 1 / (1 + C exp(-A log(count + B))), C = (log N - 1) (B + 1)**A.
    c = (math.log(1000) - 1) * 2.5**0.55
    expected = [1 + c * math.exp(-0.55 * math.log(n + 1.5)) for n in (0, 7)]
    assert inverse_propensities(np.array([0, 7]), 1000) == pytest.approx(expected)
    assert PROPENSITIES == {"default": (0.55, 1.5), "wikipedia": (0.5, 0.4), "amazon": (0.6, 2.6)}


@pytest.mark.parametrize("k", KS)
def test_ndcg_is_that_of_scikit_learn(k):
    generator = np.random.default_rng(k)
    scores = generator.random((50, 30))
    truth = generator.random((50, 30)) < 0.1
    metrics = RankingMetrics(np.ones(30, np.int64), 50)
    metrics.update(np.argsort(-scores, 1), *np.nonzero(truth))
    assert metrics.result()[f"nDCG@{k}"] == pytest.approx(100 * ndcg_score(truth, scores, k=k))


def test_a_perfect_ranking_of_weighted_labels_has_100_percent():
    truths = [{0, 5}, {7, 3, 1}]
    tops = [[5, 0, 8], [7, 3, 1]]
    found = measured(tops, truths, (1, 2, 3))
    for k in (1, 2, 3):
        assert found[f"PSP@{k}"] == found[f"PSnDCG@{k}"] == pytest.approx(100)
    assert found["R@3"] == found["C@3"] == pytest.approx(100)


def test_the_most_frequent_labels_of_the_bundled_data():
    # From the data set's own README.
    data = load_bundled()
    metrics = RankingMetrics(data.label_counts, len(data.train))
    top = np.argsort(-data.label_counts, kind="stable")[:5]
    for start in range(0, len(data.test), 1000):
        batch = range(start, min(start + 1000, len(data.test)))
        metrics.update(np.tile(top, (len(batch), 1)), *data.test.pairs(batch))
    found = metrics.result()
    expected = {"P@1": 8.70, "P@3": 5.51, "P@5": 4.51, "PSP@1": 2.21, "PSP@3": 2.01, "PSP@5": 2.36}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=0.005)


def test_bands_hold_thirds_of_the_pairs_and_never_part_equal_counts():
    bands = Bands.split(COUNTS)
    assert bands.of_label.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert (bands.head_from, bands.tail_below) == (40, 20)
    equal = Bands.split(np.array([3, 3, 3]))
    assert equal.of_label.tolist() == [0, 0, 0]
    data = load_bundled()
    bands = Bands.split(data.label_counts)
    shares = np.bincount(bands.of_label, data.label_counts) / data.label_counts.sum()
    assert shares == pytest.approx([1 / 3] * 3, abs=0.02)
    order = np.random.default_rng(0).permutation(len(data.label_counts))
    assert np.array_equal(Bands.split(data.label_counts[order]).of_label, bands.of_label[order])


def test_contributions_of_the_bands_add_up():
    found = measured([[0, 1, 4, 2]], [{0, 1, 2, 4}])
    for k in KS:
        assert sum(found[f"P@{k} {band}"] for band in BANDS) == pytest.approx(found[f"P@{k}"])


def test_pairs_in_any_order_and_repeated():
    metrics = RankingMetrics(COUNTS, TRAINED)
    metrics.update(padded([[0, 1], [2]]), np.array([1, 0, 1, 0]), np.array([2, 1, 2, 0]))
    assert metrics.result() == measured([[0, 1], [2]], [{0, 1}, {2}])


def test_removed_pairs_let_others_move_up():
    top = np.array([[4, 2, 7, 1], [0, 1, 2, MISSING], [3, 5, 6, 8]])
    rows, cols = np.array([0, 0, 1, 1, 2]), np.array([7, 4, 0, 8, 4])
    assert remove_pairs(top, rows, cols, LABELS).tolist() == [
        [2, 1, MISSING, MISSING],
        [1, 2, MISSING, MISSING],
        [3, 5, 6, 8],
    ]
    nothing = np.zeros(0, np.int64)
    assert np.array_equal(remove_pairs(top, nothing, nothing, LABELS), top)


WRONG = [
    ([[0, 1]], [0], [0], r"top has the shape \(1, 2\): expected \(batch, at least 5\), filled"),
    ([[0, 1, 2, 3, 9]], [0], [0], r"top is out of range: expected -1 to 8"),
    ([[0, 1, 2, 3, 4]], [1], [0], r"rows is out of range: expected 0 to 0"),
    ([[0, 1, 2, 3, 4]], [0], [9], r"cols is out of range: expected 0 to 8"),
    ([[0, 1, 2, 3, 4]], [0], [-1], r"cols is out of range"),
    ([[0, 1, 2, 3, 4]], [0, 0], [1], r"rows and cols have the shapes \(2,\) and \(1,\)"),
]


@pytest.mark.parametrize(("top", "rows", "cols", "message"), WRONG)
def test_a_wrong_batch_changes_nothing(top, rows, cols, message):
    metrics = RankingMetrics(COUNTS, TRAINED)
    with pytest.raises(ValueError, match=message):
        metrics.update(np.array(top), np.array(rows), np.array(cols))
    with pytest.raises(ValueError, match="no instance was evaluated"):
        metrics.result()


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"ks=\(0, 1\) is wrong: give lengths of at least 1"):
        RankingMetrics(COUNTS, TRAINED, ks=(0, 1))
    with pytest.raises(ValueError, match=r"instances=2 is too few for propensities"):
        RankingMetrics(COUNTS, 2)

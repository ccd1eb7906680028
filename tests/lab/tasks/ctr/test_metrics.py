"""AUC, accuracy, log loss and normalised entropy, against scikit-learn and by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from subulp.lab.tasks.ctr import metrics

# Few different scores: ties abound.
pairs = st.lists(
    st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 3.0, 40.0]), st.integers(0, 1)), min_size=2
).filter(lambda found: len({label for _, label in found}) == 2)


@given(pairs)
def test_scikit_learn_says_the_same(found):
    scores, labels = (np.array(column) for column in zip(*found, strict=True))
    measured = metrics.click_metrics(scores, labels, 0.3)
    probabilities = 1 / (1 + np.exp(-scores))
    assert measured["AUC"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert measured["accuracy"] == accuracy_score(labels, scores > 0)
    if scores.max() < 40:
        assert measured["log_loss"] == pytest.approx(log_loss(labels, probabilities), rel=1e-9)
    background = -(0.3 * math.log(0.3) + 0.7 * math.log(0.7))
    assert measured["normalised_entropy"] == pytest.approx(measured["log_loss"] / background)


def test_auc_on_a_large_sample():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 20_000).astype(np.float32)
    scores = (generator.standard_normal(20_000) + labels).astype(np.float32).round(2)
    assert metrics.auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-14)


def test_what_auc_cannot_tell_is_nan():
    assert math.isnan(metrics.auc(np.array([1.0, 2.0]), np.array([1, 1])))
    assert math.isnan(metrics.auc(np.array([np.nan, 2.0]), np.array([1, 0])))
    assert math.isnan(metrics.click_metrics(np.array([np.nan, 2.0]), np.array([1, 0]), 0.5)["AUC"])


def test_large_logits_do_not_overflow():
    logits, labels = np.array([-800.0, 800.0], np.float32), np.array([0.0, 0.0], np.float32)
    assert metrics.log_loss(logits, labels) == 400.0


def test_who_knows_the_base_rate_has_normalised_entropy_one():
    labels = np.array([1.0, 0.0, 0.0, 0.0])
    logits = np.full(4, math.log(1 / 3))
    assert metrics.click_metrics(logits, labels, 0.25)["normalised_entropy"] == pytest.approx(1)

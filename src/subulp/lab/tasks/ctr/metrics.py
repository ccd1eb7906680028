"""Measures of predicted click probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def auc(scores: Array, labels: Array) -> float:
    """Area under the receiver operating characteristic, exact: ties count one half.

    The probability that an example labelled 1 scores higher than one labelled 0, from the ranks of
    the scores (Mann and Whitney's statistic).

    Args:
        scores: ``(count,)``, any increasing function of the probability.
        labels: ``(count,)``, 0 or 1.

    Returns:
        The area; NaN if all labels are equal or a score is NaN.
    """
    positive = int(np.count_nonzero(labels))
    negative = len(labels) - positive
    if not positive or not negative or np.isnan(scores).any():
        return math.nan
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores share the mean of the ranks, from 1, that they take together. Twice it is whole,
    # so the sum is exact.
    last = np.cumsum(count)
    twice_rank = 2 * last - count + 1
    twice_sum = int(twice_rank[place][np.asarray(labels) != 0].sum())
    return (twice_sum - positive * (positive + 1)) / (2 * positive * negative)


def log_loss(logits: Array, labels: Array) -> float:
    """Mean binary cross-entropy in nats, of logits ``(count,)`` and labels 0 or 1."""
    x = np.asarray(logits, np.float64)
    # log(1 + exp(x)) - x * label, without overflow.
    return float((np.maximum(x, 0) - x * labels + np.log1p(np.exp(-np.abs(x)))).mean())


def entropy(share: float) -> float:
    """Entropy in nats of a label that is 1 with probability ``share``, strictly between 0 and 1."""
    return -(share * math.log(share) + (1 - share) * math.log1p(-share))


def click_metrics(logits: Array, labels: Array, base_rate: float) -> dict[str, float]:
    """AUC, accuracy at one half, log loss, and normalised entropy.

    Normalised entropy is the log loss over the entropy of the base rate: below 1 for whoever knows
    more than it (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014).

    Args:
        logits: ``(count,)``.
        labels: ``(count,)``, 0 or 1.
        base_rate: Share of the training part's labels that are 1.
    """
    loss = log_loss(logits, labels)
    known = bool(np.isfinite(logits).all())
    return {
        "log_loss": loss,
        "AUC": auc(logits, labels),
        "accuracy": float(((logits > 0) == (labels != 0)).mean()) if known else math.nan,
        "normalised_entropy": loss / entropy(base_rate),
    }

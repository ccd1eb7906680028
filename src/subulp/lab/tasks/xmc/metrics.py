"""Quality of ranked labels, as the Extreme Classification Repository measures it.

``y`` is 1 for the labels of an instance, ``p`` a label's propensity, ``r = 1, 2, ...`` a place in
the ranking, ``n`` the number of the instance's labels; means are over all instances.

- ``P@k``: mean of ``sum(y[r], r <= k) / k``.
- ``nDCG@k``: mean of ``sum(y[r] / log2(r + 1), r <= k) / sum(1 / log2(r + 1), r <= min(k, n))``.
- ``PSP@k``: ``P@k`` with ``y / p`` for ``y``, divided by the same for the best ranking.
- ``PSnDCG@k``: ``nDCG@k`` with ``y / p`` for ``y``, divided by the same for the best ranking.
- ``R@k``: mean of ``sum(y[r], r <= k) / n``.
- ``C@k``, coverage: labels found at least once among the first ``k``, of those that some instance
  has.

``PSP@k`` and ``PSnDCG@k`` are quotients of two means (not means of quotients), so that a perfect
ranking has 1. An instance without labels counts as 0 in every mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...data.lines import Int64s

Float64s = NDArray[np.float64]

MISSING = -1
"""Stands in a ranking where no label is left."""

KS = (1, 3, 5)
BANDS = ("head", "torso", "tail")


class Propensity(NamedTuple):
    """The two constants of Jain et al. (2016), which depend on how a data set was labelled."""

    a: float = 0.55
    b: float = 1.5


PROPENSITIES = {
    "default": Propensity(),
    "wikipedia": Propensity(0.5, 0.4),
    "amazon": Propensity(0.6, 2.6),
}


def inverse_propensities(
    label_counts: Int64s, instances: int, propensity: Propensity = PROPENSITIES["default"]
) -> Float64s:
    """``1 / p = 1 + C (count + B)**-A`` with ``C = (log(instances) - 1) (B + 1)**A``.

    Args:
        label_counts: Training instances of each label, ``(labels,)``.
        instances: Training instances; at least 3, because fewer make ``C`` negative.
        propensity: A and B (default: 0.55 and 1.5).

    Raises:
        ValueError: There are fewer than 3 instances.
    """
    if instances < 3:
        raise ValueError(f"instances={instances} is too few for propensities: give at least 3")
    a, b = propensity
    c = (np.log(instances) - 1) * (b + 1) ** a
    weights: Float64s = 1 + c * (label_counts + b) ** -a
    return weights


@dataclass(frozen=True, eq=False)
class Bands:
    """Labels by how often they were seen in training.

    Head, torso and tail hold about a third of all training pairs each, from the most frequent
    label down. Labels of one count are in one band, so nothing depends on their order.

    Attributes:
        of_label: 0, 1 or 2 for each label, int64 ``(labels,)``: its place in ``BANDS``.
        head_from: The lowest count of a head label.
        tail_below: Below this count a label is in the tail.
    """

    of_label: Int64s
    head_from: int
    tail_below: int

    @classmethod
    def split(cls, label_counts: Int64s) -> Bands:
        """The bands of labels with these training counts."""
        counts = np.sort(label_counts)[::-1]
        seen = np.cumsum(counts)
        thirds = np.searchsorted(3 * seen, [seen[-1], 2 * seen[-1]])
        head_from, torso_from = (int(count) for count in counts[thirds])
        of_label = (label_counts < head_from).astype(np.int64) + (label_counts < torso_from)
        return cls(of_label, head_from, torso_from)


class RankingMetrics:
    """Sums over batches what the measures are made of.

    Args:
        label_counts: Training instances of each label, int64 ``(labels,)``.
        instances: Training instances.
        propensity: A and B (default: 0.55 and 1.5).
        ks: Lengths of rankings to measure (default: 1, 3, 5).

    Raises:
        ValueError: ``ks`` is empty or not positive, or there are fewer than 3 instances.
    """

    def __init__(
        self,
        label_counts: Int64s,
        instances: int,
        propensity: Propensity = PROPENSITIES["default"],
        ks: Sequence[int] = KS,
    ) -> None:
        if not ks or min(ks) < 1:
            raise ValueError(f"ks={tuple(ks)} is wrong: give lengths of at least 1")
        self.ks = tuple(ks)
        self.longest = max(ks)
        self.instances = 0
        self.bands = Bands.split(label_counts)
        self._weights = inverse_propensities(label_counts, instances, propensity)
        self._discounts = 1 / np.log2(np.arange(self.longest) + 2)
        # By place r: the sums of the hits, and of those of the best ranking.
        self._hits = np.zeros((len(BANDS), self.longest))
        self._weighted, self._best_weighted = np.zeros((2, self.longest))
        # By length k: already divided by each instance's own normaliser.
        self._gain, self._weighted_gain, self._best_gain = np.zeros((3, self.longest))
        self._recall = np.zeros(self.longest)
        # The place at which a label was first found, from 0; the longest ranking if never.
        self._found_at = np.full(len(label_counts), self.longest)
        self._has_instance = np.zeros(len(label_counts), np.bool_)

    def update(self, top: Int64s, rows: Int64s, cols: Int64s) -> None:
        """Add a batch.

        Args:
            top: Labels in the order of their scores, best first, without repeats, int64
                ``(batch, at least max(ks))``; ``MISSING`` where there are fewer.
            rows: Instance of each true pair, from 0 in this batch, ``(pairs,)``.
            cols: Its label, ``(pairs,)``; pairs in any order, repeats count once.

        Raises:
            ValueError: A shape is wrong, or a label or an instance is out of range.
        """
        top = self._checked(top, rows, cols)
        truth = np.unique(rows * len(self._weights) + cols)
        rows, cols = np.divmod(truth, len(self._weights))
        hit = self._is_hit(top, truth)
        totals = np.bincount(rows, minlength=len(top))
        self.instances += len(top)
        self._add_hits(top, hit, totals)
        self._add_weighted(top, hit, rows, cols, totals)
        self._has_instance[cols] = True

    def result(self) -> dict[str, float]:
        """Every measure under its name, in percent.

        Besides those of the table above, ``P@k head``, ``P@k torso`` and ``P@k tail``: what labels
        of that band contribute to ``P@k``; the three add up to it.

        Raises:
            ValueError: There was no instance.
        """
        if not self.instances:
            raise ValueError("no instance was evaluated: call update() first")
        measures: dict[str, Float64s] = {
            "P": self._precision(self._hits.sum(0)),
            "nDCG": self._gain / self.instances,
            "PSP": _quotient(np.cumsum(self._weighted), np.cumsum(self._best_weighted)),
            "PSnDCG": _quotient(self._weighted_gain, self._best_gain),
            "R": self._recall / self.instances,
            "C": self._coverage(),
        }
        result = {f"{name}@{k}": at[k - 1] for name, at in measures.items() for k in self.ks}
        for band, hits in zip(BANDS, self._hits, strict=True):
            at = self._precision(hits)
            result |= {f"P@{k} {band}": at[k - 1] for k in self.ks}
        return {name: 100 * float(value) for name, value in result.items()}

    def _checked(self, top: Int64s, rows: Int64s, cols: Int64s) -> Int64s:
        labels = len(self._weights)
        if top.ndim != 2 or top.shape[1] < self.longest:
            raise ValueError(
                f"top has the shape {top.shape}: expected (batch, at least {self.longest}), filled "
                f"up with {MISSING}"
            )
        if rows.shape != cols.shape or rows.ndim != 1:
            raise ValueError(f"rows and cols have the shapes {rows.shape} and {cols.shape}")
        for name, values, low, high in (
            ("top", top, MISSING, labels),
            ("rows", rows, 0, len(top)),
            ("cols", cols, 0, labels),
        ):
            if values.size and not low <= values.min() <= values.max() < high:
                raise ValueError(f"{name} is out of range: expected {low} to {high - 1}")
        return top[:, : self.longest]

    def _is_hit(self, top: Int64s, truth: Int64s) -> NDArray[np.bool_]:
        keys = np.arange(len(top))[:, None] * len(self._weights) + top
        # A missing label's key is that of the row before.
        hit: NDArray[np.bool_] = np.isin(keys, truth) & (top != MISSING)
        return hit

    def _add_hits(self, top: Int64s, hit: NDArray[np.bool_], totals: Int64s) -> None:
        places = np.broadcast_to(np.arange(self.longest), top.shape)[hit]
        found = top[hit]
        np.add.at(self._hits, (self.bands.of_label[found], places), 1)
        np.minimum.at(self._found_at, found, places)
        self._recall += (np.cumsum(hit, 1) / np.maximum(totals, 1)[:, None]).sum(0)
        self._gain += self._normalised(hit * self._discounts, totals)

    def _add_weighted(
        self, top: Int64s, hit: NDArray[np.bool_], rows: Int64s, cols: Int64s, totals: Int64s
    ) -> None:
        weighted = np.where(hit, self._weights[top], 0)
        best = self._best(rows, cols, totals)
        self._weighted += weighted.sum(0)
        self._best_weighted += best.sum(0)
        self._weighted_gain += self._normalised(weighted * self._discounts, totals)
        self._best_gain += self._normalised(best * self._discounts, totals)

    def _best(self, rows: Int64s, cols: Int64s, totals: Int64s) -> Float64s:
        """Weights of each instance's labels, the largest first, ``(batch, longest)``."""
        weights = self._weights[cols]
        order = np.lexsort((-weights, rows))
        before = np.cumsum(totals) - totals
        places = np.arange(len(rows)) - before[rows]
        ranked = places < self.longest
        best = np.zeros((len(totals), self.longest))
        best[rows[ranked], places[ranked]] = weights[order][ranked]
        return best

    def _normalised(self, gains: Float64s, totals: Int64s) -> Float64s:
        """Gains up to each place, by the most that the number of labels allows; summed."""
        most = np.cumsum(self._discounts)
        places = np.arange(self.longest)
        limit = np.minimum(places, np.maximum(totals, 1)[:, None] - 1)
        summed: Float64s = (np.cumsum(gains, 1) / most[limit]).sum(0)
        return summed

    def _precision(self, hits: Float64s) -> Float64s:
        precision: Float64s = np.cumsum(hits) / np.arange(1, self.longest + 1) / self.instances
        return precision

    def _coverage(self) -> Float64s:
        found = np.bincount(self._found_at, minlength=self.longest + 1)[: self.longest]
        return _quotient(np.cumsum(found), np.full(self.longest, self._has_instance.sum()))


def remove_pairs(top: Int64s, rows: Int64s, cols: Int64s, num_labels: int) -> Int64s:
    """Take pairs out of rankings; what follows moves up, and ``MISSING`` fills the end.

    To measure ``k`` labels, rank ``k`` and as many more as one instance has pairs.

    Args:
        top: As in :meth:`RankingMetrics.update`.
        rows: Instance of each pair, from 0 in this batch, ``(pairs,)``.
        cols: Its label, ``(pairs,)``.
        num_labels: What every label is below.

    Returns:
        A ranking of the same shape.
    """
    keys = np.arange(len(top))[:, None] * num_labels + top
    gone = np.isin(keys, rows * num_labels + cols) | (top == MISSING)
    order = np.argsort(gone, axis=1, kind="stable")
    kept = np.where(gone, MISSING, top)
    return np.take_along_axis(kept, order, axis=1)


def _quotient(value: NDArray[np.number], most: NDArray[np.number]) -> Float64s:
    """0 where there was nothing to find."""
    quotient: Float64s = np.divide(value, most, out=np.zeros(len(value)), where=most != 0)
    return quotient

"""The highest of a stream of scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.head import finds_positives, score_keys


class TopK:
    """The k highest scores of each instance among all that were added.

    The result does not depend on how the labels are split into parts: of equal scores, that of the
    lower label comes first.

    Args:
        batch: Number of instances.
        k: Number of scores to keep.
        device: Device of the scores.

    Attributes:
        scores: FP32 ``(batch, k)``, descending.
        labels: int64 ``(batch, k)``.
    """

    def __init__(self, batch: int, k: int, device: torch.device) -> None:
        self._k = k
        self.scores = torch.full((batch, k), -math.inf, dtype=torch.float32, device=device)
        last = torch.iinfo(torch.int64).max
        self.labels = torch.full((batch, k), last, dtype=torch.int64, device=device)

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Add the scores ``(batch, count)`` of ascending ``labels`` ``(count,)``."""
        if finds_positives(scores.device):
            index = score_keys(scores).topk(min(self._k, scores.shape[1]), dim=1).indices
            self.merge(scores.gather(1, index), labels[index])
            return
        # topk chooses among equal scores only where more than k are at least the k-th.
        best, index = scores.topk(min(self._k, scores.shape[1]), dim=1)
        crowded = (scores >= best[:, -1:]).sum(1) > best.shape[1]
        if bool(crowded.any()):
            order = scores[crowded].sort(dim=1, descending=True, stable=True)
            best[crowded] = order.values[:, : best.shape[1]]
            index[crowded] = order.indices[:, : best.shape[1]]
        self.merge(best, labels[index])

    def merge(self, scores: Tensor, labels: Tensor) -> None:
        """Add scores ``(batch, count)`` of ``labels`` ``(batch, count)``, in any order."""
        all_scores = torch.cat([self.scores, scores], 1)
        all_labels = torch.cat([self.labels, labels], 1)
        # By score, then by label: two stable sorts, the later key first.
        by_label = all_labels.argsort(dim=1, stable=True)
        all_scores, all_labels = all_scores.gather(1, by_label), all_labels.gather(1, by_label)
        by_score = all_scores.argsort(dim=1, descending=True, stable=True)[:, : self._k]
        self.scores = all_scores.gather(1, by_score)
        self.labels = all_labels.gather(1, by_score)

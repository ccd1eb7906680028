"""Baselines that train on some of the labels: drawn at random, or short-listed by clusters.

What other classifiers over very many labels do: NGAME and DEXML with samples, LightXML and
CascadeXML with shortlists; ELMO's Table 2 compares with them. Both are in FP32 and, as
:class:`subulp.nn.ExtremeClassifier`, update themselves in the forward pass from the learning rate
of :class:`subulp.optim.RowSGD`. There are no hard negatives but those of the clusters.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

NEGATIVES = 1024
"""Labels that a step draws, beside those of its instances."""

MOST_OF_A_CLUSTER = 32
"""Labels of a cluster."""

SHORTLISTED = 16
"""Clusters whose labels an instance meets."""

_ITERATIONS = 8


class SampledClassifier(nn.Module):
    """Every instance meets the labels of its batch, and some that are drawn at random.

    All labels are as probable to be drawn, so that logits are too high by a constant: the ranking
    stays.

    Args:
        dim: Size of an embedding.
        num_labels: Number of labels.
        seed: Seed of the initial weights, which are those of ``ExtremeClassifier``, and of the
            labels that are drawn.
        negatives: Labels that a step draws (default: :data:`NEGATIVES`).
    """

    weight: nn.Parameter

    def __init__(self, dim: int, num_labels: int, seed: int, negatives: int = NEGATIVES) -> None:
        super().__init__()
        self.weight = nn.Parameter(_initial(num_labels, dim, seed), requires_grad=False)
        self.seed, self.negatives = seed, negatives
        self.row_optimizer: Any = None
        self.steps = 0
        # Saved, so that a training that goes on draws what it would have drawn.
        self.register_buffer("drawn_steps", torch.zeros((), dtype=torch.int64))

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return self.weight.shape[0]

    @property
    def row_parameters(self) -> list[nn.Parameter]:
        """The weights, for :class:`subulp.optim.RowSGD`."""
        return [self.weight]

    def forward(
        self, embeddings: Tensor, label_rows: Tensor, label_cols: Tensor, *, loss: bool = False
    ) -> Tensor:
        """As of ``ExtremeClassifier``, summed over instances and the labels that they meet."""
        x = embeddings.detach().float()
        count = self.get_buffer("drawn_steps")
        # Of both: torch's generator takes 32 bits of a seed alone.
        draw = np.random.default_rng((self.seed, int(count)))
        drawn = torch.from_numpy(draw.integers(self.num_labels, size=self.negatives))
        labels = torch.unique(torch.cat((label_cols, drawn.to(label_cols.device))))
        places = torch.searchsorted(labels, label_cols.contiguous())
        value, grad_x = _step(x, self.weight, labels, label_rows, places, None, self.row_optimizer)
        self.steps += 1
        count.add_(1)
        return _known(embeddings, value, grad_x, loss)

    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The k highest logits of all labels, FP32 ``(batch, k)``, and their labels."""
        best = (embeddings.float() @ self.weight.t()).topk(k, dim=1)
        return best.values, best.indices


class ShortlistClassifier(nn.Module):
    """A classifier over clusters of labels, and one over the labels of the best clusters.

    An instance trains on the labels of the clusters that have its own labels, and of the best
    others, up to :data:`SHORTLISTED` clusters; it predicts in so many. A label's probability is its
    own times its cluster's.

    Args:
        dim: Size of an embedding.
        num_labels: Number of labels.
        seed: Seed of the initial weights, which are those of ``ExtremeClassifier``.
        members: Labels of each cluster, int64 ``(clusters, at most so many)``, filled up with -1,
            as of :func:`clusters`.
    """

    weight: nn.Parameter
    cluster_weight: nn.Parameter
    members: Tensor

    def __init__(self, dim: int, num_labels: int, seed: int, members: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(_initial(num_labels, dim, seed), requires_grad=False)
        self.cluster_weight = nn.Parameter(_initial(len(members), dim, seed), requires_grad=False)
        self.row_optimizer: Any = None
        self.steps = 0
        self.register_buffer("members", members)

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return self.weight.shape[0]

    @property
    def row_parameters(self) -> list[nn.Parameter]:
        """Both classifiers' weights, for :class:`subulp.optim.RowSGD`."""
        return [self.weight, self.cluster_weight]

    def forward(
        self, embeddings: Tensor, label_rows: Tensor, label_cols: Tensor, *, loss: bool = False
    ) -> Tensor:
        """As of ``ExtremeClassifier``, summed over instances, clusters and short-listed labels."""
        x = embeddings.detach().float()
        cluster = self._cluster_of(label_cols)
        scores = x @ self.cluster_weight.t()
        scores[label_rows, cluster] = math.inf
        chosen = scores.topk(min(SHORTLISTED, len(self.members)), dim=1).indices
        listed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        every = torch.arange(len(self.members), device=x.device)
        first, grad_first = _step(
            x, self.cluster_weight, every, label_rows, cluster, None, self.row_optimizer
        )
        members = self.members[listed.any(0)]
        labels = members[members >= 0].sort().values
        # An instance meets a label where it has the label's cluster in its list.
        met = listed[:, self._cluster_of(labels)]
        places = torch.searchsorted(labels, label_cols.contiguous())
        # An instance of more clusters than a shortlist has leaves some of its labels out.
        there = listed[label_rows, cluster]
        second, grad_second = _step(
            x, self.weight, labels, label_rows[there], places[there], met, self.row_optimizer
        )
        self.steps += 1
        return _known(embeddings, first + second, grad_first + grad_second, loss)

    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The k best short-listed labels: logits of their probabilities, and the labels."""
        x = embeddings.float()
        smallest = int((self.members >= 0).sum(1).min())
        count = min(max(SHORTLISTED, -(-k // max(smallest, 1))), len(self.members))
        best = (x @ self.cluster_weight.t()).topk(count, dim=1)
        labels = self.members[best.indices]
        logits = torch.einsum("bd,bcmd->bcm", x, self.weight[labels.clamp(min=0)])
        both = F.logsigmoid(logits) + F.logsigmoid(best.values).unsqueeze(-1)
        both = both.masked_fill(labels < 0, -math.inf).flatten(1)
        found = both.topk(k, dim=1)
        # From the logarithm of a probability to its logit.
        values = found.values - torch.log(-torch.expm1(found.values))
        return values, labels.flatten(1).gather(1, found.indices)

    def _cluster_of(self, labels: Tensor) -> Tensor:
        cluster = torch.empty(self.num_labels, dtype=torch.int64, device=labels.device)
        rows, cols = (self.members >= 0).nonzero(as_tuple=True)
        cluster[self.members[rows, cols]] = rows
        return cluster[labels]


@torch.no_grad()
def clusters(vectors: Tensor, most: int = MOST_OF_A_CLUSTER) -> Tensor:
    """Labels in halves of halves, each split by balanced 2-means of directions.

    Args:
        vectors: Of each label, ``(labels, dim)``.
        most: Labels of a cluster (default: :data:`MOST_OF_A_CLUSTER`).

    Returns:
        Labels of each cluster, int64 ``(clusters, at most so many)``, filled up with -1. Numbers of
        labels differ by at most one.
    """
    directions = F.normalize(vectors.float())
    parts = [torch.arange(len(vectors))]
    while len(parts[0]) > most:
        parts = [half for part in parts for half in _halves(part, directions[part])]
    found = torch.full((len(parts), max(map(len, parts))), -1)
    for row, part in zip(found, parts, strict=True):
        row[: len(part)] = part
    return found


def _halves(part: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    middle = (len(part) + 1) // 2
    # The one that is least like the first begins the other half.
    difference = directions[0] - directions[(directions @ directions[0]).argmin()]
    for _ in range(_ITERATIONS):
        order = (directions @ difference).argsort(descending=True, stable=True)
        one, other = directions[order[:middle]].sum(0), directions[order[middle:]].sum(0)
        difference = F.normalize(one, dim=0) - F.normalize(other, dim=0)
    return part[order[:middle]], part[order[middle:]]


def _initial(rows: int, dim: int, seed: int) -> Tensor:
    bound = math.sqrt(6 / (dim + rows))
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(rows, dim).uniform_(-bound, bound, generator=generator)


def _step(
    x: Tensor,
    weight: nn.Parameter,
    labels: Tensor,
    rows: Tensor,
    places: Tensor,
    met: Tensor | None,
    optimizer: Any,
) -> tuple[Tensor, Tensor]:
    """Update the weights of some labels; the logistic loss, and its gradient of the inputs.

    Args:
        x: Inputs, FP32 ``(batch, dim)``.
        weight: ``(all labels, dim)``.
        labels: Some of them, sorted.
        rows: Instance of each pair.
        places: Where in ``labels`` its label is.
        met: Which instance meets which of them, bool ``(batch, len(labels))``; ``None`` is all.
        optimizer: Of the rows.
    """
    own = weight.detach()[labels]
    logits = x @ own.t()
    gradient = logits.sigmoid()
    gradient[rows, places] -= 1
    losses = F.softplus(logits)
    if met is not None:
        gradient, losses = gradient * met, losses * met
    value = losses.sum() - logits[rows, places].sum()
    grad_x = gradient @ own
    (group,) = optimizer.groups_of((weight,))
    own.mul_(1 - group["lr"] * group["weight_decay"])
    own.addmm_(gradient.t(), x, alpha=-group["lr"])
    weight.detach()[labels] = own
    return value, grad_x


def _known(x: Tensor, value: Tensor, gradient: Tensor, loss: bool) -> Tensor:
    found: Tensor = _Known.apply(  # type: ignore[no-untyped-call]
        x, value if loss else torch.full((), math.nan, device=x.device), gradient
    )
    return found


class _Known(torch.autograd.Function):
    """A loss whose gradient has been computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient.to(x.dtype))
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None

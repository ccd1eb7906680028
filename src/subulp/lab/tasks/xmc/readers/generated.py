"""A data set that is generated: planted clusters of labels, as frequent as Zipf's law has it.

It stands for the data sets without label texts, whose files are large. Each label has a few
features of its own, drawn from those of its cluster, so that labels of a cluster are told apart by
little; an instance has some features of each of its labels, and some that mean nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....data.digest import digest
from ....data.lines import Indices, Int64s, checked_indices
from .bags import Features
from .dataset import BagSplit, XMCData
from .labels import LabelMatrix, offsets_of

INSTANCES = 4
"""Training instances of a label; there are an eighth as many in the test part."""
CLUSTER = 32
"""Labels of a cluster."""
POOL = 96
"""Features of a cluster."""
OWN = 8
"""Features of a label."""
SEEN = 4
"""Of these, how many an instance shows."""
NOISE = 4
"""Features of an instance that mean nothing."""
MOST = 5
"""Labels of an instance, at most; all of one cluster."""


class MadeBags:
    """The features of generated instances, in memory.

    Args:
        offsets: int64 ``(instances + 1,)``.
        ids: int64 ``(pairs,)``: features, each with the value 1.
        num_features: What every feature is below.
    """

    def __init__(self, offsets: Int64s, ids: Int64s, num_features: int) -> None:
        self._offsets, self._ids, self.num_features = offsets, ids, num_features

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def digest(self) -> str:
        """Digest of all features."""
        return digest((self._offsets, self._ids))

    def read(self, indices: Indices) -> Features:
        """The features of the instances ``indices``."""
        chosen = checked_indices(indices, len(self))
        starts, ends = self._offsets[chosen], self._offsets[chosen + 1]
        parts = [self._ids[a:b] for a, b in zip(starts, ends, strict=True)]
        ids = np.concatenate([np.zeros(0, np.int64), *parts])
        return Features(ids, offsets_of(ends - starts), np.ones(len(ids), np.float32))


def generate(num_labels: int) -> XMCData:
    """The data set of a number of labels, always the same one.

    Args:
        num_labels: At least 64.
    """
    generator = np.random.default_rng(num_labels)
    clusters = -(-num_labels // CLUSTER)
    # Frequencies have nothing to do with clusters.
    rank = generator.permutation(num_labels)
    weight = 1 / (1.0 + rank)
    own = generator.integers(0, POOL, (num_labels, OWN)) + POOL * (
        np.arange(num_labels)[:, None] % clusters
    )
    features = POOL * clusters
    parts = [
        _part(generator, count, weight / weight.sum(), own, clusters, features)
        for count in (INSTANCES * num_labels, max(64, INSTANCES * num_labels // 8))
    ]
    return XMCData(f"generated, {num_labels:,} labels", parts[0], parts[1], None)


def _part(
    generator: np.random.Generator,
    count: int,
    share: NDArray[np.float64],
    own: Int64s,
    clusters: int,
    features: int,
) -> BagSplit:
    """Instances, each with a label by its share, and others of its cluster."""
    num_labels = len(own)
    first = generator.choice(num_labels, count, p=share)
    per_cluster = num_labels // clusters
    others = first[:, None] % clusters + clusters * generator.integers(
        0, per_cluster, (count, MOST - 1)
    )
    # One label in the mean beside the first.
    kept = generator.random((count, MOST - 1)) < 1 / (MOST - 1)
    instance = np.concatenate([np.arange(count), np.nonzero(kept)[0]])
    label = np.concatenate([first, others[kept]])
    labels = LabelMatrix.from_pairs(instance, label, (count, num_labels))

    rows, cols = labels.pairs(np.arange(count))
    shown = np.argsort(generator.random((len(cols), OWN)), 1)[:, :SEEN]
    signs = np.take_along_axis(own[cols], shown, 1).reshape(-1)
    noise = generator.integers(0, features, count * NOISE)
    instance = np.concatenate([np.repeat(rows, SEEN), np.repeat(np.arange(count), NOISE)])
    shows = LabelMatrix.from_pairs(instance, np.concatenate([signs, noise]), (count, features))
    bags = MadeBags(shows.indptr, shows.indices.astype(np.int64), features)
    return BagSplit(labels, None, bags)

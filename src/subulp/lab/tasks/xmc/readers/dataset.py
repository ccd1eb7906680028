"""A data set with very many labels: what is read, whatever form its files have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ....data.digest import digest
from ....data.lines import Indices, Int64s
from .bags import BagSource
from .labels import LabelMatrix


class Texts(Protocol):
    """Texts by their number, read from the disk when they are asked for."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]: ...

    @property
    def digest(self) -> str:
        """Digest of all texts."""

    def read(self, indices: Indices) -> list[str]:
        """The texts of the instances ``indices``, from 0."""


@dataclass(frozen=True, eq=False)
class Split:
    """The training part or the test part of a data set.

    Attributes:
        labels: As the files have them.
        filter_pairs: Pairs that neither train nor count in an evaluation, such as a product as
            its own label; ``None`` if the data set names none.
    """

    labels: LabelMatrix
    filter_pairs: LabelMatrix | None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def targets(self) -> LabelMatrix:
        """The labels without the filter pairs: what trains, and what is right."""
        if self.filter_pairs is None:
            return self.labels
        return self.labels.without(self.filter_pairs)

    def pairs(self, indices: Indices) -> tuple[Int64s, Int64s]:
        """:meth:`LabelMatrix.pairs` of the targets of a batch."""
        return self.targets.pairs(indices)


@dataclass(frozen=True, eq=False)
class TextSplit(Split):
    """A part whose instances are texts.

    Attributes:
        source: The texts.
    """

    source: Texts

    def extended(self, label_texts: Texts) -> TextSplit:
        """This part, and after it each label's text as an instance with that one label."""
        own = LabelMatrix.identity(self.labels.num_labels)
        none = LabelMatrix(np.zeros_like(own.indptr), own.indices[:0], own.num_labels)
        filtered = None if self.filter_pairs is None else self.filter_pairs.stack(none)
        return TextSplit(self.labels.stack(own), filtered, _Joined(self.source, label_texts))


@dataclass(frozen=True, eq=False)
class BagSplit(Split):
    """A part whose instances are bags of words.

    Attributes:
        source: The bags.
    """

    source: BagSource


@dataclass(frozen=True, eq=False)
class XMCData:
    """A data set.

    Attributes:
        name: What it is called in messages.
        train: Has at least one instance and one pair.
        test: Over the same labels.
        label_texts: Text of each label; ``None`` if there are none.
    """

    name: str
    train: TextSplit | BagSplit
    test: TextSplit | BagSplit
    label_texts: Texts | None

    @property
    def num_labels(self) -> int:
        """Number of labels, those that no instance has included."""
        return self.train.labels.num_labels

    @cached_property
    def label_counts(self) -> Int64s:
        """Training instances of each label, int64 ``(num_labels,)``.

        Filter pairs are counted: the repository takes propensities from the file as it stands.
        """
        return self.train.labels.counts()

    def with_label_texts(self) -> TextSplit:
        """The training part with the label texts as further instances.

        Raises:
            ValueError: The data set has no label texts, or is a bag of words.
        """
        if self.label_texts is None or not isinstance(self.train, TextSplit):
            raise ValueError(
                f"data={self.name} has no label texts to train on: it lacks Y.txt or lbl.json; "
                "train without label texts"
            )
        return self.train.extended(self.label_texts)


class _Joined:
    """Texts, and after them other texts."""

    def __init__(self, first: Texts, second: Texts) -> None:
        self._first = first
        self._second = second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def __iter__(self) -> Iterator[str]:
        yield from self._first
        yield from self._second

    @property
    def digest(self) -> str:
        return digest((self._first.digest, self._second.digest))

    def read(self, indices: Indices) -> list[str]:
        chosen = np.asarray(indices, np.int64)
        late = chosen >= len(self._first)
        texts = np.empty(len(chosen), object)
        texts[~late] = self._first.read(chosen[~late])
        texts[late] = self._second.read(chosen[late] - len(self._first))
        return list(texts)

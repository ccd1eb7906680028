"""What bag encoders know: terms of the training texts, or features of the training instances."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...data.counts import Counts
from ...data.lines import Int64s
from ...engine.files import write_text
from ...engine.typed_files import saved_json
from .readers.bags import BagSource, Features
from .readers.labels import offsets_of

PLACES = 24
"""Places of a term in a text: each of the first eleven, and all later ones; words, then pairs."""

COUNTED_AT_ONCE = 20_000_000
"""Different terms that are counted before rare ones are forgotten: about 2 GiB."""

_WORD = re.compile(r"[^\W_]+")
_VOCABULARY_FORMAT = "subulp vocabulary 1"
_FEATURES_FORMAT = "subulp features 1"
_REMEDY = "give the file that the training run wrote"
_READ_AT_ONCE = 4096

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The terms that are known, and how to turn texts into their numbers.

    A word is a run of Unicode letters and digits, lowercased; a term is a word, or two words that
    follow each other with one space between them.

    Attributes:
        terms: Known terms; their places are their numbers.
        counts: Texts that each term occurs in.
        texts: Texts that were counted.
        bigrams: Whether pairs of words are terms.
    """

    terms: tuple[str, ...]
    counts: tuple[int, ...]
    texts: int
    bigrams: bool

    @classmethod
    def build(
        cls,
        texts: Iterable[str],
        *,
        min_count: int = 2,
        max_terms: int = 500_000,
        bigrams: bool = True,
        counted_at_once: int = COUNTED_AT_ONCE,
    ) -> Vocabulary:
        """Count terms in one pass, and keep the most frequent; ties in the order of the terms.

        Args:
            texts: Read one by one; the same texts in the same order give the same vocabulary.
            min_count: Texts that a term must occur in (default: 2).
            max_terms: Terms that are kept at most (default: 500,000).
            bigrams: Count pairs of words too (default: ``True``).
            counted_at_once: Whenever more different terms have been seen, those counted once are
                forgotten, next time those counted twice, and so on; counts of rare terms are exact
                only below it (default: 20 million).

        Raises:
            ValueError: An argument is not positive, or no term is left.
        """
        for name, value in (("min_count", min_count), ("max_terms", max_terms)):
            if value < 1:
                raise ValueError(f"{name}={value} is out of range: give at least 1")
        total, counts = _count(texts, bigrams, counted_at_once)
        frequent = [term for term, count in counts.items() if count >= min_count]
        if not frequent:
            raise ValueError(
                f"no term occurs in min_count={min_count} of the {total:,} texts: give more texts, "
                "or a smaller min_count"
            )
        terms = tuple(sorted(frequent, key=lambda term: (-counts[term], term))[:max_terms])
        return cls(terms, tuple(counts[term] for term in terms), total, bigrams)

    def __len__(self) -> int:
        return len(self.terms)

    def encode(self, texts: Iterable[str]) -> tuple[Int64s, Int64s, Int64s]:
        """The bag of each text: its known terms, repeats included, words before pairs.

        Returns:
            ``ids``, int64 ``(terms of all texts,)``; ``offsets``, int64 ``(texts + 1,)``: the
            bag of text ``i`` is ``ids[offsets[i]:offsets[i + 1]]``, empty if nothing in it is
            known; and ``places``, int64 like ``ids``, below ``PLACES``: words unknown here count
            in them.
        """
        number, ids, offsets = self._numbers.get, [], [0]
        places: list[int] = []
        for text in texts:
            words = _words(text)
            for first, terms in ((0, words), (PLACES // 2, _pairs(words) if self.bigrams else [])):
                for place, term in enumerate(terms):
                    if (known := number(term)) is not None:
                        ids.append(known)
                        places.append(first + min(place, PLACES // 2 - 1))
            offsets.append(len(ids))
        return np.array(ids, np.int64), np.array(offsets, np.int64), np.array(places, np.int64)

    def inverse_document_frequency(self) -> NDArray[np.float32]:
        """``1 + log((1 + texts) / (1 + count))`` of each term, FP32 ``(terms,)``."""
        counts = np.array(self.counts, np.float64)
        return (1 + np.log((1 + self.texts) / (1 + counts))).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write the vocabulary as one JSON object."""
        fields = {
            "format": _VOCABULARY_FORMAT,
            "texts": self.texts,
            "bigrams": self.bigrams,
            "counts": self.counts,
            "terms": self.terms,
        }
        write_text(path, json.dumps(fields, ensure_ascii=False))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds something else.
        """
        with saved_json(path, _VOCABULARY_FORMAT, "a vocabulary", _REMEDY) as fields:
            vocabulary = cls(
                tuple(map(str, fields["terms"])),
                tuple(map(int, fields["counts"])),
                int(fields["texts"]),
                bool(fields["bigrams"]),
            )
            if len(vocabulary.counts) != len(vocabulary):
                raise ValueError("it has not one count a term")
        return vocabulary

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {term: number for number, term in enumerate(self.terms)}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _pairs(words: list[str]) -> list[str]:
    return [f"{first} {second}" for first, second in pairwise(words)]


def _count(texts: Iterable[str], bigrams: bool, at_once: int) -> tuple[int, Counter[str]]:
    counts: Counter[str] = Counter()
    total = forgotten = 0
    for text in texts:
        total += 1
        words = _words(text)
        counts.update({*words, *(_pairs(words) if bigrams else ())})
        while len(counts) > at_once:
            forgotten += 1
            counts = Counter({t: n for t, n in counts.items() if n > forgotten})
    return total, counts


@dataclass(frozen=True, eq=False)
class KnownFeatures:
    """The features that training instances have, out of those that there may be.

    Attributes:
        numbers: In the data set's numbering, ascending, int64 ``(known,)``; a feature's place is
            its new number.
        num_features: What every feature of the data set is below.
    """

    numbers: Int64s
    num_features: int

    @classmethod
    def build(cls, source: BagSource, max_features: int) -> KnownFeatures:
        """Count features in one pass, and keep the most frequent; ties go to the lower number.

        The memory is that of the features that occur, whatever the file's header says.

        Args:
            source: The training instances.
            max_features: Features that are kept at most.

        Raises:
            ValueError: No instance has a feature.
        """
        counts = Counts(np.int64)
        for start in range(0, len(source), _READ_AT_ONCE):
            found = source.read(np.arange(start, min(start + _READ_AT_ONCE, len(source))))
            counts.add(found.ids[found.values != 0])
        numbers = counts.most_frequent(max_features)
        if not len(numbers):
            raise ValueError(
                "no training instance has a feature other than 0: there is nothing to learn from"
            )
        return cls(numbers, source.num_features)

    def __len__(self) -> int:
        return len(self.numbers)

    def encode(self, features: Features) -> tuple[Int64s, Int64s, Floats]:
        """The known features of each instance under their new numbers, in the order given.

        Returns:
            ``ids``, int64 ``(known features of all instances,)``; ``offsets``, int64
            ``(instances + 1,)``; and ``weights``, FP32: the values, divided by the Euclidean norm
            of those of the instance, so that neither tiny nor huge ones are lost in FP32.
        """
        places = np.searchsorted(self.numbers, features.ids)
        places = np.minimum(places, len(self) - 1)
        known = self.numbers[places] == features.ids
        count = len(features.offsets) - 1
        instance = np.repeat(np.arange(count), np.diff(features.offsets))[known]
        values = features.values[known].astype(np.float64)
        norms = np.sqrt(np.bincount(instance, values * values, minlength=count))
        norms[norms == 0] = 1.0
        offsets = offsets_of(np.bincount(instance, minlength=count))
        return places[known], offsets, (values / norms[instance]).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write the numbers as one JSON object."""
        fields = {
            "format": _FEATURES_FORMAT,
            "num_features": self.num_features,
            "numbers": self.numbers.tolist(),
        }
        write_text(path, json.dumps(fields))

    @classmethod
    def load(cls, path: Path) -> KnownFeatures:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds something else.
        """
        with saved_json(path, _FEATURES_FORMAT, "a list of features", _REMEDY) as fields:
            known = cls(np.array(fields["numbers"], np.int64), int(fields["num_features"]))
            if known.numbers.ndim != 1 or not len(known):
                raise ValueError("it has no list of features")
            if (np.diff(known.numbers, prepend=-1) <= 0).any():
                raise ValueError("its features are not in ascending order")
        return known

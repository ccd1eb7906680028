"""Texts as bags of words and word pairs, numbered by a vocabulary."""

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

from ...data.lines import Int64s

PLACES = 24
"""Places of a term in a text: each of the first eleven, and all later ones; words, then pairs."""

COUNTED_AT_ONCE = 20_000_000
"""Different terms that are counted before rare ones are forgotten: about 2 GiB."""

_WORD = re.compile(r"[^\W_]+")
_FORMAT = "subulp vocabulary 1"


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
            "format": _FORMAT,
            "texts": self.texts,
            "bigrams": self.bigrams,
            "counts": self.counts,
            "terms": self.terms,
        }
        path.write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds something else.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}")
            vocabulary = cls(
                tuple(map(str, fields["terms"])),
                tuple(map(int, fields["counts"])),
                int(fields["texts"]),
                bool(fields["bigrams"]),
            )
            if len(vocabulary.counts) != len(vocabulary):
                raise ValueError("it has not one count a term")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a vocabulary as {_FORMAT!r} writes it ({error}): give the file "
                "that the training run wrote"
            ) from None
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

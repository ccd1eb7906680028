"""The vocabulary: what is a term, which are kept, and the bags that it makes."""

import math
import subprocess
import sys
import time

import numpy as np
import pytest

from subulp.lab.tasks.xmc.readers.load import load_bundled
from subulp.lab.tasks.xmc.vocabulary import PLACES, Vocabulary

TEXTS = ["The red fox", "the RED dog", "a fox; a fox_2", "Größe x²", ""]


def build(texts=TEXTS, **changes):
    return Vocabulary.build(texts, **{"min_count": 1, **changes})


def test_terms_are_words_and_pairs_by_frequency_then_by_text():
    vocabulary = build()
    assert vocabulary.terms == (
        *("fox", "red", "the", "the red", "2", "a", "a fox", "dog", "fox 2", "fox a"),
        *("größe", "größe x²", "red dog", "red fox", "x²"),
    )
    # A term counts once a text, however often it stands there.
    assert vocabulary.counts == (2, 2, 2, 2, *[1] * 11)
    assert vocabulary.texts == 5


def test_the_limits():
    assert build(min_count=2).terms == ("fox", "red", "the", "the red")
    assert build(max_terms=3).terms == ("fox", "red", "the")
    assert build(min_count=2, bigrams=False).terms == ("fox", "red", "the")


def test_bags_hold_known_terms_with_repeats_words_first():
    vocabulary = build(min_count=2)
    ids, offsets, places = vocabulary.encode(["the red the red!", "unknown", "", "fox"])
    assert ids.tolist() == [2, 1, 2, 1, 3, 3, 0]
    assert offsets.tolist() == [0, 6, 6, 6, 7]
    assert places.tolist() == [0, 1, 2, 3, 12, 14, 0]
    assert ids.dtype == offsets.dtype == places.dtype == np.int64
    assert [a.tolist() for a in vocabulary.encode([])] == [[], [0], []]


def test_places_count_unknown_words_and_end_at_the_last():
    vocabulary = build(min_count=2)
    text = "unknown the " + 20 * "unknown " + "the red"
    ids, _, places = vocabulary.encode([text])
    assert ids.tolist() == [2, 2, 1, 3]
    assert places.tolist() == [1, 11, 11, 23]
    assert PLACES == 24


def test_inverse_document_frequency():
    weights = build().inverse_document_frequency()
    assert weights.dtype == np.float32
    assert weights[0] == pytest.approx(1 + math.log(6 / 3))
    assert weights[-1] == pytest.approx(1 + math.log(6 / 2))


def test_a_saved_vocabulary_is_the_same(tmp_path):
    vocabulary = build()
    vocabulary.save(tmp_path / "v.json")
    loaded = Vocabulary.load(tmp_path / "v.json")
    assert (loaded.terms, loaded.counts) == (vocabulary.terms, vocabulary.counts)
    assert (loaded.texts, loaded.bigrams) == (5, True)
    assert [a.tolist() for a in loaded.encode(TEXTS)] == [
        a.tolist() for a in vocabulary.encode(TEXTS)
    ]


FIELDS = (
    b'{"format": "subulp vocabulary 1", "texts": 1, "bigrams": true, "counts": [], "terms": %s}'
)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b"\xff", b'{"format": "other"}', b"[" * 100_000),
        *(FIELDS % b'["a"]', FIELDS % b"3"),
    ],
)
def test_a_file_that_is_no_vocabulary(tmp_path, content):
    (tmp_path / "v.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"v\.json is not a vocabulary as 'subulp vocabulary 1'"):
        Vocabulary.load(tmp_path / "v.json")


def test_no_term_left():
    with pytest.raises(ValueError, match=r"no term occurs in min_count=3 of the 5 texts"):
        build(min_count=3)
    with pytest.raises(ValueError, match="min_count=0 is out of range: give at least 1"):
        build(min_count=0)
    with pytest.raises(ValueError, match="max_terms=0 is out of range: give at least 1"):
        build(max_terms=0)


def test_rare_terms_are_forgotten_when_too_many_are_counted():
    texts = [f"often rare{i}" for i in range(100)]
    vocabulary = Vocabulary.build(texts, min_count=2, counted_at_once=10)
    assert vocabulary.terms == ("often",)
    assert vocabulary.counts == (100,)


def test_the_vocabulary_does_not_depend_on_the_hash_seed():
    program = (
        "from subulp.lab.tasks.xmc.vocabulary import Vocabulary;"
        "v = Vocabulary.build((f'{i % 7} x{i} y{i % 3}' for i in range(300)), counted_at_once=50);"
        "print(v.terms, v.counts)"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_the_bundled_texts_take_a_moment():
    source = load_bundled().train.source
    begin = time.process_time()
    vocabulary = Vocabulary.build(source)
    ids, offsets, _ = vocabulary.encode(source)
    # About 0.5 s here; the bound leaves room for slower machines.
    assert time.process_time() - begin < 5
    assert len(offsets) == len(source) + 1
    assert offsets[-1] == len(ids)
    # As many features as the data set's README counts for its baseline.
    assert len(vocabulary) == 43_519

import os
import subprocess
import sys

import pytest

from subulp.lab.tasks.lm import bpe
from subulp.lab.tasks.lm.text import load_text

TEXT = "the cat sat on the mat; the cat ate — a naïve rat\r\n" * 40 + "\n\ttail without an end"


def test_tokens_stand_for_the_text():
    learned = bpe.learn(TEXT, 300)
    assert bpe.text_of(bpe.tokens_of(TEXT, learned).tolist(), learned) == TEXT


def test_what_was_never_seen_is_bytes():
    learned = bpe.learn("aaaa", 257)
    other = "Ελληνικά\n"
    tokens = bpe.tokens_of(other, learned)
    assert len(tokens) == len(other.encode())
    assert bpe.text_of(tokens.tolist(), learned) == other


def test_frequent_pairs_become_tokens():
    learned = bpe.learn(TEXT, 300)
    assert bpe.size_of(learned) <= 300
    assert len(bpe.tokens_of(TEXT, learned)) < 0.6 * len(TEXT.encode())


def test_a_short_text_has_fewer_tokens():
    assert bpe.size_of(bpe.learn("ab", 5000)) == 257


def test_nothing_is_learned_from_what_validates(tmp_path):
    train, validation = "aaab" * 450 + "\n", "xyzw" * 50
    file = tmp_path / "text.txt"
    file.write_text(train + validation)
    text = load_text(file, "bpe", 300)
    assert text.unit == "tokens"
    assert text.vocabulary == bpe.size_of(text.tokenizer)
    assert len(text.train) < 300
    assert len(text.validation) > 150


def test_the_number_of_threads_changes_nothing():
    code = (
        "from subulp.lab.tasks.lm import bpe; from subulp.lab.tasks.lm.text import read_text;"
        "import hashlib; text = read_text(None)[1].decode();"
        "print(hashlib.sha256(bpe.learn(text, 1000).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"RAYON_NUM_THREADS": count},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for count in ("1", "2", "7")
    }
    assert len(found) == 1


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(ValueError, match="no tokenizer"):
        bpe.read("{}")

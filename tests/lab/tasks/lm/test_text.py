"""Reading text: what is right, and an error with its remedy for what is not."""

import gzip
import os
from pathlib import Path

import pytest
import torch

from subulp.lab.tasks.lm.text import Batches, Text, evaluation_batches, load_text
from subulp.lab.tasks.xmc.readers.load import load_bundled


def test_the_bundled_text_is_the_usual_split_of_shakespeare():
    text = load_text()
    assert text.vocabulary == 65
    assert text.train.numel() == 1_003_855
    assert text.validation.numel() == 111_539
    assert text.train.dtype == torch.int16


def test_the_other_bundled_text_is_what_xmc_trains_on():
    text = load_text("definitions")
    data = load_bundled()
    assert text.name == "definitions (bundled)"
    whole = torch.cat([text.train, text.validation])
    lines = "".join(text.characters[i] for i in whole.tolist()).splitlines()
    assert lines == [data.train.source[i] for i in range(len(data.train.source))]
    assert text.validation.numel() == whole.numel() // 10


def test_a_file_of_the_name_of_a_bundled_text_is_given_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("definitions").write_text("abc" * 10)
    assert load_text(Path("definitions")).vocabulary == 3
    assert load_text("./definitions").vocabulary == 3


def test_characters_are_numbered_in_code_point_order(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("béa" * 10, encoding="utf-8")
    text = load_text(path)
    assert text.vocabulary == 3
    assert text.train[:3].tolist() == [1, 2, 0]
    assert text.unit == "characters"
    assert (text.train.numel(), text.validation.numel()) == (27, 3)


def test_bytes_need_no_encoding(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(range(256)))
    text = load_text(path, "byte")
    assert text.vocabulary == 256
    assert torch.cat([text.train, text.validation]).tolist() == list(range(256))


def test_a_compressed_file_is_read_as_what_it_holds(tmp_path):
    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress(b"abc" * 10))
    assert load_text(path).vocabulary == 3


def test_a_missing_file(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"data=.*none\.txt does not exist: give an existing"
    ):
        load_text(tmp_path / "none.txt")


def test_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"data=.* is a folder: give a text file"):
        load_text(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("secret")
    path.chmod(0)
    with pytest.raises(PermissionError, match="permission denied; make the file readable"):
        load_text(path)


@pytest.mark.parametrize("level", ["char", "byte"])
def test_an_empty_file(tmp_path, level):
    path = tmp_path / "t.txt"
    path.touch()
    with pytest.raises(ValueError, match=r"data=.*t\.txt is empty: give a file with text"):
        load_text(path, level)


def test_a_file_that_is_not_utf8_names_the_byte_and_the_remedy(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"not UTF-8: byte 0xe9 at offset 3; use level=byte"):
        load_text(path)


@pytest.mark.parametrize("content", [b"plain text", gzip.compress(b"abc" * 100, mtime=0)[:20]])
def test_a_broken_gzip_file(tmp_path, content):
    path = tmp_path / "t.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a complete gzip file"):
        load_text(path)


def test_a_text_shorter_than_one_context_says_how_long_it_must_be(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("ab" * 50)
    with pytest.raises(ValueError, match=r"has 100 characters.*context=10.*at least 111"):
        load_text(path).check_context(10)
    load_text(path).check_context(9)
    path.write_text("a" * 111)
    load_text(path).check_context(10)


def test_the_seed_alone_decides_the_batches():
    tokens = torch.arange(100, dtype=torch.int16)
    a, b = (Batches(tokens, 4, 8, seed=3) for _ in range(2))
    other = Batches(tokens, 4, 8, seed=4)
    torch.manual_seed(0)
    first = a.draw()
    torch.manual_seed(1)
    assert all(torch.equal(x, y) for x, y in zip(first, b.draw(), strict=True))
    assert not torch.equal(first[0], other.draw()[0])
    inputs, targets = first
    assert inputs.shape == targets.shape == (4, 8)
    assert torch.equal(targets, inputs + 1)


def test_batches_reach_the_first_and_the_last_token():
    tokens = torch.arange(10)
    batches = Batches(tokens, 64, 8, seed=0)
    starts = {int(s) for s in batches.draw()[0][:, 0]}
    assert starts == {0, 1}


def test_evaluation_batches_cover_every_target_once():
    tokens = torch.arange(1, 36)
    batches = evaluation_batches(tokens, 3, 8)
    targets = torch.cat([y.flatten() for _, y in batches])
    assert targets.tolist() == list(range(2, 34))
    assert all(torch.equal(y, x + 1) for x, y in batches)
    assert [len(x) for x, _ in batches] == [3, 1]


def test_a_text_of_exactly_one_context_can_be_evaluated():
    text = Text("t", torch.arange(9), torch.arange(9), 9, "bytes", None)
    text.check_context(8)
    assert len(evaluation_batches(text.validation, 4, 8)) == 1

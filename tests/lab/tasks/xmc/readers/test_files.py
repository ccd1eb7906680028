"""Single files: lines by their number, headers held to their word, damage, any bytes."""

import gzip
import json
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subulp.lab.data import lines, room
from subulp.lab.data.lines import TextLines, whole_lines
from subulp.lab.tasks.xmc.readers.bags import read_bag_file
from subulp.lab.tasks.xmc.readers.json_lines import read_json_part, read_json_texts
from subulp.lab.tasks.xmc.readers.label_files import read_filter_file, read_label_file
from subulp.lab.tasks.xmc.readers.labels import LabelMatrix

from .support import put

COMPRESSED = pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])


@COMPRESSED
@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    "content", ["", "a", "a\n", "\n", "a\n\nbé", "ab\r\ncd\r\n", "\u2028\x0b\n"]
)
def test_lines_are_those_of_the_file(tmp_path, monkeypatch, compressed, block, content):
    monkeypatch.setattr(lines, "BLOCK", block)
    monkeypatch.setattr(lines, "_ITERATED", 2)
    path = put(tmp_path, "t.txt", content, compressed=compressed)
    expected = [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")]
    texts = TextLines(path, tmp_path)
    assert list(texts) == texts[:] == (expected if content else [])
    assert texts.read(range(len(texts))[::-1]) == texts[::-1]
    assert b"".join(raw for _, raw in whole_lines(path)).decode() == content
    with pytest.raises(IndexError):
        texts[len(texts)]
    with pytest.raises(IndexError, match="instance -1 is out of range: there are"):
        texts.read([-1])


def test_a_decompressed_file_leaves_nothing_behind(tmp_path):
    path = put(tmp_path, "t.txt", "a\nb\n", compressed=True)
    before = len(os.listdir("/proc/self/fd"))
    texts = TextLines(path, tmp_path)
    assert texts[1] == "b"
    assert os.listdir(tmp_path) == ["t.txt.gz"]
    del texts
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_room_to_decompress_names_the_remedy(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = put(tmp_path, "t.txt", "a\n", compressed=True)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"no room to decompress .*t\.txt\.gz in .*cache folder"):
        TextLines(path, tmp_path)


@COMPRESSED
def test_text_that_is_not_utf8_names_the_line(tmp_path, compressed):
    path = put(tmp_path, "t.txt", b"a\nb\ncaf\xe9 au lait\nd\n", compressed=compressed)
    with pytest.raises(ValueError, match=r"t\.txt(\.gz)?:3: not UTF-8: byte 0xe9; convert"):
        TextLines(path)


@pytest.mark.parametrize(
    "content", [b"plain", gzip.compress(b"abc\n" * 999, mtime=0)[:30], b"\x1f\x8b"]
)
def test_damaged_gzip(tmp_path, content):
    path = put(tmp_path, "t.txt.gz", content)
    for read in (TextLines, read_label_file, read_bag_file, read_json_texts):
        with pytest.raises(ValueError, match=r"gz:1: from here on not a complete gzip file"):
            read(path)


@COMPRESSED
def test_an_endless_line_is_refused_before_it_fills_memory(tmp_path, monkeypatch, compressed):
    monkeypatch.setattr(lines, "BLOCK", 1 << 16)
    monkeypatch.setattr(lines, "LONGEST_LINE", 1 << 17)
    path = put(tmp_path, "t.txt", b"a\n" + b"x" * (1 << 24), compressed=compressed)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r":2: the line is longer than 0 MiB: is the file"):
        TextLines(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    path = put(tmp_path, "u.txt", b"x" * ((1 << 17) + 1) + b"\n", compressed=compressed)
    with pytest.raises(ValueError, match=r":1: the line is longer"):
        TextLines(path)
    path = put(tmp_path, "v.txt", b"x" * (1 << 17) + b"\n", compressed=compressed)
    assert len(TextLines(path)) == 1


def test_a_file_that_shrinks_is_noticed(tmp_path):
    path = put(tmp_path, "t.txt", "one\ntwo\n")
    texts = TextLines(path)
    os.truncate(path, 5)
    with pytest.raises(ValueError, match=r"t\.txt:2: the file has become shorter"):
        texts[1]


HEADERS = [
    ("", r":1: expected the header 'num_instances num_labels', found ''"),
    ("3\n", r":1: expected the header"),
    ("1 2 3\n", r":1: expected the header"),
    ("0:1 1:1\n", r":1: expected the header .* found '0:1 1:1'"),
    ("-1 5\n", r":1: expected the header"),
    ("1.0 5\n", r":1: expected the header"),
    ("1 " + "9" * 5000 + "\n", r":1: expected the header"),
    ("1 0\n\n", r":1: 0 labels: expected 1 to 2147483647"),
    ("1 2147483648\n\n", r":1: 2147483648 labels: expected 1 to 2147483647"),
    ("2 5\n1:1\n", r":3: the file ends after 1 instances, where the header says 2: is it complete"),
    ("2 5", r":2: the file ends after 0 instances"),
    ("1 5\n1:1\n2:1\n", r":3: more lines than the header's 1 instances"),
    ("0 5\n1:1\n", r":2: more lines than the header's 0 instances"),
    ("999999999999999999 5\n1:1\n", r":3: the file ends after 1 instances, .* 999,999,999"),
]


@pytest.mark.parametrize(("content", "message"), HEADERS)
def test_a_header_that_lies(tmp_path, content, message):
    path = put(tmp_path, "f.txt", content)
    with pytest.raises(ValueError, match=message):
        read_label_file(path)


def test_absurd_counts_allocate_nothing(tmp_path, monkeypatch):
    # On a machine that could hold as many counts as the header promises, whatever this one has.
    monkeypatch.setattr(room, "available_memory", lambda: 1 << 40)
    label_path = put(tmp_path, "f.txt", "999999999999 2147483647\n5:1\n")
    bag_path = put(tmp_path, "g.txt", "1 999999999999999999 2147483647\n5 123456789012:1\n")
    tracemalloc.start()
    with pytest.raises(ValueError, match="the file ends after 1 instances"):
        read_label_file(label_path)
    bags, labels = read_bag_file(bag_path)
    assert bags.read([0]).ids.tolist() == [123456789012]
    assert labels.row(0).tolist() == [5]
    # A block is read at a time, whatever the file's size.
    assert tracemalloc.get_traced_memory()[1] < 2 * lines.BLOCK
    tracemalloc.stop()


@pytest.mark.parametrize("block", [1, 8, 1 << 20])
def test_label_files_do_not_depend_on_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(lines, "BLOCK", block)
    path = put(tmp_path, "f.txt", "4 50\n40:1 3:1 40:1\n\n7:1\n9:1 8:1")
    labels = read_label_file(path)
    assert labels.indptr.tolist() == [0, 2, 2, 3, 5]
    assert labels.indices.tolist() == [3, 40, 7, 8, 9]
    assert (labels.indptr.dtype, labels.indices.dtype) == (np.int64, np.int32)
    put(tmp_path, "f.txt", "4 50\n40:1\n\n50:1\n8:1")
    with pytest.raises(ValueError, match=r"f\.txt:4: label '50' is out of range"):
        read_label_file(path)


BAGS = [
    ("1 4 3\n0,1 4:1\n", r":2: feature '4' is out of range: expected 0 to 3"),
    ("2 4 3\n 1:1\n3 1:1\n", r":3: label '3' is out of range: expected 0 to 2"),
    ("1 4 3\n0 1\n", r":2: expected feature:value, found '1'"),
    ("1 4 3\n0,1, 1:1\n", r":2: expected a label from 0 to 2, found ''"),
    ("1 4 3\n0 1:1e99\n", r":2: expected a number of FP32's range"),
    ("1 0 3\n0 1:1\n", r":1: 0 features: expected at least 1"),
    ("1 3\n0 1:1\n", r":1: expected the header 'num_instances num_features num_labels'"),
]


@pytest.mark.parametrize(("content", "message"), BAGS)
def test_wrong_bags(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_bag_file(put(tmp_path, "f.txt", content))


def test_bags_without_labels_or_without_features(tmp_path):
    path = put(tmp_path, "f.txt", "4 4 3\n 1:1\n0:2 1:1\n2,1\r\n\n")
    bags, labels = read_bag_file(path)
    assert [labels.row(i).tolist() for i in range(4)] == [[], [], [1, 2], []]
    features = bags.read([1, 0, 2, 3])
    assert features.offsets.tolist() == [0, 2, 3, 3, 3]
    assert features.ids.tolist() == [0, 1, 1]
    assert [len(part) for part in bags.read([])] == [0, 1, 0]
    with pytest.raises(IndexError, match="instance 4 is out of range: there are 4"):
        bags.read([4])
    with pytest.raises(IndexError, match="instance -1 is out of range"):
        bags.read([-1])


RECORDS = [
    ("", r":1: expected a JSON object, found '' \(Expecting value"),
    ("[1]", r":1: expected a JSON object, found '\[1\]'"),
    ("{", r":1: expected a JSON object, found '\{'"),
    ("[" * 100_000, r":1: expected a JSON object, found '\[{40}' \.\.\. \(maximum recursion"),
    ('{"title": 3}', r":1: expected text as 'title', found '3'"),
    ('{"content": null}', r":1: expected text as 'content', found nothing"),
    ("{}", r":1: expected a list of labels as 'target_ind', found nothing"),
    ('{"target_ind": 3}', r"list of labels as 'target_ind', found '3'"),
    ('{"target_ind": [3]}', r":1: expected a label from 0 to 2, found '3'"),
    ('{"target_ind": [-1]}', r"expected a label from 0 to 2, found '-1'"),
    ('{"target_ind": [1.0]}', r"expected a label from 0 to 2, found '1\.0'"),
    ('{"target_ind": [true]}', r"expected a label from 0 to 2, found 'true'"),
    ('{"target_ind": ["1"]}', r"expected a label from 0 to 2, found '\"1\"'"),
    ('{"target_ind": [1%s]}' % ("0" * 4000), r"expected a label from 0 to 2, found '10"),
    ('{"target_ind": [1%s]}' % ("0" * 5000), r"expected a JSON object, .*integer string"),
    ('{"target_ind": [1], "target_rel": [1, 1]}', r"expected 1 numbers as 'target_rel'"),
    ('{"target_ind": [1], "target_rel": [-1]}', r"expected a relevance of at least 0, found '-1'"),
    ('{"target_ind": [1], "target_rel": [NaN]}', r"relevance of at least 0, found 'NaN'"),
    ('{"target_ind": [1], "target_rel": ["1"]}', r"relevance of at least 0, found '\"1\"'"),
]


@pytest.mark.parametrize(("content", "message"), RECORDS)
def test_wrong_records(tmp_path, content, message):
    path = put(tmp_path, "f.json", content + "\n")
    with pytest.raises(ValueError, match=message):
        read_json_part(path, 3)


def test_records(tmp_path):
    records = [
        {"uid": "B0", "title": "A", "content": "b c", "target_ind": [2, 0], "target_rel": [1.0, 1]},
        {"title": "", "content": "only this", "target_ind": [], "target_rel": []},
        {"title": "half \ud83d a character", "target_ind": [1, 0, 1], "target_rel": [1, 0, 1]},
    ]
    path = put(tmp_path, "f.json", "".join(json.dumps(r) + "\n" for r in records))
    texts, labels = read_json_part(path, 3)
    assert list(texts) == ["A b c", "only this", "half \ufffd a character"]
    assert texts.read([2, 0]) == ["half \ufffd a character", "A b c"]
    assert [labels.row(i).tolist() for i in range(3)] == [[0, 2], [], [1]]


PARSERS = {
    "label": read_label_file,
    "filter": lambda path: read_filter_file(path, (5, 7)),
    "bag": read_bag_file,
    "json": lambda path: read_json_part(path, 7),
    "text": TextLines,
}
SEEDS = [
    b"2 7\n1:1 2:1\n\n",
    b"1 3\n4 6\n",
    b"2 9 7\n1,2 3:0.5\n 8:1\n",
    b'{"title": "a", "content": "b", "target_ind": [1, 2], "target_rel": [1.0, 0]}\n',
]


@st.composite
def damaged(draw):
    """A sound file of some form with bytes changed, put in or taken out."""
    raw = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 4))] = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b"999999999999", b"-", b" ", b"\n"]))
        )
    return bytes(raw)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("form", ["plain", "gz", "damaged gz"])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=40,
)
@given(content=st.one_of(st.binary(), damaged()), cut=st.integers(0, 40))
def test_any_bytes_give_a_result_or_an_error_with_its_place(tmp_path, parser, form, content, cut):
    if form != "plain":
        content = gzip.compress(content)
    if form == "damaged gz":
        at = cut % len(content)
        content = content[:at] + bytes([cut]) + content[at + 1 :]
    path = put(tmp_path, "f.txt" if form == "plain" else "f.txt.gz", content)
    message = None
    try:
        PARSERS[parser](path)
    except ValueError as error:
        message = str(error)
    assert message is None or message.startswith(f"{path}:")


def test_label_matrices():
    labels = LabelMatrix.from_pairs(
        np.array([2, 0, 2, 2]), np.array([5, 1, 3, 5], np.int64), (4, 6)
    )
    assert labels.shape == (4, 6)
    assert [labels.row(i).tolist() for i in range(4)] == [[1], [], [3, 5], []]
    assert labels.counts().tolist() == [0, 1, 0, 1, 0, 1]
    rows, cols = labels.pairs([2, 2, 1, 0])
    assert (rows.tolist(), cols.tolist()) == ([0, 0, 1, 1, 3], [3, 5, 3, 5, 1])
    assert [len(a) for a in labels.pairs([])] == [0, 0]
    less = labels.without(LabelMatrix.from_pairs(np.array([2, 1]), np.array([5, 0]), (4, 6)))
    assert [less.row(i).tolist() for i in range(4)] == [[1], [], [3], []]
    stacked = labels.stack(LabelMatrix.identity(6))
    assert stacked.shape == (10, 6)
    assert [stacked.row(i).tolist() for i in (2, 4, 9)] == [[3, 5], [0], [5]]
    with pytest.raises(IndexError, match="instance 4 is out of range: there are 4, from 0"):
        labels.pairs([0, 4])

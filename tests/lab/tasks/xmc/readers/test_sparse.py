"""Lines of pairs and lists: what they mean, what is wrong with them, and the two speeds."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subulp.lab.tasks.xmc.readers import sparse
from subulp.lab.tasks.xmc.readers.sparse import label_rows, list_rows, pair_rows

FILE = Path("f.txt")


def by_row(counts, numbers):
    return [part.tolist() for part in np.split(numbers, np.cumsum(counts)[:-1])]


LABELS = {
    b"3:1 1:1\n": [[1, 3]],
    b"1:1\n\n2:1": [[1], [], [2]],
    b"\n": [[]],
    b"1:1 1:1 0:1 1:1\n": [[0, 1]],
    b"1:1.000 2:1.0\n": [[1, 2]],
    b"1:0 2:0.5\n3:0\n": [[2], []],
    b"1:1\r\n2:1\r\n": [[1], [2]],
    b"  1:1   2:1 \n": [[1, 2]],
    b"1:1\t2:1\n": [[1, 2]],
    b"0000000000000000001:1\n": [[1]],
    b"1:1e0 2:+1\n": [[1, 2]],
}


@pytest.mark.parametrize("block", LABELS)
def test_label_lines(block):
    counts, labels = label_rows(FILE, 1, block, 4)
    assert by_row(counts, labels) == LABELS[block]
    assert labels.dtype == np.int32


WRONG_LABELS = [
    (b"1:1\n4:1\n", r"^f\.txt:8: label '4' is out of range: expected 0 to 3$"),
    (b"99999999999:1\n", r"f\.txt:7: label '99999999999' is out of range"),
    (b"9" * 5000 + b":1\n", r"f\.txt:7: label '9{40}' \.\.\. is out of range"),
    (b"-1:1\n", r"f\.txt:7: expected a label from 0 to 3, found '-1'"),
    (b"3.5:1\n", r"f\.txt:7: expected a label from 0 to 3, found '3\.5'"),
    (b"1:1\n\n1\n", r"f\.txt:9: expected label:value, found '1'"),
    (b":1\n", r"expected a label from 0 to 3, found ''"),
    (b"1:\n", r"expected a number of FP32's range after the colon, found ''"),
    (b"1:x\n", r"after the colon, found 'x'"),
    (b"1:nan\n", r"after the colon, found 'nan'"),
    (b"1:inf\n", r"after the colon, found 'inf'"),
    (b"1:1e39\n", r"after the colon, found '1e39'"),
    (b"1:1_0\n", r"after the colon, found '1_0'"),
    (b"1:1:1\n", r"after the colon, found '1:1'"),
    (b"1:1 2:-1\n", r"f\.txt:7: label 2 has a negative value; give label:1"),
    (b"1 2:1:1\n", r"f\.txt:7: expected label:value, found '1'"),
    (b"\xff:1\n", "expected a label from 0 to 3, found '\ufffd'"),
    ("\u0661:1\n".encode(), "expected a label from 0 to 3, found '\u0661'"),
]


@pytest.mark.parametrize(("block", "message"), WRONG_LABELS)
def test_wrong_label_lines(block, message):
    with pytest.raises(ValueError, match=message):
        label_rows(FILE, 7, block, 4)


LISTS = {
    b"1,2\n3\n\n0": [[1, 2], [3], [], [0]],
    b"2,1,2\n": [[1, 2]],
    b"1, 2\n": [[1, 2]],
    b"\n\n": [[], []],
}


@pytest.mark.parametrize("block", LISTS)
def test_label_lists(block):
    assert by_row(*list_rows(FILE, 1, block, 4)) == LISTS[block]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"1\n4\n", r"^f\.txt:8: label '4' is out of range"),
        (b"1,,2\n", "f.txt:7: expected a label from 0 to 3, found ''"),
        (b"1,2,\n", "found ''"),
        (b",1\n", "found ''"),
        (b"1;2\n", "found '1;2'"),
        (b"-1\n", "found '-1'"),
        (b"1.0\n", "found '1.0'"),
    ],
)
def test_wrong_label_lists(block, message):
    with pytest.raises(ValueError, match=message):
        list_rows(FILE, 7, block, 4)


def test_feature_values_are_read_as_numbers():
    rows = pair_rows(FILE, 1, b"7:0.25 7:-1e-3\n0:+2.5E1\n", 8, "feature")
    assert rows.counts.tolist() == [2, 1]
    assert rows.numbers.tolist() == [7, 7, 0]
    assert rows.values.tolist() == [0.25, -1e-3, 25.0]


tokens = st.sampled_from(
    [b"1", b"0", b"23", b":", b" ", b"\n", b",", b".", b"e", b"-", b"\r", b"x"]
)
blocks = st.one_of(
    st.lists(tokens, min_size=1).map(b"".join),
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 99), st.sampled_from([b"1", b"1.0", b"0.5", b"0", b"-2"]))
        )
    ).map(lambda rows: b"".join(b" ".join(b"%d:%s" % p for p in row) + b"\n" for row in rows)),
).filter(bool)


def outcome(parse, *arguments):
    """What a parser gives, arrays as lists, or its error."""
    try:
        return [part.tolist() for part in parse(*arguments)]
    except ValueError as error:
        return str(error)


@given(blocks)
def test_both_speeds_mean_the_same(block):
    fast = [outcome(parse, FILE, 3, block, 50) for parse in (label_rows, list_rows)]
    fast_pairs = outcome(pair_rows, FILE, 3, block, 50, "feature")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "_plain_pairs", lambda block: None)
        patch.setattr(sparse, "_plain_lists", lambda block: None)
        assert [outcome(parse, FILE, 3, block, 50) for parse in (label_rows, list_rows)] == fast
        assert outcome(pair_rows, FILE, 3, block, 50, "feature") == fast_pairs


def test_plain_blocks_take_the_fast_path():
    assert sparse._plain_pairs(b"1:1 2:1.00\n\n3:0.5") is not None
    assert sparse._plain_lists(b"1,2\n\n3") is not None


@given(st.binary(min_size=1))
def test_any_bytes_give_rows_or_an_error_with_its_place(block):
    for parse in (label_rows, list_rows):
        found = outcome(parse, FILE, 1, block, 50)
        if isinstance(found, str):
            assert found.startswith("f.txt:")
        else:
            assert len(found[0]) == block.count(b"\n") + (not block.endswith(b"\n"))

"""Lines and blocks: one definition, two speeds."""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subulp.lab.tasks.ctr.readers import parse_block as module
from subulp.lab.tasks.ctr.readers.layout import Layout, Number, Table, criteo_layout
from subulp.lab.tasks.ctr.readers.parse_block import parse_block
from subulp.lab.tasks.ctr.readers.parse_line import key, parse_line

from .support import criteo_lines

CRITEO = criteo_layout([1000])
SHOPS = Layout(
    columns=("clicked", "price", "shop", "age"),
    label="clicked",
    numbers=(Number("price"), Number("age", "none")),
    tables=(Table(("shop",), 10), Table(("shop", "age"), 10), Table(("price",), 10)),
    separator=",",
    quote='"',
    missing="?",
    buckets={"age": (18.0, 30.0)},
)


def line(**changes):
    fields = dict(zip(CRITEO.columns, criteo_lines(1)[0].split("\t"), strict=True))
    return "\t".join({**fields, **changes}.values()).encode()


def never(index, message):
    raise AssertionError(f"line {index}: {message}")


def same(a, b):
    return all(
        np.array_equal(getattr(a, n), getattr(b, n), equal_nan=n == "numbers")
        for n in ("labels", "numbers", "keys")
    )


def both(layout, block):
    """The block parsed as arrays, and by the definition, with the bad lines of each."""
    bad = [], []
    fast = parse_block(layout, block, lambda *found: bad[0].append(found))
    slow = module._parse_lines(
        layout,
        block.replace(b"\r\n", b"\n").removesuffix(b"\r"),
        lambda *found: bad[1].append(found),
    )
    assert bad[0] == bad[1]
    assert same(fast, slow)
    return fast, bad[0]


def test_a_line_of_criteo():
    raw = b"1\t\t-2\t5\t7.0\t0" + b"\t" * 8 + b"\t68fd1e64\tF\t" + b"\t" * 23
    label, numbers, keys = parse_line(CRITEO, raw)
    assert label == 1.0
    assert math.isnan(numbers[0])
    assert numbers[1:5] == pytest.approx([0.0, math.log(6), math.log(8), 0.0])
    assert keys[:3] == [0x68FD1E64, 15, 0]


def test_a_category_is_hashed_with_its_column():
    _, numbers, keys = parse_line(SHOPS, b'1,2.5,"a,b",40')
    assert numbers == pytest.approx([math.log(3.5), 40.0])
    expected = [b"shop=a,b", b"shop=a,b|age=2", b"price=2.5"]
    assert keys == [zlib.crc32(text) for text in expected]
    assert key(["a", "b"], ["x", "y"]) == zlib.crc32(b"a=x|b=y")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (line()[:-9], r"39 fields: expected 40 \(label, 13 numbers, 26 categories\), separated by"),
        (line() + b"\t", "41 fields: expected 40"),
        (line(I3="12a"), "column I3 is '12a': expected a number or nothing"),
        (line(I1="nan"), "column I1 is 'nan'"),
        (line(I1="1e999"), "column I1 is '1e999'"),
        (line(I1="1_000"), "column I1 is '1_000'"),
        (line(label="2"), "label label is '2': expected '0' or '1'"),
        (line(label=""), "label label is ''"),
        (line(C7="xyz"), "column C7 is 'xyz': expected at most 8 hexadecimal digits"),
        (line(C7="123456789"), "column C7 is '123456789'"),
        (line(C7="é"), "column C7 is"),
        (b"\xff" + line(), "not UTF-8: byte 0xff"),
        (b"\t" * 39, "label label is ''"),
    ],
)
def test_a_bad_line_says_what_was_expected(raw, message):
    with pytest.raises(ValueError, match=message):
        parse_line(CRITEO, raw)
    good = line()
    block = b"\n".join([good, b"", raw, good, b""])
    found, bad = both(CRITEO, block)
    assert len(found) == 2
    assert [index for index, _ in bad] == [2]


@pytest.mark.parametrize(
    "raw", [b'1,2,"a,3', b"1,2,a", b"yes,2,a,3", b"1,x,a,3", b"1,2,a,inf", b"1,2,a\r,3"]
)
def test_a_bad_line_of_a_table(raw):
    found, bad = both(SHOPS, b"\n".join([b"1,2,a,3", raw, b"0,?,b,"]))
    assert len(found) in (1, 2)
    assert [index for index, _ in bad][:1] == [1] or raw == b"1,2,a\r,3"


def test_arrays_are_the_rule(monkeypatch):
    """The line-by-line definition is a hundred times slower: ordinary files do not need it."""
    monkeypatch.setattr(module, "_parse_lines", None)
    criteo = "\n".join([*criteo_lines(50), line(I1="1.0", C3="").decode()]).encode()
    assert len(parse_block(CRITEO, criteo, never)) == 51
    assert len(parse_block(SHOPS, b'1,2.5," x ",40\r\n0,?,"a,""b""",\r\n', never)) == 2


fields = st.sampled_from(["", "0", "1", "-2", "3.5", "1e3", "+4", " 5", "6 ", ".5", "7.", "x", "?"])
hexes = st.sampled_from(["", "0", "ff", "68fd1e64", "ABCDEF01", " a", "g", "123456789"])


@settings(max_examples=60)
@given(st.lists(st.tuples(fields, fields, fields, hexes, hexes), max_size=6), st.booleans())
def test_arrays_hold_what_the_definition_says(rows, carriage):
    end = "\r\n" if carriage else "\n"
    lines = [
        "\t".join([label, a, b, *["1"] * 11, c, d, *["a1"] * 24]) for label, a, b, c, d in rows
    ]
    both(CRITEO, "".join(text + end for text in lines).encode())


words = st.text(st.sampled_from(list('ab é|=?0",')), max_size=4)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("01"), fields, words, fields), max_size=6))
def test_arrays_hold_what_the_definition_says_of_text(rows):
    lines = [
        ",".join([label, price, '"' + shop.replace('"', '""') + '"', age])
        for label, price, shop, age in rows
    ]
    both(SHOPS, "".join(text + "\n" for text in lines).encode())


@given(st.binary(max_size=80))
def test_no_bytes_break_the_parser(raw):
    both(CRITEO, raw)
    parse_block(SHOPS, raw, lambda *_: None)

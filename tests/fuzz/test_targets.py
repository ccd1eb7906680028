"""Mutations of good files: read, or refused with a place; never a crash, and memory to match."""

import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

# What has broken parsers before.
SPLINTERS = [
    *(b"\n", b"\r\n", b"\r", b"\0", b" ", b"\t", b",", b":", b'"', b"'", b"=", b"[[", b"]]"),
    *(b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xd9\xa3", b'"\\ud800"', b"{}", b"[]"),
    *(b"0", b"-1", b"1e999", b"1e-400", b"NaN", b"nan", b"-Infinity", b"1_0", b"0x10"),
    *(b"null", b"true", b"9" * 19, b"99999999999", b"2147483648", b"18446744073709551616"),
    *(b"9" * 5000, b"0" * 400, b"[" * 2000, b'{"a":' * 2000),
]
MEMORY = 96 << 20


@st.composite
def mutations(draw, seeds):
    """A good file with some bytes replaced, repeated, moved or left out."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 24)))
        piece = draw(
            st.one_of(
                st.sampled_from(SPLINTERS),
                st.binary(max_size=4),
                st.just(data[begin:end] * 2),
                st.just(b""),
            )
        )
        data = data[:begin] + piece + data[end:]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_good_files_are_read(name):
    for data in TARGETS[name].seeds:
        with tempfile.TemporaryDirectory() as folder:
            TARGETS[name].run(data, Path(folder))


@pytest.mark.parametrize("name", TARGETS)
def test_bad_files_are_refused(name):
    target = TARGETS[name]

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(st.one_of(mutations(target.seeds), st.binary(max_size=64)))
    @example(b"")
    @example(b"\n")
    @example(b"9" * 18 + b" " + b"9" * 18 + b" " + b"2147483647\n")
    @example(b"[" * 100_000)
    def check(data):
        with tempfile.TemporaryDirectory() as folder:
            tracemalloc.start()
            try:
                target.run(data, Path(folder))
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert peak < MEMORY, f"{len(data)} bytes took {peak:,} bytes of memory"

    check()

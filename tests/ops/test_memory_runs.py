"""Runs of memory, against a comparison of all bytes."""

from hypothesis import given
from hypothesis import strategies as st

from subulp.ops.memory_runs import MemoryRuns

RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6)


def bytes_of(run):
    first, size = run
    return set(range(first, first + size))


def overlap(a, b):
    return bool(bytes_of(a) & bytes_of(b))


def split(runs):
    return [first for first, _ in runs], [size for _, size in runs]


@given(written=RUNS, read=RUNS)
def test_runs_that_share_bytes_are_found(written, read):
    runs = MemoryRuns(*split(written))
    pairs = [(i, j) for j in range(len(written)) for i in range(j)]
    assert (runs.clash is not None) == any(overlap(written[i], written[j]) for i, j in pairs)
    if runs.clash is not None:
        i, j = runs.clash
        assert i < j
        assert overlap(written[i], written[j])
        return
    met = runs.meet(*split(read))
    assert (met is not None) == any(overlap(w, r) for w in written for r in read)
    if met is not None:
        assert overlap(written[met[0]], read[met[1]])


def test_no_runs():
    assert MemoryRuns((), ()).clash is None
    assert MemoryRuns((), ()).meet([0], [8]) is None
    assert MemoryRuns([0], [8]).meet([], []) is None

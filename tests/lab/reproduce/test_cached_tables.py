"""What the claims on cached tables are measured by."""

import pytest

from subulp.lab.reproduce.cached_tables import claims, experiments, rows
from subulp.lab.reproduce.found import Found, Observation
from subulp.numerics import int_rows


def test_rounding_is_compared_with_numpy(monkeypatch):
    right = rows.rounding([4], 20, 8, 3)
    assert right.values("4 bits", "numbers that differ") == {None: 0}
    assert right.values("4 bits", "numbers a step or more away") == {None: 0}
    decode = int_rows.decode
    monkeypatch.setattr(int_rows, "decode", lambda of: decode(of) * 1.5)
    wrong = rows.rounding([4], 20, 8, 3)
    assert wrong.values("4 bits", "numbers that differ")[None] > 0
    assert wrong.values("4 bits", "numbers a step or more away")[None] > 0


def test_biased_rounding_is_told(monkeypatch):
    encode = int_rows.encode
    monkeypatch.setattr(
        int_rows,
        "encode",
        lambda x, bits, rounding="nearest", random=None: encode(
            x, bits, rounding, random=None if random is None else random | 1 << 31
        ),
    )
    found = rows.rounding([8], 100, 16, 4)
    assert found.values("8 bits", "mean error in standard errors")[None] < -10


def test_the_simulated_cache_keeps_what_is_used_most():
    cache = rows.Simulated(1, 2, "lfu")
    cache.batch([1, 1, 2])
    cache.batch([3])
    assert cache.resident == [1, 2]
    # As often as the least one is not more often.
    assert (cache.hits, cache.evictions) == (0, 0)
    cache.batch([3, 1])
    assert cache.resident == [1, 3]
    assert (cache.hits, cache.evictions) == (1, 1)


def test_the_simulated_cache_keeps_what_is_used_last():
    cache = rows.Simulated(1, 2, "lru")
    for batch in ([1], [2], [1], [3]):
        cache.batch(batch)
    assert cache.resident == [1, 3]
    # Rows of one batch are as late as each other.
    cache.batch([4, 5, 6])
    assert cache.resident == [4, 5]


def test_a_direct_mapped_cache_of_the_last_rows_always_takes_the_row():
    cache = rows.Simulated(2, 1, "lru")
    cache.batch([0, 2, 4, 1])
    assert cache.resident == [1, 4]
    assert cache.evictions == 2


@pytest.mark.parametrize("ways", [1, 4])
def test_tables_do_what_is_simulated(ways):
    found = rows.caching(64, 0.25, [ways], 12, 16)
    for policy in ("lfu", "lru"):
        case = f"{policy}, {ways}-way"
        assert found.values(case, "hits")[None] > 0
        assert found.values(case, "evictions")[None] > 0
        for quantity in ("hits more or fewer", "evictions more or fewer"):
            assert found.values(case, quantity) == {None: 0}
        assert found.values(case, "cached rows that differ") == {None: 0}


def test_drops_are_those_beside_fp32_with_the_same_seed():
    found = Found(
        tuple(
            Observation(case, "accuracy", value, seed)
            for case, values in {
                "no cache, fp32": (0.8, 0.5),
                "no cache, int8 nearest": (0.6, 0.5),
                "32-way, int8 nearest lfu 5%": (0.76, 0.51),
                "32-way, int8 nearest lfu 30%": (0.8, 0.5),
            }.items()
            for seed, value in enumerate(values)
        )
    )
    derived = Found(experiments._gains(found))
    drops = derived.values("no cache, int8 nearest", experiments.DROP)
    assert drops == pytest.approx({0: 25.0, 1: 0.0})
    # Nothing is recovered where nothing was lost.
    recovered = derived.values("32-way, int8 nearest lfu", experiments.RECOVERED)
    assert recovered == pytest.approx({0: 0.8})
    second = derived.values("32-way, int8 nearest lfu", experiments.SECOND)
    assert second == pytest.approx({0: 5 - 20, 1: -2 - 2})


def test_all_that_the_paper_prints_has_a_case():
    storages = 4 * 2 * 4 + 4 * 2 * 4 + 3 * 2 * 4 + 8
    assert len(claims._PRINTED) == storages
    assert claims._PRINTED["32-way, int8 stochastic lfu 5%"] == -0.014
    assert claims._PRINTED["direct, fp16 nearest lru 5%"] == 0.005


def test_bytes_by_the_width_of_a_row():
    found = rows.widths([8, 4], 0.01, [128, 512], 3200)
    for bits in (8, 4):
        for dim in (128, 512):
            lru, lfu = (rows.width_case(bits, policy, dim) for policy in ("lru", "lfu"))
            # Codes and cache; a scale and a bias; a tag and a stamp of a cached row, or a count.
            alone = bits / 32 + 0.01
            assert found.values(lru, rows.ALONE)[None] == pytest.approx(alone)
            expected = alone + (2 + 0.01 * 2) / dim
            assert found.values(lru, "compression")[None] == pytest.approx(expected)
            more = found.values(lfu, "compression")[None] - found.values(lru, "compression")[None]
            # LFU counts every row, and has a lower bound of each of its sets.
            assert more == pytest.approx((1 - 0.01) / dim, rel=0.01)

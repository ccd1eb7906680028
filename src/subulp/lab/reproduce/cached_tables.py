"""What the paper on cached embedding tables claims, place by place, and what repeats it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..tasks.ctr.config import CTRConfig
from . import rows
from .check import Check
from .claim import Claim, Experiment, Options, Part, published
from .found import Found, Observation
from .measurement import Measurement
from .training import Training

PAPER = "cached-tables"
SEEDS = (0, 1, 2)

DROP, ENTROPY, HITS = "accuracy drop, %", "entropy above FP32's, %", "hit rate"

_INTEGERS = ("int8", "int4", "int2")
_STORAGES = ("fp16", *_INTEGERS)
_ROUNDINGS = ("nearest", "stochastic")


def _same(name: str, words: str, *parts: Measurement) -> Experiment:
    """An experiment that is the same at every size."""
    return Experiment(name, dict.fromkeys(("smallest", "small", "paper"), words), lambda _: parts)


ROUNDING = _same(
    "cached-rounding",
    "2,000 random rows of 64 numbers, beside NumPy's FP32; each rounded 50 times at random",
    Measurement(
        "rounding", rows.rounding, {"bits": [8, 4, 2], "rows": 2000, "dim": 64, "draws": 50}
    ),
)

_WAYS = (1, 4, 32)

CACHING = _same(
    "cached-simulation",
    "60 batches of 64 accesses to 640 rows, a tenth of which are cached, beside plain Python",
    Measurement(
        "caching",
        rows.caching,
        {"rows": 640, "fraction": 0.1, "ways": list(_WAYS), "batches": 60, "lookups": 64},
    ),
)

_FACTORS = {
    (8, 0.0): 0.26563,
    (4, 0.0): 0.14063,
    (2, 0.0): 0.07813,
    (4, 0.3): 0.45078,
    (8, 0.1): 0.37422,
    (8, 0.05): 0.32383,
    (4, 0.1): 0.24922,
    (4, 0.05): 0.19883,
    (2, 0.1): 0.18672,
    (2, 0.05): 0.13633,
}
_FACTORS_PART = Measurement(
    # Shares of so many rows are whole sets of 32.
    "factors",
    rows.factors,
    {"tables": [list(t) for t in _FACTORS], "rows": 6400, "dim": 128},
)

FACTORS = _same(
    "cached-factors",
    "bytes of tables of 6,400 rows of 128 numbers, as they are kept",
    _FACTORS_PART,
)

SIZES = _same(
    "cached-sizes",
    "the tables of --preset criteo-kaggle",
    Measurement("sizes", rows.sizes, {"name": "criteo-kaggle"}),
)


def _accesses(options: Options) -> tuple[Part, ...]:
    return (Measurement("accesses", rows.accesses, {"data": options.data, "above": 1000}),)


ACCESSES = Experiment(
    "cached-accesses",
    dict.fromkeys(
        ("smallest", "small", "paper"),
        "the tables of Adult's crossed columns, or of data that is given, with more than 1,000 "
        "rows",
    ),
    _accesses,
)

# ------------------------------------------------------------------------ models

_DRAWN = "generated:examples=200000,tables=8,rows=8000,zipf=1.05"
_FEW = "generated:examples=2000,tables=4,rows=8000,zipf=1.05"
_DRIFT = ",drift=0.1"


def _ctr(options: Options, *, drift: bool = False, **own: object) -> CTRConfig:
    """A comparison of the size that was asked for."""
    shape: dict[str, object] = {
        "data": _DRAWN,
        "dim": 16,
        "bottom": (32,),
        "top": (64, 32),
        "batch_size": 128,
        "row_lr": 0.05,
    }
    if options.size == "smallest":
        shape |= {"data": _FEW, "batch_size": 32, "steps": 12}
    if drift:
        # What is near in time stays together, or caches would see no change.
        shape |= {"data": f"{shape['data']}{_DRIFT}", "shuffle_rows": 4096}
    if options.size == "paper":
        shape = {"batch_size": 128, "row_lr": 0.01, "preset": "criteo-kaggle"}
        if drift:
            shape["shuffle_rows"] = 1 << 16
    if options.data is not None:
        shape["data"] = options.data
    seeds = options.seeds or ((0,) if options.size == "smallest" else SEEDS)
    given = {"row_optimizer": "adagrad", "evaluations": 1, "seeds": seeds, "rounding": _ROUNDINGS}
    return CTRConfig(**{**given, **shape, **own})  # type: ignore[arg-type]


PLAIN, WIDE_SETS, DIRECT = "no cache,", "32-way,", "direct,"
_FP32 = f"{PLAIN} fp32"
_ASSOCIATIVITIES = (1, 2, 4, 8, 16, 32)


def _cached(options: Options) -> tuple[Part, ...]:
    """Tables 2 to 6: every precision, rounding, size of the cache, policy and associativity."""
    paper = options.size == "paper"
    shares = (0.05, 0.1, 0.3, 0.5) if paper else (0.05, 0.3, 0.5)
    few = (0.05, 0.1, 0.3, 0.5) if paper else (0.05, 0.3)
    plain = _ctr(options, precision=("fp32", *_STORAGES), cache_fraction=(0.0,))
    sets = _ctr(options, precision=_INTEGERS, cache_fraction=shares, policy=("lfu",), ways=(32,))
    direct = _ctr(
        options,
        precision=_STORAGES if paper else _INTEGERS,
        cache_fraction=few,
        policy=("lfu", "lru"),
        ways=(1,),
    )
    between = _ctr(
        options,
        precision=("int4",),
        rounding=("stochastic",),
        cache_fraction=(0.05,),
        policy=("lfu",),
        ways=_ASSOCIATIVITIES,
    )
    return (
        Training("no-cache", plain, PLAIN),
        Training("32-way", sets, WIDE_SETS),
        Training("direct", direct, DIRECT),
        Training("associativity", between, "ways,"),
        _FACTORS_PART,
    )


def _drops(found: Found, reference: str) -> list[Observation]:
    """How far every case is behind FP32 with the same seed."""
    accuracy = found.values(reference, "accuracy")
    entropy = found.values(reference, "normalised entropy")
    drops = []
    for o in found.observations:
        if o.quantity == "accuracy" and accuracy.get(o.seed):
            drop = 100 * (1 - o.value / accuracy[o.seed])
            drops.append(Observation(o.case, DROP, drop, o.seed))
        if o.quantity == "normalised entropy" and entropy.get(o.seed):
            above = 100 * (o.value / entropy[o.seed] - 1)
            drops.append(Observation(o.case, ENTROPY, above, o.seed))
    return drops


RECOVERED, SECOND = "share of the drop recovered at 5 %", "second gain less the first, %"


def _gains(found: Found) -> tuple[Observation, ...]:
    """Drops, what a cache of 5 % recovers of them, and whether later gains are smaller."""
    derived = _drops(found, _FP32)
    drops = Found(tuple(derived))

    def of(case: str) -> Mapping[int | None, float]:
        return drops.values(case, DROP)

    for storage in _INTEGERS:
        for rounding in _ROUNDINGS:
            name = f"{storage} {rounding}"
            for kind, policy in ((WIDE_SETS, "lfu"), (DIRECT, "lfu"), (DIRECT, "lru")):
                case = f"{kind} {name} {policy}"
                without, some, more = (
                    of(f"{PLAIN} {name}"),
                    of(f"{case} 5%"),
                    of(f"{case} 30%"),
                )
                for seed, drop in without.items():
                    if seed in some and drop > 0:
                        share = 1 - some[seed] / drop
                        derived.append(Observation(case, RECOVERED, share, seed))
                    if seed in some and seed in more:
                        gain = (some[seed] - more[seed]) - (drop - some[seed])
                        derived.append(Observation(case, SECOND, gain, seed))
    one, eight, most = (of(_with_ways(ways)) for ways in (1, 8, 32))
    for seed, drop in one.items():
        gain = (eight[seed] - most[seed]) - (drop - eight[seed])
        derived.append(Observation("ways", SECOND, gain, seed))
    return tuple(derived)


def _with_ways(ways: int) -> str:
    return f"ways, int4 stochastic lfu 5% {ways}-way"


CACHED = Experiment(
    "cached-grid",
    {
        "smallest": "as small, with 2,000 examples and 4 tables, 12 steps, one seed",
        "small": "DLRM with 8 tables of 8,000 and 2,000 rows of 16 numbers on 200,000 generated "
        "examples, one epoch in batches of 128",
        "paper": "DLRM with the paper's tables, rows of 128 numbers, on Criteo's data of yours, "
        "one epoch in batches of 128",
    },
    _cached,
    _gains,
)


def _drifting(options: Options) -> tuple[Part, ...]:
    """Tables 7 to 10: popularity moves on."""
    paper = options.size == "paper"
    shares = (0.001, 0.01, 0.1) if paper else (0.01, 0.1)
    plain = _ctr(options, drift=True, precision=("fp32", *_STORAGES), cache_fraction=(0.0,))
    sets = _ctr(
        options,
        drift=True,
        precision=_STORAGES if paper else _INTEGERS,
        cache_fraction=shares,
        policy=("lfu", "lru"),
        ways=(32,),
    )
    return (Training("no-cache", plain, PLAIN), Training("32-way", sets, WIDE_SETS))


DRIFTING = Experiment(
    "cached-drift",
    {
        "smallest": "as small, with 2,000 examples and 4 tables, 12 steps, one seed",
        "small": "DLRM with 8 tables of 8,000 and 2,000 rows of 16 numbers on 200,000 generated "
        "examples, in which the most popular category moves over a tenth of the others, one epoch "
        "in batches of 128",
        "paper": "DLRM with the tables of Criteo-Kaggle on Criteo's data of yours in the order of "
        "time, one epoch in batches of 128",
    },
    _drifting,
    lambda found: tuple(_drops(found, _FP32)),
)

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
        for rounding, value in zip(_ROUNDINGS, pair, strict=True)
    }


_PRINTED_PLAIN = {
    f"{PLAIN} {storage} {rounding}": value
    for rounding, row in _TABLE_2.items()
    for storage, value in zip(_STORAGES, row, strict=True)
}
_PRINTED = {
    **_PRINTED_PLAIN,
    **_printed(WIDE_SETS, "lfu", _TABLE_3, _INTEGERS),
    **_printed(DIRECT, "lru", _TABLE_4, _STORAGES),
    **_printed(DIRECT, "lfu", _TABLE_5, _STORAGES),
}
"""Accuracy drops on Criteo-Kaggle."""

_PRINTED_DRIFT = {
    **{
        f"{PLAIN} {storage} stochastic": value
        for storage, value in zip(_STORAGES, _TABLE_7, strict=True)
    },
    **_printed(WIDE_SETS, "lru", _TABLE_8, _STORAGES),
    **_printed(WIDE_SETS, "lfu", _TABLE_9, _STORAGES),
}
"""Drops of normalised entropy on the large data."""

_NEUTRAL = 0.02
"""Percent of a drop that the paper calls neutral."""

_GENERATED = (
    "Examples are generated instead of Criteo's: their popularity follows Zipf's law, and clicks "
    "depend on pairs of categories. Tables are small, and rows have 16 numbers."
)
_GENERATED_DRIFT = (
    "Examples are generated, and their popularity moves on, instead of an internal data set's. "
    "Rows have one category, not several."
)


def _less(says: str, case: str, than: str, of: str = DROP) -> Check:
    """A check that a case has less of something."""
    return Check(says, of, case, than=than, high=-1e-12)


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
        for storage in _INTEGERS
        for rounding in _ROUNDINGS
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
        for rounding in _ROUNDINGS
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
    return Claim(
        PAPER,
        place,
        says,
        CACHED,
        published=published(DROP, own),
        checks=checks,
        shows=tuple(dict.fromkeys((*shows, *(check.quantity for check in checks)))),
        cases=cases,
        differs=" ".join(filter(None, (_GENERATED, differs))),
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
        checks=checks,
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
            for ways in _WAYS
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
            "compression", {rows.factor_case(*table): value for table, value in _FACTORS.items()}
        ),
        checks=tuple(
            Check(
                f"{rows.factor_case(*table)}: {value}",
                "compression",
                rows.factor_case(*table),
                low=value - 5.1e-6,
                high=value + 5.1e-6,
            )
            for table, value in _FACTORS.items()
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
            *(
                _less(
                    f"{storage}: stochastic is better",
                    f"{PLAIN} {storage} stochastic",
                    f"{PLAIN} {storage} nearest",
                )
                for storage in _INTEGERS
            ),
            *(
                _less(
                    f"{wide} is better than {narrow}, {rounding}",
                    f"{PLAIN} {wide} {rounding}",
                    f"{PLAIN} {narrow} {rounding}",
                )
                for rounding in _ROUNDINGS
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
                for storage in _INTEGERS
                for rounding in _ROUNDINGS
            ),
        ),
        cases=(PLAIN, WIDE_SETS),
    ),
    *(
        _trained(
            place,
            f"A direct-mapped {policy.upper()} cache recovers much of the drop.",
            _recovers(DIRECT, policy, (5, 30)),
            cases=(
                PLAIN,
                *(f"{DIRECT} {s} {r} {policy}" for s in _STORAGES for r in _ROUNDINGS),
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
            for storage in _INTEGERS
            for rounding in _ROUNDINGS
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
            _less("32 ways beat 1", _with_ways(32), _with_ways(1)),
            Check("8 to 32 ways gain less than 1 to 8", SECOND, "ways", high=0.0),
        ),
        printed={},
        cases=("ways",),
        differs="INT4 with 5 % and stochastic rounding alone.",
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
            *(
                _less(
                    f"{storage}: stochastic is better",
                    f"{PLAIN} {storage} stochastic",
                    f"{PLAIN} {storage} nearest",
                    ENTROPY,
                )
                for storage in _INTEGERS
            ),
            *(
                Check(
                    f"{storage} stochastic is not neutral",
                    ENTROPY,
                    f"{PLAIN} {storage} stochastic",
                    low=_NEUTRAL,
                )
                for storage in _INTEGERS
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
                for storage in _INTEGERS
                for rounding in _ROUNDINGS
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
                    for storage in _INTEGERS
                    for rounding in _ROUNDINGS
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
        "Training is 16 % faster, and look-ups 25.8 times at a hit rate of 95 %.",
        not_run=_TIERS,
    ),
    Claim(
        PAPER,
        "Abstract, 7 times",
        "INT4 with a cache of 1 % takes a seventh of the memory, and is neutral.",
        not_run="the rows' dimension is not given: for INT8 and 1 % the paper has 0.259, and codes "
        "and cache alone are 0.26; Table 8 has the accuracy",
    ),
)

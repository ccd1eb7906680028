"""What is trained and measured to repeat what the paper on cached embedding tables claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...tasks.ctr.config import CTRConfig
from ..claim import Experiment, Options, Part
from ..found import Found, Observation
from ..measurement import Measurement
from ..training import Training
from . import rows

THREE = (0, 1, 2)
"""Where main effects are to be learned, FP32's entropy differs by about a thousandth."""
SEEDS = tuple(range(6))
"""As many as a cache's gain needs to show among what seeds differ by."""

DROP, ENTROPY, HITS = "accuracy drop, %", "entropy above FP32's, %", "hit rate"

INTEGERS = ("int8", "int4", "int2")
STORAGES = ("fp16", *INTEGERS)
ROUNDINGS = ("nearest", "stochastic")


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

WAYS = (1, 4, 32)

CACHING = _same(
    "cached-simulation",
    "60 batches of 64 accesses to 640 rows, a tenth of which are cached, beside plain Python",
    Measurement(
        "caching",
        rows.caching,
        {"rows": 640, "fraction": 0.1, "ways": list(WAYS), "batches": 60, "lookups": 64},
    ),
)

PRINTED_FACTORS = {
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
    {"tables": [list(t) for t in PRINTED_FACTORS], "rows": 6400, "dim": 128},
)

FACTORS = _same(
    "cached-factors",
    "bytes of tables of 6,400 rows of 128 numbers, as they are kept",
    _FACTORS_PART,
)

DIMS = (128, 512, 2048, 8192)
WIDTHS = _same(
    "cached-widths",
    "bytes of tables of 3,200 rows of 128 to 8,192 numbers, 32 of them cached, as they are kept",
    Measurement(
        "widths",
        rows.widths,
        {"bits": [8, 4], "fraction": 0.01, "dims": list(DIMS), "rows": 3200},
    ),
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
# A cache of 1 % holds more rows than a batch has, and hit rates are near the paper's. Without
# main effects FP32 learns nothing with one seed in six.
_MOVING = (
    "generated:examples=1000000,tables=4,rows=50000,zipf=0.9,drift=0.02,signal=4,main_effects=1"
)


def _ctr(options: Options, *, drift: bool = False, **own: object) -> CTRConfig:
    """A comparison of the size that was asked for."""
    shape: dict[str, object] = {
        "data": _MOVING if drift else _DRAWN,
        "dim": 16,
        "bottom": (32,),
        "top": (64, 32),
        "batch_size": 128,
        "row_lr": 0.05,
    }
    if options.size == "smallest":
        shape |= {"data": f"{_FEW},drift=0.02" if drift else _FEW, "batch_size": 32, "steps": 12}
    if drift:
        # What is near in time stays together, or caches would see no change.
        shape["shuffle_rows"] = 4096
    if options.size == "paper":
        options.check_data("criteo:FILE")
        shape = {"batch_size": 128, "row_lr": 0.01, "preset": "criteo-kaggle"}
        if drift:
            shape["shuffle_rows"] = 1 << 16
    if options.data is not None:
        shape["data"] = options.data
    seeds = options.seeds_or(SEEDS)
    given = {"row_optimizer": "adagrad", "evaluations": 1, "seeds": seeds, "rounding": ROUNDINGS}
    return CTRConfig(**{**given, **shape, **own})  # type: ignore[arg-type]


PLAIN, WIDE_SETS, DIRECT = "no cache,", "32-way,", "direct,"
_FP32 = f"{PLAIN} fp32"
_ASSOCIATIVITIES = (1, 2, 4, 8, 16, 32)
NARROWEST = ("int4", "int2")
"""Storages whose drop is large enough for sets to matter."""


def _cached(options: Options) -> tuple[Part, ...]:
    """Tables 2 to 6: every precision, rounding, size of the cache, policy and associativity."""
    paper = options.size == "paper"
    shares = (0.05, 0.1, 0.3, 0.5) if paper else (0.05, 0.3, 0.5)
    few = (0.05, 0.1, 0.3, 0.5) if paper else (0.05, 0.3)
    plain = _ctr(options, precision=("fp32", *STORAGES), cache_fraction=(0.0,))
    sets = _ctr(options, precision=INTEGERS, cache_fraction=shares, policy=("lfu",), ways=(32,))
    direct = _ctr(
        options,
        precision=STORAGES if paper else INTEGERS,
        cache_fraction=few,
        policy=("lfu", "lru"),
        ways=(1,),
    )
    between = _ctr(
        options,
        precision=NARROWEST,
        rounding=("stochastic",),
        cache_fraction=(0.05, 0.3),
        policy=("lfu", "lru"),
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
    """Drops, and what caches recover of them."""
    drops = _drops(found, _FP32)
    return (*drops, *recovered(Found(tuple(drops))))


def recovered(drops: Found) -> tuple[Observation, ...]:
    """What a cache of 5 % recovers of drops, and whether later gains are smaller."""
    derived = []

    def of(case: str) -> Mapping[int | None, float]:
        return drops.values(case, DROP)

    for storage in INTEGERS:
        for rounding in ROUNDINGS:
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
    for storage in NARROWEST:
        one, eight, most = (of(with_ways(storage, ways)) for ways in (1, 8, 32))
        for seed, drop in one.items():
            gain = (eight[seed] - most[seed]) - (drop - eight[seed])
            derived.append(Observation(f"ways, {storage}", SECOND, gain, seed))
    return tuple(derived)


def with_ways(storage: str, ways: int) -> str:
    """The case of an LFU cache of 5 % whose sets have so many ways."""
    return f"ways, {storage} stochastic lfu 5% {ways}-way"


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
    seeds = options.seeds_or(THREE)
    plain = _ctr(
        options, drift=True, seeds=seeds, precision=("fp32", *STORAGES), cache_fraction=(0.0,)
    )
    sets = _ctr(
        options,
        drift=True,
        seeds=seeds,
        precision=STORAGES if paper else INTEGERS,
        cache_fraction=shares,
        policy=("lfu", "lru"),
        ways=(32,),
    )
    return (Training("no-cache", plain, PLAIN), Training("32-way", sets, WIDE_SETS))


DRIFTING = Experiment(
    "cached-drift",
    {
        "smallest": "as small, with 2,000 examples and 4 tables, 12 steps, one seed",
        "small": "DLRM with 4 tables of 50,000 and 12,500 rows of 16 numbers on a million "
        "generated examples with main effects, in which the most popular category moves over 2 % "
        "of the others, one epoch in batches of 128",
        "paper": "DLRM with the tables of Criteo-Kaggle on Criteo's data of yours in the order of "
        "time, one epoch in batches of 128",
    },
    _drifting,
    lambda found: tuple(_drops(found, _FP32)),
)


def _again(trained: Callable[..., CTRConfig]) -> tuple[Part, ...]:
    """Tables 2 and 3 on other data, the caches rounded stochastically."""
    plain = trained(precision=("fp32", *INTEGERS), cache_fraction=(0.0,), rounding=ROUNDINGS)
    byte = trained(precision=("int8",), cache_fraction=(0.05,), rounding=("stochastic",))
    narrow = trained(precision=NARROWEST, cache_fraction=(0.05, 0.3), rounding=("stochastic",))
    return (
        Training("no-cache", plain, PLAIN),
        Training("32-way-int8", byte, WIDE_SETS),
        Training("32-way", narrow, WIDE_SETS),
    )


def _late(options: Options) -> tuple[Part, ...]:
    """A public data set."""
    options.check_data("criteo:FILE or csv:FILE")
    shape: dict[str, object] = {"data": options.data or "flights", "batch_size": 128}
    if options.size == "smallest":
        shape |= {"steps": 12, "dim": 4, "batch_size": 32}
    shape |= {"evaluations": 1, "seeds": options.seeds_or(SEEDS), "policy": ("lfu",), "ways": (32,)}
    return _again(lambda **own: CTRConfig(**{**shape, **own}))


LATE = Experiment(
    "cached-flights",
    {
        "smallest": "as small, with rows of 4 numbers, 12 steps, one seed",
        "small": "DLRM with the 36 tables of subulp train ctr on flights, one epoch in batches of "
        "128",
        "paper": "DLRM with the same rows on data of yours, one epoch in batches of 128",
    },
    _late,
    _gains,
)


def _many(options: Options) -> tuple[Part, ...]:
    """Generated examples of the shape of Criteo's."""
    own: dict[str, object] = {"policy": ("lfu",), "ways": (32,)}
    if options.size != "paper" and options.data is None:
        # Of fewer, nothing is learned about as many pairs.
        examples = 2000 if options.size == "smallest" else 1_000_000
        own["data"] = f"generated:examples={examples},tables=26,numbers=13,rows=8000,zipf=1.05"
    return _again(lambda **given: _ctr(options, **{**own, **given}))


MANY_TABLES = Experiment(
    "cached-26-tables",
    {
        "smallest": "as small, with 2,000 examples, 12 steps, one seed",
        "small": "DLRM with 26 tables of 8,000 and 2,000 rows of 16 numbers and 13 columns of "
        "numbers, the shape of Criteo's, on a million generated examples, one epoch in batches of "
        "128",
        "paper": "DLRM with the paper's tables, rows of 128 numbers, on Criteo's data of yours, "
        "one epoch in batches of 128",
    },
    _many,
    _gains,
)

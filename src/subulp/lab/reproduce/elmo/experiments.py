"""What is trained and measured to repeat what ELMO claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...tasks.xmc.config import XMCConfig
from ...tasks.xmc.presets import KAHAN
from ..claim import Experiment, Options, Part
from ..found import Found, Observation
from ..measurement import Measurement, in_processes, measured
from ..training import Training
from . import (
    classifier_memory,
    classifier_step,
    exponents,
    initial,
    linear_tree,
    model_trace,
    narrow_sums,
    overflow,
    transients,
)

SEEDS, SIX, TEN = (0, 1, 2), tuple(range(6)), tuple(range(10))
"""The more, the more seeds differ beside what is asked."""

WIDE, RENEE, BF16, FP8 = "fp32", "renee", "bf16", "fp8"
ROWS = (WIDE, RENEE, BF16, FP8)

TEXTS, BAGS = "label texts", "no label texts"
_PAPER_DATA = {TEXTS: "LF-AmazonTitles-131K", BAGS: "AmazonTitles-670K"}
"""The paper's data sets that stand for the two kinds."""

# ------------------------------------------------------------------------------ comparisons


def _xmc(options: Options, kind: str, precision: Sequence[str], **own: object) -> XMCConfig:
    """A comparison of the size that was asked for, on one kind of data.

    The small one trains the bag encoder; the paper's is a row of its Table 9. One thread, and
    operands of the products that no machine chooses: rows in FP8 have the paper's, without
    remainders where the paper has none, and an encoder that is stepped as the authors'.
    """
    given: dict[str, object] = {
        "seeds": options.seeds_or(SEEDS),
        "precision": tuple(precision),
        "threads": 1,
        "products": "fp8" if FP8 in precision else "fp32" if set(precision) == {WIDE} else "bf16",
        "watch_every": 10**9,
        "encoder_precision": KAHAN,
        "head_fraction": 0.0,
    }
    if options.size == "paper":
        return XMCConfig(**{**given, **_papers(options, kind, precision), **own})  # type: ignore[arg-type]
    if options.size == "smallest":
        given |= {"width": 16, "layers": 1, "batch_size": 32, "steps": 12, "eval_epochs": 10**6}
        given["generated_labels"] = 256
        own = {name: v for name, v in own.items() if name not in ("epochs", *given)}
    elif kind == TEXTS:
        given |= {"width": 128, "layers": 1, "batch_size": 256, "epochs": 4, "head_lr": 0.1}
        given["data"] = None if options.data is None else Path(options.data)
    else:
        given |= {"width": 64, "layers": 1, "batch_size": 128, "epochs": 8, "head_lr": 0.2}
        given["generated_labels"] = 4096
    return XMCConfig(**{**given, **own})  # type: ignore[arg-type]


def _papers(options: Options, kind: str, precision: Sequence[str]) -> dict[str, object]:
    """Data, transformer and hyperparameters of the paper."""
    if options.data is None or options.encoder is None:
        raise ValueError(
            "size=paper needs data and encoder: give --data DIR, a folder that has "
            f"{_PAPER_DATA[kind]}, and --encoder DIR, the transformer"
        )
    name = _PAPER_DATA[kind]
    row = FP8 if FP8 in precision else BF16
    return {
        "preset": f"{name.lower()}-{row}",
        "data": Path(options.data) / name,
        "encoder": options.encoder,
    }


def _comparison(
    options: Options, kind: str, precision: Sequence[str], **own: object
) -> list[Training]:
    """Rows in FP8 and others: their products have other operands, and in the paper other rates."""
    folder, case = kind.replace(" ", "-"), f"{kind},"
    parts: list[Training] = []
    wide = tuple(name for name in precision if name != FP8)
    for name, chosen in (("others", wide), (FP8, (FP8,))):
        if chosen and set(chosen) <= set(precision):
            config = _xmc(options, kind, chosen, **own)
            parts.append(Training(f"{folder}-{name}", config, case, ("training loss", "P@1")))
    return parts


HEAD, POST_HOC = f"{TEXTS}, head Kahan", f"{TEXTS}, post-hoc"


def _quality(options: Options) -> tuple[Part, ...]:
    """Tables 2, 6, 7 and 8."""
    seeds = options.seeds_or(TEN)
    head = _xmc(options, TEXTS, (FP8,), head_fraction=0.2, seeds=seeds)
    refined = _xmc(options, TEXTS, (FP8,), refine_epochs=1, seeds=seeds)
    return (
        *_comparison(options, TEXTS, ROWS, seeds=seeds),
        *_comparison(options, BAGS, ROWS, seeds=seeds),
        Training("head-kahan", head, HEAD),
        Training("post-hoc", refined, POST_HOC),
    )


_SMALLEST = "a generated set of 256 labels, a width of 16, 12 steps, one seed"

QUALITY = Experiment(
    "elmo-quality",
    {
        "smallest": _SMALLEST,
        "small": "a bag encoder on the definitions of 10,222 words and on a generated set of 4,096 "
        "labels without texts; four and eight epochs",
        "paper": "a transformer of yours in BF16 on LF-AmazonTitles-131K and AmazonTitles-670K of "
        "yours, with the hyperparameters of Table 9, for baselines those of BF16 rows",
    },
    _quality,
)


LARGER = "131,072 labels"
"""What the cases of the larger set are called."""


def _larger(options: Options) -> tuple[Part, ...]:
    """Table 2 on a set of more labels."""
    own = {"generated_labels": 131_072, "batch_size": 512, "epochs": None, "steps": 200}
    return tuple(
        Training(name, _xmc(options, BAGS, chosen, **own), f"{LARGER},", ("training loss", "P@1"))
        for name, chosen in (("others", (RENEE, BF16)), (FP8, (FP8,)), (WIDE, (WIDE,)))
    )


LARGER_SET = Experiment(
    "elmo-many-labels",
    {
        "smallest": _SMALLEST,
        "small": "a bag encoder of width 64 on a generated set of 131,072 labels without texts, "
        "200 steps of 512 instances",
    },
    _larger,
)


SAMPLED, SHORTLIST = "sampled", "shortlist"
NEGATIVES = (SAMPLED, SHORTLIST)


def _sampling(options: Options) -> tuple[Part, ...]:
    """Table 2's other half: classifiers that train on some of the labels, and a linear tree."""
    parts: list[Part] = []
    for kind in (TEXTS, BAGS):
        parts += _comparison(options, kind, (WIDE, *NEGATIVES, BF16, FP8))
        # The tree reads terms, which a transformer does not have.
        if options.size != "paper":
            config = _xmc(options, kind, (BF16,))
            name = f"{kind.replace(' ', '-')}-{linear_tree.TREE}"
            settings = {
                "case": f"{kind}, {linear_tree.TREE}",
                "seeds": list(options.seeds_or(SEEDS)),
            }
            parts.append(Measurement(name, partial(linear_tree.quality, config), settings))
    return tuple(parts)


SAMPLING = Experiment(
    "elmo-sampling",
    {
        "smallest": _SMALLEST,
        "small": "a bag encoder on the definitions of 10,222 words and on a generated set of 4,096 "
        "labels without texts; four and eight epochs; 1,024 negatives drawn for each batch, or the "
        "labels of 16 clusters of up to 32 for each instance",
        "paper": "a transformer of yours in BF16 on LF-AmazonTitles-131K and AmazonTitles-670K of "
        "yours, with the hyperparameters of Table 9, for baselines those of BF16 rows",
    },
    _sampling,
)


FP8_ENCODER = f"{FP8}, FP8 encoder"


def _encoders(options: Options) -> tuple[Part, ...]:
    """Table 4: the linear layers of the encoder in BF16 or FP8."""
    narrow = "torchao-fp8" if options.size == "paper" else "e4m3"
    parts = _comparison(options, TEXTS, (FP8,), linear=("bf16", narrow))
    return tuple(replace(part, called={f"{FP8} {narrow}": FP8_ENCODER}) for part in parts)


ENCODERS = Experiment(
    "elmo-encoders",
    {
        "smallest": f"the encoder's linear layers in E4M3: {_SMALLEST}",
        "small": "a bag encoder on the definitions of 10,222 words, whose linear layers multiply "
        "in BF16, or in E4M3 with a scale for each block of 128 x 128",
        "paper": "a transformer of yours on LF-AmazonTitles-131K of yours, with torchao's layers",
    },
    _encoders,
)

_BITS = tuple((e, m) for e in (2, 3, 4, 5) for m in (1, 3, 5))


def _grid(options: Options) -> tuple[Part, ...]:
    """Figure 2(a)."""
    bits = ((2, 3), (4, 3)) if options.size == "smallest" else _BITS
    names = [f"e{e}m{m}{rounding}" for e, m in bits for rounding in ("", "+nearest")]
    own: dict[str, object] = {"products": "fp32", "seeds": options.seeds_or(SIX)}
    if options.size == "small":
        own |= {"width": 64, "batch_size": 512, "epochs": 2, "head_lr": 0.05}
    config = _xmc(options, TEXTS, (WIDE, BF16, f"{BF16}+nearest", *names), **own)
    return (Training("grid", config),)


GRID = Experiment(
    "elmo-formats",
    {
        "smallest": f"four formats: {_SMALLEST}",
        "small": "24 formats on the definitions of 10,222 words: a bag encoder of width 64, two "
        "epochs in batches of 512, products in FP32",
        "paper": "24 formats on LF-AmazonTitles-131K of yours, with a transformer of yours",
    },
    _grid,
)

_RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
_BATCHES = (64, 256)


def _rates(options: Options) -> tuple[Part, ...]:
    """Table 9: rates and batches of each storage."""
    rates, batches = ((0.1, 0.2), (32,)) if options.size == "smallest" else (_RATES, _BATCHES)
    parts = []
    for rate in rates:
        for batch in batches:
            own: dict[str, object] = {"head_lr": rate, "batch_size": batch}
            if options.size == "small":
                own |= {"generated_labels": 2048, "epochs": 6}
            for part in _comparison(options, BAGS, ROWS, **own):
                name = f"rate-{rate}-batch-{batch}-{part.name.rpartition('-')[2]}"
                parts.append(Training(name, part.config, f"rate {rate}, batch {batch},"))
    return tuple(parts)


def best(found: Found) -> tuple[Observation, ...]:
    """Each storage at the rate and batch at which its P@1, in the mean over the seeds, is best."""
    cases = list(dict.fromkeys(o.case for o in found.observations if o.quantity == "P@1"))
    chosen = []
    for storage in ROWS:
        own = [case for case in cases if case.endswith(f", {storage}")]
        if not own:
            continue
        means = {c: statistics.fmean(found.values(c, "P@1").values()) for c in own}
        at = max(own, key=lambda case: means[case] if math.isfinite(means[case]) else -math.inf)
        for quantity in ("P@1", "P@3", "P@5"):
            chosen += [
                Observation(f"best {storage}", quantity, value, seed)
                for seed, value in found.values(at, quantity).items()
            ]
        rate, batch = (float(word.rstrip(",")) for word in at.split()[1::2][:2])
        chosen.append(Observation(f"best {storage}", "rate of the classifier", rate))
        chosen.append(Observation(f"best {storage}", "batch", batch))
    return tuple(chosen)


RATES = Experiment(
    "elmo-rates",
    {
        "smallest": f"two rates: {_SMALLEST}",
        "small": "five rates and two batches of each storage on a generated set of 2,048 labels, a "
        "bag encoder of width 64, six epochs",
        "paper": "the same rates and batches with a transformer of yours on AmazonTitles-670K of "
        "yours",
    },
    _rates,
    best,
)

# ----------------------------------------------------------------------------- measurements


def _histograms(options: Options) -> tuple[Part, ...]:
    """Figures 2(b) and 5."""
    config: dict[str, object] = {"threads": 1, "watch_every": 10**9, "device": "cpu"}
    if options.size == "smallest":
        config |= {"generated_labels": 256, "width": 16, "batch_size": 32, "steps": 12}
    else:
        config |= {"width": 128, "batch_size": 128, "epochs": 2, "head_lr": 0.2}
        config["data"] = options.data
    return tuple(
        Measurement(
            f"seed-{seed}", exponents.exponents, {"config": config, "seed": seed, "batches": 4}
        )
        for seed in options.seeds_or(SEEDS)
    )


EXPONENTS = Experiment(
    "elmo-exponents",
    {
        "smallest": _SMALLEST,
        "small": "FP32 training of a bag encoder of width 128 on the definitions of 10,222 words, "
        "two epochs; gradients and inputs of four batches",
    },
    _histograms,
)

_AT = (2_812_281, 8_623_847, 18_000_000)
_BERT = {"vocabulary": 30_522, "width": 768, "layers": 12, "heads": 12}


def _memory(options: Options) -> tuple[Part, ...]:
    """Figure 4, and the numbers of the abstract."""
    labels = {
        # Fewer would be lost among the pages that a process takes anyway.
        "smallest": [65_536, 262_144],
        "small": [65_536, 131_072, 393_216],
        "paper": [131_072, 670_091, *_AT],
    }[options.size]
    small = options.size == "smallest"
    shape = {**_BERT, "layers": 1, "width": 64, "heads": 2} if small else _BERT
    dim, batch, tokens = (64, 16, 16) if small else (768, 128, 128)
    settings = {"storages": [RENEE, BF16, FP8], "labels": labels, "at": list(_AT)}
    settings |= {"dim": dim, "batch": batch, "threads": 1}
    return (
        in_processes("classifier", classifier_memory.by_labels, settings, options.size),
        Measurement(
            "encoder",
            classifier_memory.encoder,
            {"shape": shape, "tokens": tokens, "batches": [1, 2], "at": batch},
        ),
    )


def with_encoder(found: Found) -> tuple[Observation, ...]:
    """What a step needs while the classifier trains: it comes on top of all of the encoder's."""
    (encoder,) = found.values("encoder", "GiB by a line").values()
    return tuple(
        Observation(o.case, "GiB with an encoder", o.value + encoder, o.seed)
        for o in found.observations
        if o.quantity == "GiB of the classifier by a line"
    )


MEMORY = Experiment(
    "elmo-memory",
    {
        "smallest": "65,536 and 262,144 labels of 64 numbers",
        "small": "65,536, 131,072 and 393,216 labels of 768 numbers, batches of 128, resident "
        "memory of a process each, five times, each a seed; live tensors of BERT-base at one and "
        "two texts of 128 tokens; all read at the paper's numbers by straight lines",
        "paper": "131,072 to 18 million labels of 768 numbers, batches of 128, five times",
    },
    _memory,
    with_encoder,
)


def _trace(options: Options) -> tuple[Part, ...]:
    labels = {"smallest": 4096, "small": 65_536, "paper": _AT[0]}[options.size]
    settings = {"storages": [RENEE, BF16, FP8], "labels": labels, "dim": 768, "batch": 128}
    return (Measurement("trace", classifier_memory.trace, {**settings, "chunks": 8}),)


TRACE = Experiment(
    "elmo-trace",
    {
        "smallest": "4,096 labels of 768 numbers",
        "small": "65,536 labels of 768 numbers, a batch of 128, live tensors",
        "paper": "2,812,281 labels of 768 numbers, a batch of 128, live tensors",
    },
    _trace,
)


def _model_trace(options: Options) -> tuple[Part, ...]:
    """Figures 1 and 3, at the paper's proportions of classifier and encoder as far as they fit."""
    small = {"vocabulary": 8192, "width": 256, "layers": 4, "heads": 4}
    settings = {
        "smallest": {
            "shape": {**small, "width": 64, "layers": 1, "vocabulary": 512},
            "labels": 8192,
            "tokens": 8,
            "batch": 4,
        },
        "small": {"shape": small, "labels": 131_072, "tokens": 32, "batch": 32},
        "paper": {"shape": _BERT, "labels": _AT[0], "tokens": 128, "batch": 128},
    }[options.size]
    settings |= {"storages": [RENEE, BF16, FP8], "chunks": 8}
    return (Measurement("model trace", model_trace.trace, settings),)


MODEL_TRACE = Experiment(
    "elmo-model-trace",
    {
        "smallest": "8,192 labels of 64 numbers, a BERT of one layer",
        "small": "131,072 labels of 256 numbers, a BERT of four layers, 32 texts of 32 tokens, "
        "live tensors",
        "paper": "2,812,281 labels of 768 numbers, BERT-base, 128 texts of 128 tokens, live "
        "tensors",
    },
    _model_trace,
)


def _initial(options: Options) -> tuple[Part, ...]:
    """Section 4.4, at the paper's number of labels."""
    labels = {"smallest": 1024, "small": 16_384, "paper": _AT[0]}[options.size]
    shape = {name: size for name, size in _BERT.items() if name != "layers"}
    layers = _BERT["layers"]
    if options.size == "smallest":
        shape |= {"width": 64, "heads": 2}
        texts = {**_BERT, "layers": 1, "width": 64, "heads": 2}
    else:
        texts = _BERT
    settings = {"labels": labels, "at": _AT[0], "dim": 768, "batch": 128, "chunks": 8}
    return (
        Measurement("stored", initial.stored, {"labels": _AT[0], "dim": 768, "head_fraction": 0.2}),
        Measurement("step", initial.steps, settings),
        Measurement(
            "encoders", initial.encoders, {"shape": {**shape, "context": 128}, "layers": layers}
        ),
        Measurement(
            "activations",
            classifier_memory.encoder,
            {"shape": texts, "tokens": 128, "batches": [1, 2], "at": 128},
        ),
    )


def _at_first(found: Found) -> tuple[Observation, ...]:
    (text,) = found.values("encoder", "GiB of a text").values()
    return (*initial.together(found), Observation("encoder", ACTIVATIONS, 128 * text))


ACTIVATIONS = "GiB of activations of 128 texts"

INITIAL = Experiment(
    "elmo-initial",
    {
        "smallest": "a step with 1,024 labels, an encoder of width 64",
        "small": "classifiers of 2,812,281 labels of 768 numbers without data; a step with 16,384 "
        "labels, a batch of 128 and 8 chunks, scaled by the labels; BERT-base's states after a "
        "step of one and two layers, and its activations of one and two texts of 128 tokens, by "
        "straight lines",
        "paper": "classifiers, a step and BERT-base likewise, all with 2,812,281 labels",
    },
    _initial,
    _at_first,
)

PARTS = (1, 2, 4, 8)


def _transients(options: Options) -> tuple[Part, ...]:
    labels, dim, batch = {
        "smallest": (512, 16, 4),
        "small": (32_768, 64, 16),
        "paper": (2_812_288, 768, 128),
    }[options.size]
    settings = {"storages": [BF16, FP8], "chunks": list(PARTS), "labels": labels}
    return (Measurement("chunks", transients.by_chunks, {**settings, "dim": dim, "batch": batch}),)


TRANSIENTS = Experiment(
    "elmo-transients",
    {
        "smallest": "512 labels of 16 numbers",
        "small": "32,768 labels of 64 numbers, a batch of 16, live tensors of a step in plain "
        "PyTorch",
        "paper": "2,812,288 labels of 768 numbers, a batch of 128, likewise",
    },
    _transients,
)

FEW, MANY = 1024, 65_536


def _overflow(options: Options) -> tuple[Part, ...]:
    labels, steps = ([256, FEW], 3) if options.size == "smallest" else ([FEW, MANY], 12)
    settings = {"labels": labels, "dim": 64, "batch": 32, "steps": steps}
    return (
        Measurement(
            "growth", overflow.growth, {**settings, "seeds": list(options.seeds_or(SEEDS))}
        ),
    )


OVERFLOW = Experiment(
    "elmo-overflow",
    {
        "smallest": "three steps of classifiers of 256 and 1,024 labels",
        "small": "twelve steps of classifiers of 1,024 and 65,536 labels of 64 numbers, batches of "
        "32 random inputs that have their mean in common",
    },
    _overflow,
)

_CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128)


def _by_chunks(options: Options) -> tuple[Part, ...]:
    labels = {"smallest": 4096, "small": 131_072, "paper": _AT[0]}[options.size]
    settings = {"storage": BF16, "chunks": list(_CHUNKS), "labels": labels, "dim": 768}
    if options.size == "smallest":
        settings |= {"chunks": [1, 8], "dim": 64}
    settings |= {"batch": 128, "threads": 1}
    return (in_processes("chunks", classifier_memory.by_chunks, settings, options.size),)


CHUNKS = Experiment(
    "elmo-chunks",
    {
        "smallest": "1 and 8 chunks of 4,096 labels of 64 numbers",
        "small": "1 to 128 chunks of 131,072 labels of 768 numbers, a batch of 128, in five "
        "processes, each a seed",
        "paper": "1 to 128 chunks of 2,812,281 labels of 768 numbers, a batch of 128, in five "
        "processes, each a seed",
    },
    _by_chunks,
)


def _speed(options: Options) -> tuple[Part, ...]:
    labels = {"smallest": 2048, "small": 32_768, "paper": _AT[0]}[options.size]
    settings = {"storages": [RENEE, BF16, FP8], "labels": labels, "dim": 768, "batch": 128}
    settings |= {"threads": 1, "rounds": 2 if options.size == "smallest" else 9}
    return (in_processes("steps", classifier_memory.by_storage, settings, options.size),)


SPEED = Experiment(
    "elmo-speed",
    {
        "smallest": "2,048 labels of 768 numbers, two steps",
        "small": "the classifier's step alone: 32,768 labels of 768 numbers, a batch of 128, nine "
        "steps by turns, one thread, in five processes, each a seed",
        "paper": "the classifier's step alone: 2,812,281 labels of 768 numbers, a batch of 128, in "
        "five processes, each a seed",
    },
    _speed,
)


def _dropout(options: Options) -> tuple[Part, ...]:
    labels = {"smallest": 4096, "small": 262_144, "paper": _AT[0]}[options.size]
    settings = {"storage": BF16, "dropout": 0.5, "labels": labels, "dim": 768}
    settings |= {"batch": 16, "threads": 1}
    return (in_processes("dropout", classifier_memory.dropouts, settings, options.size),)


DROPOUT = Experiment(
    "elmo-dropout",
    {
        "smallest": "4,096 labels of 768 numbers",
        "small": "262,144 labels of 768 numbers in BF16, a batch of 16, resident memory of a "
        "process each, five times, each a seed",
        "paper": "2,812,281 labels of 768 numbers in BF16, a batch of 16, resident memory of a "
        "process each, five times",
    },
    _dropout,
)

STEP = measured(
    "elmo-step",
    "a step of 512 labels of 64 numbers and 32 instances, whose sums are the same in any order",
    Measurement("fp8", classifier_step.fp8, {"labels": 512, "dim": 64, "batch": 32}),
)

GRADIENTS = measured(
    "elmo-gradients",
    "a step of 512 labels of 64 numbers and 32 instances in FP32, against autograd in FP64",
    Measurement("fp32", classifier_step.fp32, {"labels": 512, "dim": 64, "batch": 32}),
)

ROUNDING = measured(
    "elmo-rounding",
    "four numbers in BF16, E4M3 and E5M2, each with all values of the bits that are dropped",
    Measurement("unbiased", narrow_sums.unbiased, {"count": 4}),
)

SUMS = measured(
    "elmo-sums",
    "4,096 BF16 parameters that begin at 1, and 256 updates of 2^-10, a quarter of half an ulp",
    Measurement(
        "sums",
        narrow_sums.sums,
        {"steps": 256, "addend": 2.0**-10, "precisions": ["nearest", "stochastic", "kahan"]},
    ),
)

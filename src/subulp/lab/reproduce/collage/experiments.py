"""What is trained and measured to repeat what Collage claims."""

from __future__ import annotations

import math
import statistics
from functools import partial

from ...tasks.lm.config import LMConfig
from .. import fine_tuning
from ..claim import Experiment, Options, Part
from ..found import Found, Observation
from ..measurement import Measurement, in_processes, measured
from ..training import Training
from . import (
    algorithms,
    descent_quality,
    fast2sum,
    formats,
    lost_arithmetic,
    memory,
    rational_adamw,
    second_moment,
    speed,
)

A, B, C, D = "nearest", "collage-light", "collage-plus", "master"
"""The paper's options, as the command line calls them."""

OPTIONS = (A, B, C, D)
SEEDS = (0, 1, 2)


EXPANSIONS = measured(
    "collage-expansions",
    "the decays 0.95, 0.99 and 0.999, rounded by the library",
    Measurement("expansions", formats.expansions),
)

LAYOUTS = measured(
    "collage-formats",
    "every format, read off the numbers that follow 1",
    Measurement("formats", formats.layouts),
)

BYTES = measured(
    "collage-bytes",
    "a parameter of 4,096 numbers, its gradient and what AdamW keeps, counted after a step",
    Measurement(
        "bytes",
        formats.bytes_kept,
        {"strategies": [*OPTIONS, "fp32-states"], "dtype": "bfloat16", "elements": 4096},
    ),
)

FP8_BYTES = measured(
    "collage-fp8-bytes",
    "an E4M3 parameter of 4,096 numbers, its gradient and what AdamW keeps, counted after a step",
    Measurement(
        "bytes",
        formats.bytes_kept,
        {"strategies": [B, C], "dtype": "float8_e4m3fn", "elements": 4096},
    ),
)

ALGORITHMS = measured(
    "collage-algorithms",
    "10,000 random operands on the grids of BF16 and FP16, whose errors are numbers of the format, "
    "against rationals",
    Measurement("algorithms", algorithms.errors, {"count": 10_000}),
)

GROW = measured(
    "collage-grow",
    "10,000 random expansions in BF16 and FP16 and addends of five kinds, against rationals",
    Measurement("grow", algorithms.grown, {"count": 10_000}),
)

FAST2SUM = measured(
    "collage-fast2sum",
    "all BF16 significands with all others of 24 binades and both signs, against integers",
    Measurement("pairs", fast2sum.pairs, {"binades": 24}),
)

LOST = measured(
    "collage-lost-additions",
    "all sums in BF16 of a number from 1 to 2 and at most half its ulp; of all other numbers with "
    "half their ulp, a quarter and just less than a half; 20,000 of them against rationals",
    Measurement("additions", lost_arithmetic.additions, {"compared": 20_000}),
)


WATCHED = ("nearest", "collage-light", "fp32")


def _qualities(options: Options) -> tuple[Part, ...]:
    elements, steps = {"smallest": (64, 2), "small": (2048, 8), "paper": (32_768, 32)}[options.size]
    settings = {"strategies": list(WATCHED), "elements": elements, "steps": steps}
    own = {**settings, "seeds": list(options.seeds_or(SEEDS))}
    return (Measurement("steps", descent_quality.steps, own),)


QUALITIES = Experiment(
    "collage-descent-quality",
    {
        "smallest": "two steps of SGD of 64 parameters, against rationals",
        "small": "eight steps of SGD of 2,048 parameters, against rationals",
        "paper": "32 steps of SGD of 32,768 parameters, against rationals",
    },
    _qualities,
)

ONE_OF = {"0.9": 0.9, "0.95": 0.95, "0.98": 0.98, "0.99": 0.99, "0.995": 0.995, "0.998": 0.998}
"""Usual decays that BF16 has below 1."""
NONE_OF = {"0.998046875": 1 - 2.0**-9, "0.999": 0.999, "0.9999": 0.9999}
"""Decays that it has not, from the smallest on."""
MOMENT_DECAYS = (0.95, 0.99, 0.999)


def _moments(options: Options) -> tuple[Part, ...]:
    elements, steps = {"smallest": (8, 8), "small": (32, 400), "paper": (256, 4000)}[options.size]
    settings = {"strategies": [B, C], "betas": list(MOMENT_DECAYS), "elements": elements}
    settings |= {"steps": steps, "seeds": list(options.seeds_or(SEEDS))}
    return (
        Measurement(
            "decays", second_moment.decays, {"betas": [*ONE_OF.values(), *NONE_OF.values()]}
        ),
        Measurement("moments", second_moment.moments, settings),
    )


MOMENTS = Experiment(
    "collage-second-moment",
    {
        "smallest": "eight steps of AdamW in strict BF16 of 8 parameters",
        "small": "400 steps of AdamW in strict BF16 of 32 parameters, whose gradients become 16 "
        "times as small after half of them, against the same moments in FP64",
        "paper": "4,000 steps of AdamW in strict BF16 of 256 parameters, likewise",
    },
    _moments,
)

# ------------------------------------------------------------------------ language models

_LENGTHS = {"smallest": 12, "small": 600, "paper": 20_000}


def _lm(options: Options, **own: object) -> LMConfig:
    """A comparison of the size that was asked for.

    The smallest shows that the command works; the small one is a model of a quarter of a million
    parameters; the paper's is GPT-125M, with its tokens, rate, batch and length.
    """
    options.check_data("a text")
    steps = int(str(own.get("steps", _LENGTHS[options.size])))
    shape: dict[str, object] = {}
    if options.size == "paper":
        shape = {"width": 768, "layers": 12, "heads": 12, "context": 2048, "lr": 6e-4}
        shape |= {"level": "bpe", "vocabulary": 50_257, "warmup": 200 / steps}
    elif options.size == "smallest":
        own = {**own, "width": 16, "layers": 1, "heads": 2, "context": 8, "batch_size": 2}
    length: dict[str, object] = {
        "steps": steps,
        "eval_every": max(6, steps // 10),
        "watch_every": max(2, steps // 40),
        "log_every": max(1, steps // 40),
    }
    # The paper's activations; chosen by speed, they would be another experiment elsewhere.
    shape["activations"] = "bf16"
    own = {**shape, **length, "seeds": options.seeds_or(SEEDS), "data": options.data, **own}
    return LMConfig(**own)  # type: ignore[arg-type]


def _grid(options: Options) -> tuple[Part, ...]:
    """Table 6: every decay and batch size."""
    batches = (1024, 2048) if options.size == "paper" else (4, 8)
    decays = (0.95, 0.99, 0.999)
    return tuple(
        Training(
            f"beta2-{decay}-batch-{batch}",
            _lm(options, precision=OPTIONS, beta2=decay, batch_size=batch),
            case=f"β2 {decay}, {size} batch,",
            curves=("effective descent quality", "training loss", "perplexity"),
        )
        for size, batch in zip(("small", "large"), batches, strict=True)
        for decay in decays
    )


KAHAN, STATES, WIDE = "kahan", "fp32-states", "fp32"

PHASE_1, ROBERTA = "BERT phase 1,", "RoBERTa,"
_WATCHED = (
    "training loss",
    "lost arithmetic",
    "effective descent quality",
    "parameter norm",
    "update norm",
)


_Settings = dict[str, object]


def _berts(options: Options) -> tuple[_Settings, _Settings]:
    """BERT's phase 1 and RoBERTa."""
    shape: _Settings = {"model": "bert", "level": "bpe", "tie_head": True}
    bert, roberta = {**shape, "beta2": 0.999}, {**shape, "beta2": 0.98}
    if options.size == "paper":
        # Table 10.
        length: _Settings = {"steps": 28_125, "warmup": 2000 / 28_125}
        bert |= {**length, "batch_size": 16_384, "context": 128, "lr": 4e-4, "vocabulary": 30_522}
        roberta |= {**length, "batch_size": 8192, "context": 512, "vocabulary": 50_265}
        return bert, roberta
    small: _Settings = {"vocabulary": 300}
    if options.size == "small":
        # Shallower, or shorter, it learns no more than how frequent tokens are.
        small = {"width": 128, "layers": 4, "steps": 2000}
        small |= {"batch_size": 32, "context": 32, "vocabulary": 512}
    return bert | small, roberta | small


def _masked(options: Options) -> tuple[Part, ...]:
    """Tables 3 and Figures 2 and 3: masked language models."""
    bert, roberta = _berts(options)
    if options.size != "paper":
        small: _Settings = {"width": 96, "layers": 2, "steps": _LENGTHS[options.size]}
        bert |= {**small, "batch_size": 16, "vocabulary": 512}
        roberta |= {**small, "batch_size": 8, "context": 64, "vocabulary": 512}
    return (
        Training(
            "bert-phase-1",
            _lm(options, precision=(A, KAHAN, B, C, STATES, D, WIDE), **bert),
            PHASE_1,
            _WATCHED,
        ),
        Training(
            "roberta",
            _lm(options, precision=(A, B, C, STATES, D), **roberta),
            ROBERTA,
            ("training loss",),
        ),
    )


def _scales(found: Found) -> tuple[Observation, ...]:
    """How much larger parameters are than their updates, at the end of training."""
    ratios = []
    for option in (A, B, C, D):
        case = f"{PHASE_1} {option}"
        updates = found.values(case, "last update norm")
        for seed, norm in found.values(case, "last parameter norm").items():
            if updates.get(seed):
                ratios.append(
                    Observation(case, "norm over that of updates", norm / updates[seed], seed)
                )
    return tuple(ratios)


MASKED = Experiment(
    "collage-masked",
    {
        "smallest": "as small, with a width of 16, 12 steps, one seed",
        "small": "BERT of 2 blocks and width 96 on a megabyte of Shakespeare in 512 byte pairs: "
        "sequences of 32 by 16 at β2 = 0.999, of 64 by 8 at 0.98 for RoBERTa, 600 steps",
        "paper": "BERT-base's sizes on a text of yours, with the paper's batches, 28,125 steps",
    },
    _masked,
    _scales,
)

BERT = "BERT,"


def _fine_tunings(options: Options) -> tuple[Part, ...]:
    """Table 4: pre-training at the two decays, then sentence tasks."""
    recipe = fine_tuning.Recipe(3000, 1000, 3, 32, 5e-4)
    if options.size == "paper":
        recipe = fine_tuning.Recipe(100_000, 10_000, 3, 32, 2e-5)
    elif options.size == "smallest":
        recipe = fine_tuning.Recipe(64, 32, 1, 32, 5e-4)
    bert, roberta = _berts(options)
    return tuple(
        fine_tuning.FineTuning(
            Training(
                name,
                _lm(options, precision=OPTIONS, **own),
                case,
                ("training loss",),
            ),
            recipe,
        )
        for name, case, own in (("bert", BERT, bert), ("roberta", ROBERTA, roberta))
    )


FINE_TUNED = Experiment(
    "collage-fine-tuning",
    {
        "smallest": "as small, with a width of 16, 12 steps, one seed, 64 examples",
        "small": "BERT of 4 blocks and width 128 on a megabyte of Shakespeare in 512 byte pairs, "
        "batches of 32 sequences of 32, 2,000 steps at β2 = 0.999 and at 0.98 for RoBERTa; then "
        "3,000 examples of each of five sentence tasks, 3 epochs in batches of 32, 1,000 tested",
        "paper": "BERT-base's sizes on a text of yours with the paper's batches, 28,125 steps; "
        "then sentence tasks made of it, 3 epochs in batches of 32",
    },
    _fine_tunings,
)

SIZES = {
    "1M": {"width": 96, "layers": 6, "heads": 4},
    "3M": {"width": 192, "layers": 6, "heads": 6},
    "10M": {"width": 320, "layers": 8, "heads": 8},
    "30M": {"width": 512, "layers": 9, "heads": 8},
}
_RATES = {"1M": 1e-3, "3M": 5e-4, "10M": 3e-4, "30M": 2e-4}
"""As one over the width, which the paper's nearly are. At 1e-3 the larger ones differ from seed to
seed by more than options do."""
_SHORT = {"context": 64, "vocabulary": 1024, "batch_size": 8}
MAX_NORM = 1.0
"""Of gradients, as in GPT-NeoX, whose configurations the paper takes. Without it a few gradients at
the beginning, ten times as long as others, make the same model up to 10 % better or worse."""
_PAPER_SIZES = {
    "1M": {"width": 768, "layers": 12, "heads": 12, "lr": 6e-4, "batch_size": 1024},
    "3M": {"width": 2048, "layers": 24, "heads": 16, "lr": 2e-4, "batch_size": 1024},
    "10M": {"width": 2560, "layers": 32, "heads": 32, "lr": 1.6e-4, "batch_size": 512},
    "30M": {"width": 4096, "layers": 32, "heads": 32, "lr": 1.2e-4, "batch_size": 256},
}


def _by_size(options: Options) -> tuple[Part, ...]:
    """Table 5, left, and Figures 13 to 15: models of four sizes."""
    parts = []
    # The longest first, so that those which run side by side end together.
    for name, shape in reversed(SIZES.items()):
        own: dict[str, object] = {**shape, **_SHORT, "lr": _RATES[name]}
        if options.size == "paper":
            own = {**_PAPER_SIZES[name], "context": 2048, "vocabulary": 50_257}
        if options.size == "smallest":
            own = {"vocabulary": 300}
        else:
            own["steps"] = steps = 20_000 if options.size == "paper" else 400
            # Looking at updates takes longer than some steps, and so does the validation part.
            own |= {"watch_every": 10**9, "eval_every": steps // 4}
        own |= {"seeds": options.seeds_or(SEEDS), "max_norm": MAX_NORM}
        parts.append(
            Training(
                f"llama-{name}",
                _lm(options, precision=OPTIONS, beta2=0.95, model="llama", level="bpe", **own),
                f"{name},",
                ("training loss", "perplexity", "gradient norm"),
            )
        )
    return tuple(parts)


def _trends(found: Found) -> tuple[Observation, ...]:
    """How the gap to master weights changes with the size: a straight line through its logarithm
    over that of the number of parameters."""
    sizes = [math.log10(float(name[:-1])) for name in SIZES]
    trends = []
    for option in (A, B, C):
        gaps: dict[int | None, list[float]] = {}
        for name in SIZES:
            base = found.values(f"{name}, {D}", "perplexity")
            for seed, value in found.values(f"{name}, {option}", "perplexity").items():
                gaps.setdefault(seed, []).append(100 * math.log(value / base[seed]))
        for seed, gap in gaps.items():
            slope = statistics.linear_regression(sizes, gap).slope
            trends.append(Observation(option, "percent of gap for ten times the size", slope, seed))
    return tuple(trends)


SCALED = Experiment(
    "collage-sizes",
    {
        "smallest": "as small, with a width of 16, 12 steps, one seed",
        "small": "models as Llama's of 0.9, 3.1, 10.5 and 29 million parameters on a megabyte of "
        "Shakespeare in 1,024 byte pairs, batches of 8 sequences of 64, 400 steps, gradients of "
        "norm 1 at most",
        "paper": "models as Llama's of the paper's four sizes of GPT on a text of yours, 20,000 "
        "steps",
    },
    _by_size,
    _trends,
)


def _by_decay(options: Options) -> tuple[Part, ...]:
    """Table 5, right, and Figures 5 and 6: OpenLLaMA at two decays."""
    own: dict[str, object] = {**SIZES["3M"], **_SHORT, "lr": 1e-3}
    if options.size == "paper":
        own = {**_PAPER_SIZES["30M"], "context": 2048, "vocabulary": 32_000, "lr": 3e-4}
    if options.size == "smallest":
        own = {"vocabulary": 300}
    else:
        own["steps"] = 9000 if options.size == "paper" else 400
    own |= {"seeds": options.seeds_or(SEEDS), "max_norm": MAX_NORM}
    return tuple(
        Training(
            f"beta2-{decay}",
            _lm(options, precision=OPTIONS, beta2=decay, model="llama", level="bpe", **own),
            f"β2 {decay},",
            ("training loss", "perplexity", "gradient norm"),
        )
        for decay in (0.95, 0.99)
    )


DECAYS = Experiment(
    "collage-decays",
    {
        "smallest": "as small, with a width of 16, 12 steps, one seed",
        "small": "a model as Llama's of 3.1 million parameters on a megabyte of Shakespeare in "
        "1,024 byte pairs, batches of 8 sequences of 64, 400 steps, gradients of norm 1 at most",
        "paper": "a model as Llama's of 6.5 billion parameters on a text of yours, 9,000 steps",
    },
    _by_decay,
)


def _narrow(options: Options) -> tuple[Part, ...]:
    """Appendix D: all in FP8."""
    config = _lm(options, precision=(A, B, C), dtype="e4m3", beta2=0.99)
    return (Training("e4m3", config, curves=("training loss", "perplexity")),)


FP8 = Experiment(
    "collage-fp8",
    {
        "smallest": "as small, with a GPT of 5,440 parameters, 12 steps, one seed",
        "small": "GPT of 242,496 parameters in E4M3 on a megabyte of Shakespeare by characters, "
        "600 steps",
        "paper": "GPT-125M in E4M3 on a text of yours, 20,000 steps",
    },
    _narrow,
)

_GPT_125M = {"vocabulary": 50_257, "context": 2048, "width": 768, "layers": 12, "heads": 12}
_TINY = {"vocabulary": 300, "context": 64, "width": 64, "layers": 2, "heads": 8}
_TENSOR_RANKS = 8
_GPT_6_7B = {**_GPT_125M, "width": 4096, "layers": 32, "heads": 32}
_MODELS: dict[str, dict[str, object]] = {
    "125M": {"shape": _GPT_125M, "ranks": 1},
    "1.3B": {"shape": {**_GPT_125M, "width": 2048, "layers": 24, "heads": 16}},
    "2.7B": {"shape": {**_GPT_125M, "width": 2560, "layers": 32, "heads": 32}},
    "6.7B": {"shape": _GPT_6_7B},
    "OpenLLaMA-7B": {"shape": {**_GPT_6_7B, "vocabulary": 32_000}, "model": "llama"},
}
"""Of Collage's Table 11, and over how many ranks."""


def _peaks(options: Options) -> tuple[Part, ...]:
    parts = []
    for i, (name, own) in enumerate(_MODELS.items()):
        settings = {"model": "gpt", "ranks": _TENSOR_RANKS, **own}
        if options.size == "smallest":
            settings["shape"] = {**_TINY, "width": 64 * (1 + i)}
        if options.size == "paper":
            settings["micro_batches"] = 128
        settings |= {"name": name, "strategies": list(OPTIONS), "batch": 1}
        parts.append(Measurement(f"peak-{name}", memory.peak, settings))
    return tuple(parts)


PEAKS = Experiment(
    "collage-memory",
    {
        "smallest": "as small, with models of 2 blocks, of width 64 to 320",
        "small": "GPT-125M in one process, GPTs of 1.3, 2.7 and 6.7 billion parameters and a model "
        "as Llama's of 6.5 billion as the first of eight ranks with tensor parallelism, one "
        "sequence of 2,048, live tensors of a step on the CPU; takes some 18 GiB",
        "paper": "the same with the gradients of 128 such sequences added up in a step, which "
        "takes 128 times as long",
    },
    _peaks,
    partial(memory.savings, beside=D),
)

_GPT_30B = {**_GPT_125M, "width": 7168, "layers": 56, "heads": 56}


def _limits(options: Options) -> tuple[Part, ...]:
    """Table 8: micro-batches of one sequence and of two, short and twice as long."""
    shape = {
        "smallest": _TINY,
        "small": {**_GPT_30B, "layers": 7},
        # Two stages of a pipeline share the blocks.
        "paper": {**_GPT_30B, "layers": 28},
    }[options.size]
    lengths = {"short": shape["context"] // 2, "long": shape["context"]}
    return tuple(
        Measurement(
            f"peak-{batch}-{name}",
            memory.peak,
            {
                "name": f"{batch} x {name}",
                "shape": {**shape, "context": length},
                "strategies": list(OPTIONS),
                "batch": batch,
                "model": "gpt",
                "ranks": _TENSOR_RANKS,
            },
        )
        for batch in (1, 2)
        for name, length in lengths.items()
    )


LIMITS = Experiment(
    "collage-limits",
    {
        "smallest": "a model of 2 blocks and width 64 as the first of eight ranks, sequences of 32 "
        "and 64",
        "small": "seven of GPT-30B's 56 blocks between its table and its output layer, as the "
        "first of eight ranks with tensor parallelism, one sequence and two of 1,024 and of 2,048, "
        "live tensors of a step on the CPU; takes some 12 GiB",
        "paper": "28 blocks, the half that a pipeline of two stages has on a rank, the same; "
        "master weights take over 34 GiB",
    },
    _limits,
    partial(memory.fitting, beside=D),
)


def _speeds(options: Options) -> tuple[Part, ...]:
    shape, rounds = {
        "smallest": (_TINY, 3),
        "small": ({**_GPT_125M, "vocabulary": 4096, "context": 128, "width": 512, "heads": 8}, 15),
        "paper": (_GPT_6_7B, 50),
    }[options.size]
    settings = {"strategies": list(OPTIONS), "shape": shape, "batch": 1, "rounds": rounds}
    return (in_processes("steps", speed.steps, settings, options.size),)


SPEEDS = Experiment(
    "collage-speed",
    {
        "smallest": "a model of 2 blocks and width 64",
        "small": "a model as Llama's of 42 million parameters, one sequence of 128, on the CPU, in "
        "five processes, each a seed",
        "paper": "a model as Llama's of 6.7 billion parameters, one sequence of 2,048, in five "
        "processes, each a seed",
    },
    _speeds,
)

STRICT_STRATEGIES = ("collage-light", "collage-plus")
STRICT_DECAYS = (0.95, 0.999)

STRICT = measured(
    "collage-strict-adamw",
    "64 BF16 parameters of nine binades, 40 steps of random gradients, lr 0.01, weight decay 0.1",
    Measurement(
        "steps",
        rational_adamw.compare,
        {
            "strategies": list(STRICT_STRATEGIES),
            "beta2s": list(STRICT_DECAYS),
            "elements": 64,
            "steps": 40,
        },
    ),
)

LOST_DECAY = measured(
    "collage-weight-decay",
    "all 128 BF16 numbers from 1 to 2",
    Measurement("decay", formats.lost_decay, {"factors": [1.2e-5, 1e-3, 2.0**-8, 0.0045, 0.0079]}),
)

GRID = Experiment(
    "collage-grid",
    {
        "smallest": "as small, with a GPT of 5,440 parameters, 12 steps, one seed",
        "small": "GPT of 242,496 parameters on a megabyte of Shakespeare by characters, batches of "
        "4 and 8 sequences of 64, 600 steps",
        "paper": "GPT-125M on a text of yours, batches of 1,024 and 2,048 sequences of 2,048, "
        "20,000 steps",
    },
    _grid,
)

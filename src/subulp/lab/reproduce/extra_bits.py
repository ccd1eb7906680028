"""What the extra-bits paper claims, place by place, and what repeats it."""

from __future__ import annotations

from collections.abc import Sequence

from ...diagnostics.memory import CATEGORIES
from ..tasks.ctr.config import CTRConfig
from ..tasks.image.config import ImageConfig
from . import adversarial, forward_error, memory_loops, seq2seq, storage, throughput
from .check import Check
from .claim import Claim, Experiment, Options, Part, published
from .collage import LAYOUTS
from .found import Found, Observation
from .measurement import Measurement
from .training import Training

PAPER = "extra-bits"
SEEDS = (0, 1, 2)

EIGHT, ALONE, WIDE = "extra-bits-8", "nearest", "fp32"
"""Eight extra bits, none, and FP32 parameters, as the command line calls them."""


def _seeds(options: Options) -> tuple[int, ...]:
    return options.seeds or ((0,) if options.size == "smallest" else SEEDS)


# ------------------------------------------------------------------------ storage

STORAGE = Experiment(
    "extra-bits-storage",
    dict.fromkeys(
        ("smallest", "small", "paper"),
        "1,000 groups of 32 random numbers of 1 to 17 bits, beside one long integer each; SGD with "
        "4,096 FP16 parameters",
    ),
    lambda _: (
        Measurement("packing", storage.packing, {"widths": list(range(1, 18)), "groups": 1000}),
        Measurement(
            "kept",
            storage.kept_words,
            {"strategies": [f"extra-bits-{k}" for k in range(1, 17)], "elements": 4096},
        ),
    ),
)

# ------------------------------------------------------------------------ errors


def _errors(options: Options) -> tuple[Part, ...]:
    values = {"smallest": 1000, "small": 50_000, "paper": 1_000_000}[options.size]
    settings = {"bits": [4, 8, 12], "values": values, "seeds": list(_seeds(options))}
    return (Measurement("errors", forward_error.errors, settings),)


ERRORS = Experiment(
    "extra-bits-errors",
    {
        "smallest": "1,000 sums of 64 terms and tensors of 1,000 numbers",
        "small": "50,000 sums of 64 terms and tensors of 50,000 numbers from the standard normal "
        "distribution",
        "paper": "a million sums of 64 terms and tensors of a million numbers",
    },
    _errors,
)

# ------------------------------------------------------------------------ speed

_KS = range(1, 17)
_WHOLE = (8, 16)
"""Extra bits that no number shares a word's boundary with."""


def _speeds(options: Options) -> tuple[Part, ...]:
    elements, rounds = {
        "smallest": (1 << 16, 3),
        "small": (1 << 24, 15),
        "paper": (1 << 28, 50),
    }[options.size]
    strategies = [ALONE, *(f"extra-bits-{k}-truncate" for k in _KS)]
    settings = {
        "strategies": strategies,
        "dtype": "float16",
        "elements": elements,
        "rounds": rounds,
    }
    return (Measurement("additions", throughput.additions, settings),)


def _sizes(found: Found) -> tuple[Observation, ...]:
    return throughput.means(
        found,
        {
            "8 and 16 bits": [f"extra-bits-{k}-truncate" for k in _WHOLE],
            "other bits": [f"extra-bits-{k}-truncate" for k in _KS if k not in _WHOLE],
        },
    )


SPEEDS = Experiment(
    "extra-bits-speed",
    {
        "smallest": "65,536 FP16 numbers",
        "small": "16.8 million FP16 numbers",
        "paper": "268 million FP16 numbers",
    },
    _speeds,
    _sizes,
)

# ------------------------------------------------------------------------ memory

_LATE, _INSIDE, _FOREACH = (
    "standard-late-zero-grad",
    "standard-backward-inside",
    "standard-foreach-decay",
)
_FULL = "extra-bits-16"


def _timelines(options: Options) -> tuple[Part, ...]:
    # A layer's gradient is alive while its parameter steps: the more layers, the less of it. Small
    # layers wait for each other, up to half a MiB together.
    parameters, layers = {
        "smallest": (16_000_000, 32),
        "small": (64_000_000, 32),
        "paper": (2_000_000_000, 32),
    }[options.size]
    settings = {
        "cases": ["standard", _LATE, _INSIDE, _FOREACH, _FULL, EIGHT, f"{EIGHT}-decay"],
        "parameters": parameters,
        "layers": layers,
        "batch_size": 2,
    }
    return (Measurement("timelines", memory_loops.timeline, settings),)


TIMELINES = Experiment(
    "extra-bits-memory",
    {
        "smallest": "16 million parameters in 32 layers, three steps of SGD with momentum",
        "small": "64 million parameters in 32 layers, three steps of SGD with momentum, live "
        "tensors on the CPU",
        "paper": "two billion parameters in 32 layers, three steps of SGD with momentum",
    },
    _timelines,
)

# ------------------------------------------------------------------------ pictures

_AMP, _THIRTEEN = "amp", "extra-bits-13-stochastic"
_FORMATS = (WIDE, _AMP, _THIRTEEN, EIGHT, ALONE, "e5m2+8", "e5m2+4", "e5m2")


def _pictures(options: Options) -> tuple[Part, ...]:
    own: dict[str, object] = {"steps": 12, "width": 4, "batch_size": 16, "lr": 0.1}
    if options.size == "small":
        own = {"epochs": 12, "width": 16, "batch_size": 64, "lr": 0.1}
    if options.size == "paper":
        own = {
            "epochs": 200,
            "batch_size": 256,
            "lr": 0.3,
            "final_lr": 1e-5 / 0.3,
            "warmup": 5 / 200,
        }
    if options.data is not None:
        own["data"] = options.data
    config = ImageConfig(precision=_FORMATS, seeds=_seeds(options), dtype="fp16", **own)  # type: ignore[arg-type]
    return (Training("resnet-18", config, curves=("training loss", "accuracy")),)


PICTURES = Experiment(
    "extra-bits-pictures",
    {
        "smallest": "as small, with 4 channels, 12 steps, one seed",
        "small": "ResNet-18 of 16 channels on 1,437 digits of 8 x 8, batches of 64, 12 epochs",
        "paper": "ResNet-18 of 64 channels on your CIFAR-10, batches of 256, 200 epochs",
    },
    _pictures,
)

# ------------------------------------------------------------------------ clicks

_CLICKS_32, _CLICKS_16, _CLICKS_8 = "FP32, fp32", "FP16, fp16 nearest", "FP16 and 8 bits, fp16+8"


def _clicks(options: Options) -> tuple[Part, ...]:
    """Figure 4: all of a DLRM in one precision."""
    # All tables are as narrow as the others, however few rows they have.
    own: dict[str, object] = {
        "narrow_above": 0,
        "optimizer": "sgd",
        "row_optimizer": "sgd",
        "dense_dtype": "fp16",
        "rounding": ("nearest",),
        "cache_fraction": (0.0,),
        "batch_size": 128,
        "evaluations": 4,
        "seeds": _seeds(options),
    }
    if options.size == "paper":
        own |= {
            "preset": "criteo-kaggle-16",
            "lr": 0.1,
            "row_lr": 0.1,
        }
    else:
        # A rate for rows that a short run learns with.
        own |= {"dim": 16, "bottom": (32,), "top": (64, 32), "lr": 0.05, "row_lr": 1.0}
        own["data"] = "generated:examples=150000,rows=400,tables=8,signal=4"
    if options.size == "smallest":
        own |= {"data": "generated:examples=2000,rows=400,tables=4,signal=4", "steps": 12}
    if options.data is not None:
        own["data"] = options.data
    return tuple(
        Training(
            folder,
            CTRConfig(precision=(rows,), dense_precision=(dense,), **own),  # type: ignore[arg-type]
            case.rpartition(" " + rows)[0],
            ("training loss", "AUC"),
        )
        for folder, rows, dense, case in (
            ("fp32", "fp32", WIDE, _CLICKS_32),
            ("fp16", "fp16", ALONE, _CLICKS_16),
            ("extra-bits-8", "fp16+8", EIGHT, _CLICKS_8),
        )
    )


CLICKS = Experiment(
    "extra-bits-dlrm",
    {
        "smallest": "as small, with 2,000 examples and 4 tables, 12 steps, one seed",
        "small": "DLRM with 8 tables of 400 and 100 rows of 16 numbers on 150,000 generated "
        "examples, one epoch of SGD in batches of 128",
        "paper": "DLRM with rows of 16 numbers on Criteo's data of yours, one epoch of SGD in "
        "batches of 128",
    },
    _clicks,
)

# ------------------------------------------------------------------------ generated pictures


def _generated(options: Options) -> tuple[Part, ...]:
    width, steps, batch = {
        "smallest": (4, 12, 16),
        "small": (16, 1500, 64),
        "paper": (64, 10_000, 128),
    }[options.size]
    settings = {
        "precisions": [ALONE, EIGHT, WIDE],
        "width": width,
        "steps": steps,
        "batch": batch,
        "seeds": list(_seeds(options)),
    }
    return (Measurement("quality", adversarial.quality, settings),)


GENERATED = Experiment(
    "extra-bits-dcgan",
    {
        "smallest": "as small, with 4 channels, 12 steps, one seed",
        "small": "a DCGAN of 16 channels in BF16 on digits of 8 x 8, batches of 64, 1,500 steps",
        "paper": "a DCGAN of 64 channels in BF16 on digits of 8 x 8, batches of 128, 10,000 steps",
    },
    _generated,
)


def _fused(options: Options) -> tuple[Part, ...]:
    width, steps = {"smallest": (128, 3), "small": (192, 20), "paper": (512, 200)}[options.size]
    settings = {"precision": EIGHT, "width": width, "steps": steps, "batch": 32}
    return (Measurement("fused", adversarial.fused, settings),)


FUSED = Experiment(
    "extra-bits-fused",
    {
        "smallest": "a DCGAN of 128 channels, 3 steps",
        "small": "a DCGAN of 192 channels in BF16 on the digits of 8 x 8, 20 steps",
        "paper": "a DCGAN of 512 channels in BF16 on the digits of 8 x 8, 200 steps",
    },
    _fused,
)

# ------------------------------------------------------------------------ sentences

_T5 = {"d_model": 256, "d_kv": 64, "d_ff": 640, "num_layers": 4, "num_decoder_layers": 4}
_T5_LARGE = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_decoder_layers": 24}


def _sentences(options: Options) -> tuple[Part, ...]:
    sizes, batch, length, steps = {
        "smallest": ({**_T5, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}, 2, 16, 3),
        "small": ({**_T5, "num_heads": 4}, 8, 128, 12),
        "paper": ({**_T5_LARGE, "num_heads": 16}, 16, 128, 100),
    }[options.size]
    settings = {
        "tasks": list(seq2seq.TASKS),
        "sizes": sizes,
        "batch": batch,
        "length": length,
        "steps": steps,
    }
    return (Measurement("t5", seq2seq.fine_tuned, settings),)


SENTENCES = Experiment(
    "extra-bits-t5",
    {
        "smallest": "a T5 of one layer and width 256, 3 steps",
        "small": "a T5 of 7 million parameters in FP32 from drawn weights on three generated "
        "tasks, batches of 8 pairs of 128 tokens, 12 steps",
        "paper": "a T5 of flan-t5-large's sizes in FP32 from drawn weights on three generated "
        "tasks, batches of 16 pairs of 128 tokens, 100 steps",
    },
    _sentences,
)

# ------------------------------------------------------------------------ claims

_GLUE = dict(zip(("MNLI", "QNLI", "MRPC"), seq2seq.TASKS, strict=True))
_TABLE_2 = {
    "MNLI": (29_930, 26_818, 38_488, 40_054),
    "QNLI": (30_239, 26_826, 11_469, 11_808),
    "MRPC": (29_964, 26_649, 383, 400),
}
"""MB and seconds, not fused and fused."""

_TABLE_3 = {
    WIDE: (0.9464, 4720),
    _AMP: (0.9404, 4520),
    _THIRTEEN: (0.9410, 3868),
    EIGHT: (0.9406, 3776),
    ALONE: (0.9379, 3840),
}
_FP8 = {"e5m2+8": 0.9396, "e5m2+4": 0.6553, "e5m2": 0.0878}

_LAYOUT = {"FP32": (32, 8, 23), "BF16": (16, 8, 7), "FP16": (16, 5, 10)}

_DIGITS = (
    "On 1,437 digits of 8 x 8, which stand for CIFAR-10: a network of 16 channels learns them in "
    "minutes."
)


def _saves(says: str, case: str, than: str, share: float) -> Check:
    """A check of the share of the peak that a loop saves."""
    return Check(says, "peak bytes per parameter", case, than=than, how="ratio", high=1 - share)


def _smaller(says: str, case: str, than: str) -> Check:
    return Check(says, "error after one addition", case, than=than, how="ratio", high=1.0)


_BETTER = "error after 64 additions"

CLAIMS: Sequence[Claim] = (
    Claim(
        PAPER,
        "Table 1",
        "Bits of float, bfloat16 and half, of their exponents and significands.",
        LAYOUTS,
        published=published(
            "bits",
            {name: row[0] for name, row in _LAYOUT.items()},
            more={
                "exponent bits": {name: row[1] for name, row in _LAYOUT.items()},
                "mantissa bits": {name: row[2] for name, row in _LAYOUT.items()},
            },
        ),
        checks=tuple(
            Check(f"{name}: {value} {quantity}", quantity, name, low=value, high=value)
            for name, row in _LAYOUT.items()
            for quantity, value in zip(("bits", "exponent bits", "mantissa bits"), row, strict=True)
        ),
        shows=("bits", "exponent bits", "mantissa bits"),
        cases=tuple(_LAYOUT),
    ),
    Claim(
        PAPER,
        "Figure 1",
        "Twelve extra bits of 32 numbers take twelve words of 32 bits, all of whose bits are used.",
        STORAGE,
        published=published("words for 32 numbers", {"12 bits": 12, "extra-bits-12": 12}),
        checks=(
            Check("twelve words", "words for 32 numbers", "12 bits", low=12, high=12),
            *(
                Check(
                    f"an optimizer keeps {k} words of {k} bits",
                    "words for 32 numbers",
                    f"extra-bits-{k}",
                    low=k,
                    high=k,
                )
                for k in range(1, 17)
            ),
            *(
                check
                for width in range(1, 18)
                for check in (
                    Check(
                        f"numbers of {width} bits are read as they were written",
                        "numbers changed",
                        f"{width} bits",
                        low=0,
                        high=0,
                    ),
                    Check(
                        f"numbers of {width} bits stand one after the other",
                        "words that are not the long integer's",
                        f"{width} bits",
                        low=0,
                        high=0,
                    ),
                )
            ),
        ),
    ),
    Claim(
        PAPER,
        "Section 1, bytes",
        "At least 6 bytes of a parameter less stay in memory than in mixed precision: parameter, "
        "its copy and its gradient are 10, and 16 bits with as many extra bits are 4.",
        TIMELINES,
        published=published("peak bytes per parameter", {_LATE: 10.0, _FULL: 4.0}),
        checks=(
            # A layer of 32 is alive with its gradient: 2 / 32 bytes and what waits with it. The
            # states of both are 4 bytes.
            Check(
                "6 bytes less, but for a layer's gradient and its tile",
                "peak bytes per parameter",
                _LATE,
                than=_FULL,
                low=5.75,
            ),
            Check("no gradients remain", "largest gradients per parameter", _FULL, high=0.2),
        ),
        shows=("peak bytes per parameter", "largest gradients per parameter"),
        cases=(_LATE, _FULL),
        differs="The paper's 10 and 4 bytes; 4 of momentum are in both of ours.",
    ),
    Claim(
        PAPER,
        "Figure 2",
        "Over three steps of a model of two billion parameters, the peak is 54 % lower than with "
        "torch's mixed precision.",
        TIMELINES,
        checks=(
            _saves("54 %, weight decay, foreach", f"{EIGHT}-decay", _FOREACH, 0.54),
            _saves("54 %, backward pass inside autocast", EIGHT, _INSIDE, 0.54),
            _saves("54 %, zero_grad() before the backward pass", EIGHT, _LATE, 0.54),
        ),
        published=published("peak bytes per parameter", {EIGHT: 0.46, _LATE: 1.0}),
        shows=(
            "peak bytes per parameter",
            *(f"{c} at the peak" for c in CATEGORIES),
        ),
        curves=("bytes per parameter",),
        along="moment of the timeline",
        differs="The paper's loop is not given: of torch's, three that keep FP16 copies of all "
        "parameters alive. Its peaks are given here as shares.",
    ),
    Claim(
        PAPER,
        "Figure 3",
        "Operations with extra bits move as many bytes in a second as torch's, and somewhat fewer "
        "where numbers share words.",
        SPEEDS,
        checks=(
            # A tenth less is what a figure without numbers still shows as the same.
            *(
                Check(
                    f"{k} bits as torch's addition",
                    "share of a copy's bandwidth",
                    f"extra-bits-{k}-truncate",
                    than=throughput.TORCH,
                    how="ratio",
                    low=0.9,
                )
                for k in _WHOLE
            ),
            Check(
                "others move less",
                "share of a copy's bandwidth",
                "other bits",
                than="8 and 16 bits",
                how="ratio",
                high=1.0 - 1e-9,
            ),
        ),
        shows=("share of a copy's bandwidth", "seconds"),
        differs="On a CPU, against a copy of the same machine by turns; the paper's on an A100, "
        "against its printed bandwidth. The operation is a whole step of SGD.",
    ),
    Claim(
        PAPER,
        "Figure 4",
        "Of a DLRM in FP16, 8 extra bits give FP32's AUC; FP16 alone loses part of it.",
        CLICKS,
        checks=(
            # A figure without numbers: a tenth of a point of AUC is what it would not show.
            Check(
                f"{EIGHT} reaches FP32", "AUC", _CLICKS_8, than=_CLICKS_32, low=-0.001, high=0.001
            ),
            Check("FP16 alone is behind FP32", "AUC", _CLICKS_16, than=_CLICKS_32, high=-1e-12),
            Check(f"FP16 alone is behind {EIGHT}", "AUC", _CLICKS_16, than=_CLICKS_8, high=-1e-12),
        ),
        shows=("AUC", "log loss", "accuracy"),
        curves=("training loss", "AUC"),
        differs="Tables are small, and examples are generated instead of Criteo's: clicks depend "
        "on pairs of categories. Parameters and gradients are in FP16, activations in FP32.",
    ),
    Claim(
        PAPER,
        "Figure 5",
        "A DCGAN in BF16 is better with 8 extra bits than without, and no faster than in FP32.",
        GENERATED,
        checks=(
            Check(
                f"{EIGHT} is better than BF16 alone",
                "Fréchet distance of pixels",
                EIGHT,
                than=ALONE,
                how="ratio",
                high=1.0 - 1e-9,
            ),
            Check(
                f"{EIGHT} is no faster than FP32",
                "seconds of a step",
                EIGHT,
                than=WIDE,
                how="ratio",
                low=1.0,
            ),
        ),
        differs="On digits of 8 x 8, judged by their pixels, instead of bedrooms of LSUN and the "
        "scores of an Inception network; on a CPU.",
    ),
    Claim(
        PAPER,
        "Section 3.2",
        "With the step inside the backward pass, gradients never stay, and nothing else changes.",
        FUSED,
        checks=(
            Check("the same bits", "weights that differ", "fused", low=0, high=0),
            Check("no gradients stay", "gradients left", "fused", low=0, high=0),
            Check(
                "all gradients are alive otherwise",
                "largest gradients over all",
                "not fused",
                low=1.0 - 1e-9,
            ),
            Check(
                "fewer are alive",
                "largest gradients over all",
                "fused",
                than="not fused",
                how="ratio",
                high=1.0 - 1e-9,
            ),
        ),
        differs="Of the DCGAN's two networks, whose generator's pass does not step the other one.",
    ),
    Claim(
        PAPER,
        "Figure 6",
        "After one addition, 8 extra bits that are cut are worse than FP16 alone; after many, cut "
        "or stochastic ones are better. Stochastic rounding is more accurate than cutting.",
        ERRORS,
        checks=tuple(
            check
            for name in forward_error.FORMATS
            for check in (
                _smaller(
                    f"{name} alone beats {name}+8 truncate after one addition",
                    name,
                    f"{name}+8 truncate",
                ),
                _smaller(
                    f"{name}+8 stochastic beats {name}+8 truncate after one addition",
                    f"{name}+8 stochastic",
                    f"{name}+8 truncate",
                ),
                *(
                    Check(
                        f"{name}+8 {coding} beats {name} alone after 64",
                        _BETTER,
                        f"{name}+8 {coding}",
                        than=name,
                        how="ratio",
                        # "Significantly": by more than half, whatever the chance of the draw.
                        high=0.5,
                    )
                    for coding in ("truncate", "stochastic")
                ),
                Check(
                    f"{name}+8 stochastic beats {name}+8 truncate after 64",
                    _BETTER,
                    f"{name}+8 stochastic",
                    than=f"{name}+8 truncate",
                    how="ratio",
                    high=1.0 - 1e-9,
                ),
            )
        ),
        curves=("error by condition number",),
        along="condition number",
        differs="Errors are in units of the format's round-off; BF16 and other numbers of bits are "
        "ours.",
    ),
    Claim(
        PAPER,
        "Table 2",
        "Fusing saves 11 % of the peak of fine-tuning T5, and takes 2 to 4 % longer.",
        SENTENCES,
        published=published(
            "peak MiB",
            {
                f"{_GLUE[task]}, {way}": value
                for task, row in _TABLE_2.items()
                for way, value in ((seq2seq.FREED, row[0]), (seq2seq.FUSED, row[1]))
            },
            more={
                "time beside not fused": {
                    f"{_GLUE[task]}, {seq2seq.FUSED}": row[3] / row[2]
                    for task, row in _TABLE_2.items()
                }
            },
        ),
        checks=tuple(
            check
            for task in _GLUE.values()
            for check in (
                Check(
                    f"{task}: the same bits",
                    "weights that differ",
                    f"{task}, {seq2seq.FUSED}",
                    low=0,
                    high=0,
                ),
                # Three quarters of the paper's share, as of Collage's peaks.
                *(
                    Check(
                        f"{task}: at least 8 % lower than {way}",
                        "peak MiB",
                        f"{task}, {seq2seq.FUSED}",
                        than=f"{task}, {way}",
                        how="ratio",
                        high=1 - 0.75 * 0.11,
                    )
                    for way in (seq2seq.FREED, seq2seq.KEPT)
                ),
                Check(
                    f"{task}: at most 5 % longer",
                    "time beside not fused",
                    f"{task}, {seq2seq.FUSED}",
                    high=1.05,
                ),
            )
        ),
        differs="Generated tasks instead of GLUE's, drawn weights instead of flan-t5-large's. The "
        "3.1 GB that the paper saves are all gradients of 780 million FP32 parameters: its loop "
        "keeps them through the forward pass, and one that frees them has less to save.",
    ),
    Claim(
        PAPER,
        "Table 3",
        "Of ResNet-18, 16 bits with or without extra bits are as accurate as FP32 and mixed "
        "precision; E5M2 needs 8 extra bits. Extra bits take less memory than mixed precision.",
        PICTURES,
        published=published(
            "accuracy",
            {**{name: row[0] for name, row in _TABLE_3.items()}, **_FP8},
            more={"peak MiB": {name: row[1] for name, row in _TABLE_3.items()}},
        ),
        checks=(
            # A point: the largest difference that the paper calls none is 0.85.
            *(
                Check(
                    f"{name} is as accurate as {WIDE}",
                    "accuracy",
                    name,
                    than=WIDE,
                    low=-0.01,
                )
                for name in (_AMP, _THIRTEEN, EIGHT, ALONE)
            ),
            Check(f"e5m2+8 is as accurate as {ALONE}", "accuracy", "e5m2+8", than=ALONE, low=-0.01),
            Check("e5m2+4 is behind e5m2+8", "accuracy", "e5m2+4", than="e5m2+8", high=-0.01),
            Check("e5m2 is behind e5m2+4", "accuracy", "e5m2", than="e5m2+4", high=-0.01),
            *(
                Check(
                    f"{name} takes less memory than {_AMP}",
                    "peak MiB",
                    name,
                    than=_AMP,
                    how="ratio",
                    high=1.0 - 1e-9,
                )
                for name in (_THIRTEEN, EIGHT)
            ),
        ),
        shows=("accuracy", "val loss", "peak MiB", "bytes per parameter", "training loss"),
        curves=("training loss", "accuracy"),
        differs=f"{_DIGITS} Live tensors on a CPU; times are not compared.",
    ),
    Claim(
        PAPER,
        "Abstract, memory",
        "In real training the peak is 20 to 25 % lower.",
        PICTURES,
        published=published("peak MiB", {_AMP: 4520, EIGHT: 3776}),
        checks=(
            Check(
                f"{EIGHT} saves at least 20 % of {_AMP}",
                "peak MiB",
                EIGHT,
                than=_AMP,
                how="ratio",
                high=0.8,
            ),
        ),
        shows=("peak MiB",),
        cases=(_AMP, EIGHT),
        differs=f"{_DIGITS} The paper prints 16 % for this network. Live tensors on a CPU.",
    ),
    Claim(
        PAPER,
        "Abstract, speed",
        "Training is 15 % faster, of ResNet-18 16 %.",
        not_run="it is about a GPU's FP16 units: a CPU computes FP16 by converting it",
    ),
    Claim(
        PAPER,
        "Section 4, fused optimizer",
        "An optimizer with one launch for all parameters is 2 to 10 % faster than one for each.",
        not_run="every step here is one pass over all parameters: none other to compare with",
    ),
)

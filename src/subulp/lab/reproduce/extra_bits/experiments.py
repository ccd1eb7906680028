"""What is trained and measured to repeat what the extra-bits paper claims."""

from __future__ import annotations

from typing import Any

from ...tasks.ctr.config import CTRConfig
from ...tasks.image.config import ImageConfig
from ...tasks.lm.config import LMConfig
from .. import fine_tuning
from ..claim import Experiment, Options, Part
from ..found import Found, Observation
from ..measurement import Measurement, in_processes
from ..training import Training
from . import (
    adversarial,
    clipping,
    exact,
    forward_error,
    memory_loops,
    one_pass,
    seq2seq,
    storage,
    throughput,
)

SEEDS, MANY = (0, 1, 2), tuple(range(10))
"""Where trainings take minutes, and where their seeds differ much."""

EIGHT, CUT, ALONE, WIDE = "extra-bits-8", "extra-bits-8-truncate", "nearest", "fp32"
"""Eight extra bits, as here and as the paper codes them, none, and FP32 parameters."""


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

RESTORED = (
    ("BF16", 16, "truncate"),
    ("BF16", 15, "truncate"),
    ("BF16", 16, "stochastic"),
    ("FP16", 13, "truncate"),
    ("FP16", 12, "truncate"),
    ("FP16", 13, "stochastic"),
)
COPIED = (("bfloat16", "master"), ("float16", "master"))
"""A parameter and its FP32 copy."""
KEPT = (("bfloat16", "extra-bits-16-truncate"), ("float16", "extra-bits-13-truncate"))


def _exact(options: Options) -> tuple[Part, ...]:
    binades, drawn = {"smallest": (0, 64), "small": (2, 4096), "paper": (8, 1 << 16)}[options.size]
    cases = [list(case) for case in RESTORED]
    strategies = [list(pair) for pair in (*COPIED, *KEPT)]
    return (
        Measurement(
            "restored", exact.restored, {"cases": cases, "binades": binades, "drawn": drawn}
        ),
        Measurement("kept", exact.kept, {"strategies": strategies, "elements": 4096}),
    )


EXACT = Experiment(
    "extra-bits-exact",
    {
        "smallest": "64 FP32 numbers of each binade",
        "small": "all FP32 numbers of the smallest and the largest binade of each format and "
        "4,096 of every other one, of both signs; SGD with 4,096 parameters",
        "paper": "all FP32 numbers of eight binades of each format and 65,536 of every other one",
    },
    _exact,
)


def _hooks(options: Options) -> tuple[Part, ...]:
    width, steps = {"smallest": (16, 3), "small": (128, 40), "paper": (1024, 200)}[options.size]
    settings = {"precision": EIGHT, "width": width, "steps": steps, "clip": 0.005}
    settings |= {"seeds": list(options.seeds_or(SEEDS))}
    return (Measurement("adamw", clipping.hooks, {"optimizer": "AdamW", **settings}),)


HOOKS = Experiment(
    "extra-bits-hooks",
    {
        "smallest": "three steps of AdamW with 8 extra bits, a network of width 16 in BF16",
        "small": "40 steps of AdamW with 8 extra bits, a network of three layers of width 128 in "
        "BF16, gradients clipped at 0.005",
        "paper": "200 steps of AdamW with 8 extra bits, a network of three layers of width 1,024",
    },
    _hooks,
)

# ------------------------------------------------------------------------ errors


def _errors(options: Options) -> tuple[Part, ...]:
    values = {"smallest": 1000, "small": 50_000, "paper": 1_000_000}[options.size]
    settings = {"bits": [4, 8, 12], "values": values, "seeds": list(options.seeds_or(SEEDS))}
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
WHOLE = (8, 16)
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
    return (in_processes("additions", throughput.additions, settings, options.size),)


def _sizes(found: Found) -> tuple[Observation, ...]:
    return throughput.means(
        found,
        {
            "8 and 16 bits": [f"extra-bits-{k}-truncate" for k in WHOLE],
            "other bits": [f"extra-bits-{k}-truncate" for k in _KS if k not in WHOLE],
        },
    )


SPEEDS = Experiment(
    "extra-bits-speed",
    {
        "smallest": "65,536 FP16 numbers",
        "small": "16.8 million FP16 numbers, in five processes, each a seed",
        "paper": "268 million FP16 numbers, in five processes, each a seed",
    },
    _speeds,
    _sizes,
)

# ------------------------------------------------------------------------ memory

LATE, INSIDE, FOREACH = (
    "standard-late-zero-grad",
    "standard-backward-inside",
    "standard-foreach-decay",
)
FULL = "extra-bits-16"


def _timelines(options: Options) -> tuple[Part, ...]:
    # A layer's gradient is alive while its parameter steps: the more layers, the less of it. Small
    # layers wait for each other, up to a MiB together.
    parameters, layers = {
        "smallest": (20_000_000, 32),
        "small": (64_000_000, 32),
        "paper": (2_000_000_000, 32),
    }[options.size]
    settings = {
        "cases": ["standard", LATE, INSIDE, FOREACH, FULL, EIGHT, f"{EIGHT}-decay"],
        "parameters": parameters,
        "layers": layers,
        "batch_size": 2,
    }
    return (Measurement("timelines", memory_loops.timeline, settings),)


TIMELINES = Experiment(
    "extra-bits-memory",
    {
        "smallest": "20 million parameters in 32 layers, three steps of SGD with momentum",
        "small": "64 million parameters in 32 layers, three steps of SGD with momentum, live "
        "tensors on the CPU",
        "paper": "two billion parameters in 32 layers, three steps of SGD with momentum",
    },
    _timelines,
)

# ------------------------------------------------------------------------ pictures

AMP, THIRTEEN = "amp", "extra-bits-13-stochastic"
_FORMATS = (WIDE, AMP, THIRTEEN, CUT, EIGHT, ALONE, "e5m2+8", "e5m2+4", "e5m2")


def _pictures(options: Options) -> tuple[Part, ...]:
    options.check_data("CIFAR-10")
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
    config = ImageConfig(precision=_FORMATS, seeds=options.seeds_or(SEEDS), dtype="fp16", **own)  # type: ignore[arg-type]
    return (Training("resnet-18", config, curves=("training loss", "accuracy")),)


PICTURES = Experiment(
    "extra-bits-pictures",
    {
        "smallest": "as small, with 4 channels, 12 steps, one seed",
        "small": "ResNet-18 of 16 channels on 1,437 digits of 8 x 8, batches of 64, 12 epochs",
        "paper": "ResNet-18 of 64 channels on CIFAR-10 of yours, batches of 256, 200 epochs",
    },
    _pictures,
)


def _shaped(options: Options) -> tuple[Part, ...]:
    sizes: dict[str, tuple[int, dict[str, Any]]] = {
        "smallest": (240, {"steps": 12, "width": 4, "batch_size": 16}),
        "small": (6000, {"epochs": 5, "width": 8, "batch_size": 64}),
        "paper": (60_000, {"epochs": 20, "batch_size": 256}),
    }
    pictures, own = sizes[options.size]
    data = options.data or f"generated:pictures={pictures}"
    # A point of accuracy is less than what seeds differ by.
    seeds = options.seeds_or(MANY)
    config = ImageConfig(precision=_FORMATS, seeds=seeds, dtype="fp16", lr=0.1, data=data, **own)
    return (Training("resnet-18", config, curves=("training loss", "accuracy")),)


SHAPED = Experiment(
    "extra-bits-cifar-shape",
    {
        "smallest": "as small, with 240 pictures and 4 channels, 12 steps, one seed",
        "small": "ResNet-18 of 8 channels on 5,000 generated pictures of 3 x 32 x 32 in ten "
        "classes, and 1,000 to validate, batches of 64, 5 epochs",
        "paper": "ResNet-18 of 64 channels on 50,000 generated pictures of 3 x 32 x 32, batches of "
        "256, 20 epochs",
    },
    _shaped,
)


def _peaks(options: Options) -> tuple[Part, ...]:
    width, batch = {"smallest": (4, 16), "small": (64, 256), "paper": (64, 256)}[options.size]
    config = ImageConfig(
        precision=(WIDE, AMP, THIRTEEN, CUT, EIGHT, ALONE),
        data=options.data or "generated:pictures=600",
        steps=2,
        width=width,
        batch_size=batch,
        dtype="fp16",
        seeds=options.seeds_or(SEEDS),
    )
    return (Training("resnet-18", config),)


PEAKS = Experiment(
    "extra-bits-peaks",
    {
        "smallest": "ResNet-18 of 4 channels, two steps of 16 generated pictures of 3 x 32 x 32",
        "small": "ResNet-18 of 64 channels, two steps of 256 generated pictures of 3 x 32 x 32, "
        "the paper's size",
        "paper": "ResNet-18 of 64 channels, two steps of 256 generated pictures of 3 x 32 x 32",
    },
    _peaks,
)

# ------------------------------------------------------------------------ clicks

CLICKS_32, CLICKS_16, CLICKS_8 = "FP32, fp32", "FP16, fp16 nearest", "FP16 and 8 bits, fp16+8"


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
        "seeds": options.seeds_or(MANY),
    }
    if options.size == "paper":
        options.check_data("criteo:FILE")
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
            ("fp32", "fp32", WIDE, CLICKS_32),
            ("fp16", "fp16", ALONE, CLICKS_16),
            ("extra-bits-8", "fp16+8", EIGHT, CLICKS_8),
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
    settings: dict[str, object] = {
        "precisions": [ALONE, EIGHT, CUT, WIDE],
        "width": width,
        "steps": steps,
        "batch": batch,
    }
    if options.size == "paper":
        settings |= {"lr": 7e-5, "latent": 100}
    # A part for each seed, so that what was stopped goes on.
    return tuple(
        Measurement(f"seed-{seed}", adversarial.quality, {**settings, "seeds": [seed]})
        for seed in options.seeds_or(MANY)
    )


GENERATED = Experiment(
    "extra-bits-dcgan",
    {
        "smallest": "as small, with 4 channels, 12 steps, one seed",
        "small": "a DCGAN of 16 channels in BF16 on digits of 8 x 8, batches of 64, 1,500 steps",
        "paper": "a DCGAN of 64 channels in BF16 on digits of 8 x 8, with the paper's rate and "
        "100 numbers to draw from, batches of 128, 10,000 steps",
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


def _one_pass(options: Options) -> tuple[Part, ...]:
    width, rounds = {"smallest": (4, 3), "small": (32, 60), "paper": (64, 500)}[options.size]
    settings = {"precision": CUT, "width": width, "batch": 64, "rounds": rounds}
    settings |= {"seeds": list(options.seeds_or(SEEDS))}
    return (Measurement("one pass", one_pass.turns, settings),)


ONE_PASS = Experiment(
    "extra-bits-one-pass",
    {
        "smallest": "ResNet-18 of 4 channels, 3 steps of 64 random pictures of 8 x 8",
        "small": "ResNet-18 of 32 channels in FP16, 62 parameters, 60 steps of 64 random pictures "
        "of 8 x 8, one pass over all parameters and one for each by turns",
        "paper": "ResNet-18 of 64 channels in FP16, 500 steps",
    },
    _one_pass,
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

# ------------------------------------------------------------------------ sentence tasks

BERT = "BERT,"
TUNED = (WIDE, EIGHT, CUT, ALONE)
"""Precisions that a pre-trained BERT is fine-tuned in."""


def _berts(options: Options) -> tuple[Part, ...]:
    """The appendix's GLUE: one BERT for each seed, fine-tuned in every precision."""
    options.check_data("a text")
    recipe = fine_tuning.Recipe(3000, 1000, 3, 32, 5e-4)
    # Shallower, or shorter, it learns no more than how frequent tokens are.
    own: dict[str, object] = {"width": 128, "layers": 4, "steps": 2000, "vocabulary": 512}
    own |= {"batch_size": 32, "context": 32}
    if options.size == "smallest":
        recipe = fine_tuning.Recipe(64, 32, 1, 32, 5e-4)
        own = {"width": 16, "layers": 1, "heads": 2, "steps": 12, "vocabulary": 300}
        own |= {"batch_size": 2, "context": 8}
    if options.size == "paper":
        recipe = fine_tuning.Recipe(100_000, 10_000, 3, 16, 2e-5)
        own = {"width": 768, "layers": 12, "heads": 12, "steps": 28_125, "vocabulary": 30_522}
        own |= {"batch_size": 256, "context": 128, "lr": 1e-4, "warmup": 2000 / 28_125}
    own["data"] = options.data
    config = LMConfig(
        model="bert",
        level="bpe",
        tie_head=True,
        precision=(WIDE,),
        # Chosen by speed, they would be another experiment elsewhere.
        activations="bf16",
        seeds=options.seeds_or(SEEDS),
        **own,  # type: ignore[arg-type]
    )
    return (fine_tuning.FineTuning(Training("bert", config, BERT), recipe, TUNED),)


BERTS = Experiment(
    "extra-bits-bert",
    {
        "smallest": "as small, with a width of 16, 12 steps, one seed, 64 examples",
        "small": "BERT of 4 blocks and width 128, pre-trained in FP32 on a megabyte of Shakespeare "
        "in 512 byte pairs; then 3,000 examples of each of five sentence tasks, 3 epochs of AdamW "
        "in batches of 32, parameters in BF16, 1,000 tested",
        "paper": "BERT-base's sizes, pre-trained on a text of yours; then sentence tasks made of "
        "it, 3 epochs of AdamW in batches of 16",
    },
    _berts,
)

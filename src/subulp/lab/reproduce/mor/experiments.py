"""What is trained and measured to repeat what MoR claims."""

from __future__ import annotations

from ...tasks.lm.config import LMConfig
from .. import fine_tuning
from ..claim import Experiment, Options, Part
from ..measurement import Measurement, measured
from ..training import LAYERS, Training
from . import mixtures

SEEDS, SIX = (0, 1, 2), tuple(range(6))
"""For perplexities, and for shares, which differ more."""
FIVE = tuple(range(5))
"""For tasks, each of which takes a pre-training."""
BASE = "master"
"""BF16 weights and activations with master weights in the optimizer: the paper's baseline."""

PARTITIONS = ("tensor", "channel", "subchannel-128", "block-128x128")
BLOCK = "block-128x128"
MOR, TWO, THREE, ALWAYS = "mor-tensor", "mor-2way", "mor-3way", "e4m3"

_SIZE = {"rows": 300, "columns": 200}
ALL_PARTITIONS = ["tensor", "channel", "subchannel-32", "subchannel-128", BLOCK]

RANGES = measured(
    "mor-ranges", "all codes of the FP8 formats", Measurement("ranges", mixtures.ranges)
)

SCALES = measured(
    "mor-scales",
    "a matrix of 300 x 200 numbers over some twenty binades",
    Measurement("scales", mixtures.scales, {**_SIZE, "partitions": ALL_PARTITIONS}),
)

GROUPS = ("subchannel-32", "subchannel-128", "channel", "tensor")
"""What shares a mantissa, from a block alone to all of them."""

GROUPED = measured(
    "mor-groups",
    "ten matrices of 256 x 256 numbers over some twenty binades, in blocks of 32",
    Measurement(
        "groups",
        mixtures.groups,
        {
            "rows": 256,
            "columns": 256,
            "partition": "subchannel-32",
            "sizes": list(GROUPS),
            "spread": 3.0,
            "seeds": list(range(10)),
        },
    ),
)


def _choices(recipe: str) -> Experiment:
    name = f"mor-choices-{recipe}"
    settings = {**_SIZE, "recipe": recipe, "partitions": ALL_PARTITIONS, "threshold": 0.045}
    return measured(
        name,
        "three matrices of 300 x 200 numbers, of one size, and of sizes that differ by more than "
        "FP8 spans; each block decided again by rules that share nothing with the library",
        Measurement("choices", mixtures.choices, settings),
    )


TENSOR_CHOICES = _choices("tensor")
TWO_WAY_CHOICES = _choices("subtensor-2way")
THREE_WAY_CHOICES = _choices("subtensor-3way")

# ------------------------------------------------------------------------------ comparisons

MIXES = (
    "percent of inputs in E4M3",
    "percent of weights in E4M3",
    "percent of output gradients in E4M3",
)
_CURVES = ("training loss", "fp8 share", *MIXES)


def _lm(options: Options, **own: object) -> LMConfig:
    """A comparison of the size that was asked for: BF16 weights and activations."""
    options.check_data("a text")
    given: dict[str, object] = {"precision": (BASE,), "activations": "bf16", "beta2": 0.95}
    if options.size == "smallest":
        given |= {"width": 16, "layers": 1, "heads": 2, "context": 8, "batch_size": 2, "steps": 12}
    elif options.size == "small":
        given |= {"width": 192, "layers": 2, "heads": 6, "context": 64, "batch_size": 8}
        given["steps"] = 400
    else:
        given |= {"width": 4096, "layers": 32, "heads": 32, "context": 4096, "batch_size": 512}
        given |= {"model": "llama", "level": "bpe", "vocabulary": 50_257, "steps": 20_000}
        given["lr"] = 3e-4
    steps = int(str(given["steps"]))
    given |= {
        "seeds": options.seeds_or(SEEDS),
        "data": options.data,
        # What is chosen is recorded there; the validation part takes longer than some steps.
        "eval_every": max(12, steps // 5),
        "log_every": max(1, steps // 40),
        "watch_every": 10**9,
    }
    return LMConfig(**{**given, **own})  # type: ignore[arg-type]


def _partitions(options: Options) -> tuple[Part, ...]:
    """Sections 4.1.1 and 4.2."""
    tensor = _lm(options, linear=("bf16", MOR), partition=PARTITIONS)
    blocks = _lm(options, linear=(ALWAYS, TWO, THREE), partition=("subchannel-128", BLOCK))
    return (Training("tensor", tensor, curves=_CURVES), Training("blocks", blocks, curves=_CURVES))


PARTED = Experiment(
    "mor-partitions",
    {
        "smallest": "as small, with a GPT of width 16, 12 steps, one seed",
        "small": "GPT of 0.9 million parameters on a megabyte of Shakespeare by characters, "
        "BF16 weights and activations, 400 steps",
        "paper": "a model as Llama's of 6.9 billion parameters on a text of yours, 20,000 steps",
    },
    _partitions,
)

LARGEST = "30M,"


def _large(options: Options) -> tuple[Part, ...]:
    """The abstract's share, of the largest model that two cores train."""
    seeds = options.seeds_or(SIX)
    own: dict[str, object] = {"model": "llama", "level": "bpe", "seeds": seeds}
    if options.size == "small":
        own |= {"vocabulary": 1024, "width": 512, "layers": 9, "heads": 8, "steps": 200}
        # At 1e-3 and without a limit seeds differ by more than a mixture costs.
        own |= {"eval_every": 100, "lr": 2e-4, "max_norm": 1.0}
    elif options.size == "smallest":
        own["vocabulary"] = 300
    config = _lm(options, linear=("bf16", MOR), partition=("tensor", BLOCK), **own)
    return (Training("llama", config, LARGEST, _CURVES),)


LARGE = Experiment(
    "mor-large",
    {
        "smallest": "as small, with a width of 16, 12 steps, one seed",
        "small": "a model as Llama's of 29 million parameters on a megabyte of Shakespeare in "
        "1,024 byte pairs, BF16 weights and activations, batches of 8 sequences of 64, gradients "
        "of norm 1 at most, 200 steps",
        "paper": "a model as Llama's of 6.9 billion parameters on a text of yours, 20,000 steps",
    },
    _large,
)

_THRESHOLDS = (0.01, 0.02, 0.025, 0.045, 0.1)


def _thresholds(options: Options) -> tuple[Part, ...]:
    """Section 4.1.2."""
    base = Training("bf16", _lm(options, linear=("bf16",)), curves=("training loss",))
    parts = [base]
    for threshold in _THRESHOLDS:
        config = _lm(options, linear=(MOR,), partition=("tensor", BLOCK), mor_threshold=threshold)
        parts.append(
            Training(f"threshold-{threshold}", config, f"threshold {threshold},", _CURVES[:2])
        )
    return tuple(parts)


THRESHOLDS = Experiment(
    "mor-thresholds",
    {
        "smallest": "as small, with a GPT of width 16, 12 steps, one seed",
        "small": "GPT of 0.9 million parameters on a megabyte of Shakespeare by characters, "
        "BF16 weights and activations, five thresholds, 400 steps",
        "paper": "a model as Llama's of 6.9 billion parameters on a text of yours, 20,000 steps",
    },
    _thresholds,
)

CLOSE = 0.025
"""A threshold near E4M3's own error of 2.3 %, at which layers differ."""


def _second(options: Options) -> tuple[Part, ...]:
    """Another text, and what each layer chooses."""
    data = options.data or "definitions"
    seeds = options.seeds_or(SIX)
    own: dict[str, object] = {"data": data, "seeds": seeds}
    usual = _lm(options, linear=("bf16", MOR), partition=("tensor", BLOCK), **own)
    curves = ("training loss", "fp8 share")
    parts = [Training("usual", usual, curves=curves)]
    for partition in ("tensor", BLOCK):
        close = _lm(options, linear=(MOR,), partition=(partition,), mor_threshold=CLOSE, **own)
        case = f"threshold {CLOSE}, {partition}:"
        # A line for each layer: those of both partitions would be too many for a figure.
        shown = (*curves, LAYERS) if partition == "tensor" else curves
        parts.append(Training(f"close-{partition}", close, case, shown))
    return tuple(parts)


SECOND = Experiment(
    "mor-second-text",
    {
        "smallest": "as small, with a GPT of width 16, 12 steps, one seed",
        "small": "GPT of 0.9 million parameters on nearly two megabytes of definitions of words "
        "by characters, BF16 weights and activations, 400 steps",
        "paper": "a model as Llama's of 6.9 billion parameters on a text of yours, 20,000 steps",
    },
    _second,
)

BY_ROLE = ((ALWAYS, "e5m2"), (MOR, THREE))
"""How operands are represented, and how outputs' gradients are instead."""


def by_role(linear: str, gradients: str) -> str:
    """The case of such a recipe."""
    return f"{linear} with gradients in {gradients}, {BASE}"


def _roles(options: Options) -> tuple[Part, ...]:
    """Recipes by role, and the same for all roles."""
    parts = [Training("alike", _lm(options, linear=("bf16", ALWAYS, MOR)), curves=_CURVES[:2])]
    for linear, gradients in BY_ROLE:
        config = _lm(options, linear=(linear,), mor_gradients=gradients)
        case = by_role(linear, gradients).removesuffix(f" {BASE}")
        parts.append(Training(f"{linear}-{gradients}", config, case, _CURVES))
    return tuple(parts)


ROLES = Experiment(
    "mor-roles",
    {
        "smallest": "as small, with a GPT of width 16, 12 steps, one seed",
        "small": "GPT of 0.9 million parameters on a megabyte of Shakespeare by characters, "
        "BF16 weights and activations, scales by blocks of 128 x 128, 400 steps",
        "paper": "a model as Llama's of 6.9 billion parameters on a text of yours, 20,000 steps",
    },
    _roles,
)

BERT = "BERT,"


def _downstream(options: Options) -> tuple[Part, ...]:
    """BERTs pre-trained in mixtures and in BF16, then fine-tuned alike."""
    recipe = fine_tuning.Recipe(3000, 1000, 3, 32, 5e-4)
    # Shallower, or shorter, it learns no more than how frequent tokens are.
    own: dict[str, object] = {"width": 128, "layers": 4, "heads": 4, "steps": 2000}
    own |= {"vocabulary": 512, "batch_size": 32, "context": 32, "seeds": options.seeds or FIVE}
    if options.size == "smallest":
        recipe = fine_tuning.Recipe(64, 32, 1, 32, 5e-4)
        own = {"vocabulary": 300}
    elif options.size == "paper":
        recipe = fine_tuning.Recipe(100_000, 10_000, 3, 32, 2e-5)
        own = {"width": 768, "layers": 12, "heads": 12, "context": 512, "vocabulary": 30_522}
        own |= {"steps": 28_125}
    own |= {"model": "bert", "level": "bpe", "tie_head": True}
    # The coarsest partition, which has most to lose.
    config = _lm(options, linear=("bf16", MOR), partition=("tensor",), **own)
    return (fine_tuning.FineTuning(Training("bert", config, BERT, ("training loss",)), recipe),)


DOWNSTREAM = Experiment(
    "mor-downstream",
    {
        "smallest": "as small, with a width of 16, 12 steps, one seed, 64 examples",
        "small": "BERT of 4 blocks and width 128 on a megabyte of Shakespeare in 512 byte pairs, "
        "BF16 weights and activations, batches of 32 sequences of 32, 2,000 steps; then, in FP32, "
        "3,000 examples of each of five sentence tasks, 3 epochs in batches of 32, 1,000 tested",
        "paper": "BERT-base's sizes on a text of yours, 28,125 steps; then sentence tasks made of "
        "it, 3 epochs in batches of 32",
    },
    _downstream,
)

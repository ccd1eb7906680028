"""The language model's data, model and measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from .... import optim
from ....optim.options import strategy_for
from ...data.digest import digest as digest_of
from ...engine.data_parallel import replicated, shard
from ...engine.linear_operands import Variant
from ...engine.metrics import Metric
from ...engine.mixture_log import MixtureLog, convert
from ...engine.ranks import ALONE, Ranks
from ...engine.recipe import bytes_of_parameters, decay_groups, one_cycle
from ...engine.task import Decided, Workload
from .activations import choose
from .config import LMConfig, ParameterDtype
from .masks import MaskedBatches, masked_evaluation_batches
from .models import IGNORED, LanguageModel, Shape, token_loss, use_bf16
from .models import build as build_shape
from .text import Batches, Text, evaluation_batches, load_text

METRICS = (
    Metric("val_loss", "val\nloss", "{:.4f}", "Validation loss", "nats per token"),
    Metric("perplexity", "perplexity", "{:.3f}", "Perplexity", "", versus="ratio"),
)

COUNTED = "parameter"

EVALUATION_BATCH, EVALUATION_TOKENS = 64, 4096
"""Sequences that are measured at a time; short ones more, up to so many tokens."""

_DTYPES: dict[ParameterDtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
}
# The smallest E4M3 number is 2**-9, and gradients of this model are about 2**-10.
_LOSS_SCALES = {torch.float8_e4m3fn: 1024.0}


def load(config: LMConfig) -> Text:
    """The text of ``config``, after a check that every precision is possible."""
    for precision in config.precision:
        parameter_dtype(precision, config.dtype)
    text = load_text(config.data, config.level, config.tokens)
    text.check_context(config.context)
    return text


def describe(data: Text) -> dict[str, Any]:
    """Name, number of tokens in each part, and size of the vocabulary."""
    return {
        "name": data.name,
        "train": len(data.train),
        "validation": len(data.validation),
        "vocabulary": data.vocabulary,
    }


def steps(config: LMConfig, data: Text) -> int:
    """Training steps of each run."""
    return config.steps


def digest(data: Text) -> str:
    """A digest of the tokens."""
    return digest_of((data.train, data.validation))


def parameter_dtype(precision: str, dtype: ParameterDtype) -> torch.dtype:
    """Storage dtype of the parameters: ``dtype``, except under ``"fp32"``.

    Raises:
        ValueError: The strategy is unknown or not available for ``dtype``.
    """
    chosen = torch.float32 if precision == "fp32" else _DTYPES[dtype]
    strategy_for(optim.parse_precision(precision), chosen)
    return chosen


def loss_scale(config: LMConfig, precision: str) -> float:
    """Factor on the loss of a run: ``config.loss_scale``, or what its parameters' dtype needs."""
    if config.loss_scale is not None:
        return config.loss_scale
    return _LOSS_SCALES.get(parameter_dtype(precision, config.dtype), 1.0)


def shape_of(config: LMConfig, vocabulary: int) -> Shape:
    """Sizes of the model; BERT has a token more, which masks others."""
    return Shape(
        vocabulary + (config.model == "bert"),
        config.context,
        config.width,
        config.layers,
        config.heads,
        config.dropout,
        config.tie_head,
        config.model,
    )


def least_memory(config: LMConfig, data: Text, variant: str) -> int:
    """Weights, gradients and states; logits and their gradient; and one vector of a token."""
    precision = config.grid[variant].precision
    dtype = parameter_dtype(precision, config.dtype)
    count = shape_of(config, data.vocabulary).parameters
    tokens = config.batch_size * config.context
    # Undecided activations may be the narrower ones.
    size = 4 if config.activations == "fp32" else 2
    values = 4 * 2 * data.vocabulary + size * 4 * config.width * config.layers
    return bytes_of_parameters(optim.AdamW, dtype, count, precision=precision) + tokens * values


def build_model(
    config: LMConfig, vocabulary: int, precision: str, seed: int, device: torch.device
) -> tuple[LanguageModel, dict[str, Tensor]]:
    """The narrow model, and its initial weights in FP32.

    They are made from the seed alone, so every precision starts from the same ones.
    """
    torch.manual_seed(seed)
    model = build_shape(shape_of(config, vocabulary)).to(device)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    return model.to(parameter_dtype(precision, config.dtype)), initial


def build_optimizer(
    config: LMConfig, model: LanguageModel, initial: dict[str, Tensor], precision: str, seed: int
) -> optim.AdamW:
    """The optimizer of a model, whose parameters begin as exactly as their components can hold
    the initial weights. Matrices decay, vectors do not.
    """
    optimizer = optim.AdamW(
        decay_groups(model.named_parameters()),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        # The loss scale cancels in Adam's update, but for the addend of its denominator.
        eps=config.eps * loss_scale(config, precision),
        weight_decay=config.weight_decay,
        precision=precision,
        nonfinite=config.gradient_policy,
        seed=seed,
    )
    optimizer.load_full_precision_state_dict(model, initial)
    return optimizer


def convert_blocks(model: LanguageModel, variant: Variant) -> MixtureLog | None:
    """Give the blocks the linear layers of a variant; the output layer multiplies as it is."""
    return convert(model, variant, lambda name, _: name.startswith("blocks."))


def decide(config: LMConfig, device: torch.device) -> Decided:
    """What ``activations="auto"`` means on this machine: the same for all runs."""
    if config.activations != "auto":
        return Decided(config)
    # A block is measured, for which the vocabulary does not matter.
    chosen, record = choose(config, shape_of(config, 1), device)
    note = f"activations: {record['activations_reason']}"
    return Decided(replace(config, activations=chosen), record, (note,))


def check_ranks(config: LMConfig, ranks: Ranks) -> None:
    """Refuse what several ranks cannot share."""
    narrow = [p for p in config.precision if parameter_dtype(p, config.dtype).itemsize == 1]
    gpus = config.device != "cpu" and torch.cuda.is_available()
    if narrow and ranks.parallel == "fsdp" and not gpus:
        raise ValueError(
            f"dtype={config.dtype} and parallel=fsdp contradict each other on a CPU: gloo gathers "
            "no FP8 parameters; use ddp, or another dtype"
        )


def build(
    config: LMConfig,
    data: Text,
    variant: str,
    seed: int,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> Workload:
    """A run of one variant and seed."""
    chosen = config.grid[variant]
    model, initial = build_model(config, data.vocabulary, chosen.precision, seed, device)
    mix = convert_blocks(model, chosen)
    shard(model, ranks, model.blocks)
    optimizer = build_optimizer(config, model, initial, chosen.precision, seed)
    if config.used_activations == "bf16":
        use_bf16(model)
    training = _batches(config, data, seed)
    validation = [
        (x.to(device), y.to(device))
        for x, y in evaluated(data.validation, shape_of(config, data.vocabulary))
    ]
    forward = replicated(model, ranks, fused=config.fuse_backward)
    own, weight = ranks.part(config.batch_size), ranks.weight(config.batch_size)

    def loss(_: bool) -> Tensor:
        x, y = (t[own].to(device) for t in training.draw())
        return weight * token_loss(forward(x), y)

    return Workload(
        model,
        optimizer,
        config.steps,
        config.eval_every,
        lambda step: one_cycle(step, config.steps, warmup=config.warmup, final=config.final_lr),
        loss,
        lambda: measures(evaluate(model, validation, ranks)),
        {
            "shape": asdict(shape_of(config, data.vocabulary)),
            "characters": data.characters,
            "tokenizer": data.tokenizer,
            "variant": chosen.settings(),
            "activations": config.used_activations,
        },
        loss_scale=loss_scale(config, chosen.precision),
        parts={"batches": training},
        mix=mix,
    )


def _batches(config: LMConfig, data: Text, seed: int) -> Batches:
    if config.model == "bert":
        return MaskedBatches(
            data.train, config.batch_size, config.context, seed, mask=data.vocabulary
        )
    return Batches(data.train, config.batch_size, config.context, seed)


def evaluated(tokens: Tensor, shape: Shape) -> list[tuple[Tensor, Tensor]]:
    """All of ``tokens`` in the batches that a model of this shape is measured on."""
    if shape.model == "bert":
        return masked_evaluation_batches(
            tokens, EVALUATION_BATCH, shape.context, mask=shape.vocabulary - 1
        )
    sequences = max(EVALUATION_BATCH, EVALUATION_TOKENS // shape.context)
    return evaluation_batches(tokens, sequences, shape.context)


@torch.no_grad()
def evaluate(
    model: LanguageModel, batches: Sequence[tuple[Tensor, Tensor]], ranks: Ranks = ALONE
) -> float:
    """Mean loss per predicted token of the narrow model, summed in double precision."""

    def summed(batch: tuple[Tensor, Tensor]) -> float:
        x, y = batch
        return float(model.loss(x, y)) * _predicted(y)

    training = model.training
    model.eval()
    total = sum(ranks.each(summed, batches))
    model.train(training)
    return total / sum(_predicted(y) for _, y in batches)


def _predicted(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())


def measures(val_loss: float) -> dict[str, float]:
    """The metrics of a mean loss."""
    return {"val_loss": val_loss, "perplexity": _exp(val_loss)}


def _exp(loss: float) -> float:
    """``exp`` that becomes infinite instead of raising: a diverged run still has a summary."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf

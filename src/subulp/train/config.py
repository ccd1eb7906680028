"""What a language-model comparison is made of: one frozen object, one option per field.

The command line makes its options and their help from this class, so a field needs a type, a
default and a docstring, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter, Token

ParameterDtype = Literal["bf16", "fp16", "e4m3"]

_COMPARED = Group("What is compared", sort_key=0)
_TEXT = Parameter(group=_COMPARED)
_MODEL = Parameter(group=Group("Model", sort_key=1))
_OPTIMIZER = Parameter(group=Group("Optimizer", sort_key=2))
_MEASURED = Parameter(group=Group("Measurements", sort_key=3))
MACHINE = Parameter(group=Group("Machine", sort_key=4))


def _names(type_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(part.strip() for token in tokens for part in token.value.split(","))


def _integers(type_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _names(type_, tokens))
    except ValueError:
        given = ",".join(token.value for token in tokens)
        raise ValueError(
            f"seeds={given} is not a list of integers: give one, or several as in 0,1,2"
        ) from None


def _a_list(
    converter: Callable[[object, Sequence[Token]], tuple[object, ...]],
    name: tuple[str, ...] | None = None,
) -> Parameter:
    """An option whose value is a list separated by commas."""
    return Parameter(
        name=name,
        converter=converter,
        negative=(),
        group=_COMPARED,
        show_default=lambda values: ",".join(map(str, values)),
    )


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """A small GPT trained once for every precision and seed, on the same data in the same order.

    Raises:
        ValueError: A field is out of range, or two fields contradict each other.
    """

    precision: Annotated[tuple[str, ...], _a_list(converter=_names)] = (
        "master",
        "nearest",
        "collage-light",
        "collage-plus",
    )
    """Strategies to compare, separated by commas: fp32, nearest, stochastic, kahan, collage-light,
    collage-plus, fp32-states, master, extra-bits-K or extra-bits-K-stochastic."""

    seeds: Annotated[
        tuple[int, ...],
        _a_list(converter=_integers, name=("--seed", "--seeds")),
    ] = (0,)
    """Seed of initial weights, data order, dropout and stochastic rounding. Several, as in 0,1,2,
    repeat every precision and report mean and spread."""

    data: Annotated[Path | None, _TEXT] = None
    """Text file to train on, plain or .gz; without it, the bundled megabyte of Shakespeare."""

    level: Annotated[Literal["char", "byte"], _TEXT] = "char"
    """Tokens: the characters of a UTF-8 text, or bytes of anything."""

    dtype: Annotated[ParameterDtype, _MODEL] = "bf16"
    """Storage of the parameters, except under the precision fp32."""

    steps: Annotated[int, _OPTIMIZER] = 2500
    """Training steps of each run."""

    batch_size: Annotated[int, _OPTIMIZER] = 4
    """Sequences of a step."""

    context: Annotated[int, _MODEL] = 64
    """Tokens of a sequence."""

    width: Annotated[int, _MODEL] = 96
    """Size of a token's vector; a multiple of heads."""

    layers: Annotated[int, _MODEL] = 2
    """Transformer blocks."""

    heads: Annotated[int, _MODEL] = 4
    """Attention heads of a block."""

    dropout: Annotated[float, _MODEL] = 0.0
    """Share of activations dropped while training."""

    tie_head: Annotated[bool, _MODEL] = False
    """Let the output layer share the embedding's table."""

    lr: Annotated[float, _OPTIMIZER] = 1e-3
    """Highest learning rate."""

    final_lr: Annotated[float, _OPTIMIZER] = 0.1
    """Learning rate at the last step, as a share of lr; it falls along a cosine."""

    warmup: Annotated[float, _OPTIMIZER] = 0.05
    """Share of the steps in which the learning rate rises linearly."""

    beta1: Annotated[float, _OPTIMIZER] = 0.9
    """AdamW's decay of the first moment."""

    beta2: Annotated[float, _OPTIMIZER] = 0.999
    """AdamW's decay of the second moment. BF16 rounds 0.999 to 1: here the strategies part."""

    eps: Annotated[float, _OPTIMIZER] = 1e-8
    """AdamW's addend of the denominator."""

    loss_scale: Annotated[float | None, _OPTIMIZER] = None
    """Factor on the loss, and on eps to match, that keeps small gradients and their squares above
    the smallest number of fp16 and e4m3; without it 1 for bf16 and fp32, 1024 for fp16 and e4m3."""

    weight_decay: Annotated[float, _OPTIMIZER] = 0.1
    """AdamW's decoupled decay of the matrices; vectors do not decay."""

    nonfinite: Annotated[Literal["raise", "skip", "propagate"], _OPTIMIZER] = "raise"
    """What a step does with an infinite or NaN gradient."""

    eval_every: Annotated[int, _MEASURED] = 250
    """Steps between evaluations on the whole validation part; the last step is always one."""

    watch_every: Annotated[int, _MEASURED] = 100
    """Steps between measurements of what the optimizer's rounding loses, from the first step."""

    log_every: Annotated[int, _MEASURED] = 25
    """Steps between lines of metrics.jsonl."""

    threads: Annotated[int, MACHINE] = 1
    """CPU threads of each run. The sums of matrix products depend on it in their last bits."""

    device: Annotated[Literal["auto", "cpu", "cuda"], MACHINE] = "auto"
    """Where to train; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        for name in ("precision", "seeds"):
            _check_list(name, getattr(self, name))
        for name in (
            *("batch_size", "context", "width", "layers", "heads"),
            *("eval_every", "log_every", "threads"),
        ):
            _check_range(name, getattr(self, name), 1)
        # The second step is measured for memory, and must not carry the copies of the watch.
        for name in ("steps", "watch_every"):
            _check_range(name, getattr(self, name), 2)
        _check_range("warmup", self.warmup, 0, 1)
        _check_range("dropout", self.dropout, 0, 1, top_included=False)
        _check_range("lr", self.lr, 0)
        _check_range("final_lr", self.final_lr, 0, 1)
        _check_range("beta1", self.beta1, 0, 1, top_included=False)
        _check_range("beta2", self.beta2, 0, 1, top_included=False)
        _check_range("eps", self.eps, 0)
        if self.loss_scale is not None:
            _check_range("loss_scale", self.loss_scale, 1)
        _check_range("weight_decay", self.weight_decay, 0)
        for seed in self.seeds:
            _check_range("seed", seed, 0, 2**32 - 1)
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}: every head takes an "
                "equal part of the width"
            )
        if self.tie_head and self.dtype == "e4m3":
            raise ValueError(
                "tie_head=True is not available with dtype='e4m3': the two gradients of a tied "
                "table are added in its dtype, and PyTorch does not add FP8; use bf16 or fp16"
            )


def _check_list(name: str, values: tuple[object, ...]) -> None:
    if not values or "" in values:
        raise ValueError(f"{name} is empty, or has an empty entry: give at least one")
    twice = sorted({str(v) for v in values if values.count(v) > 1})
    if twice:
        raise ValueError(f"{name} repeats {', '.join(twice)}: give each once")


def _check_range(
    name: str, value: float, low: float, high: float = math.inf, *, top_included: bool = True
) -> None:
    if math.isfinite(value) and low <= value and (value < high or (top_included and value == high)):
        return
    if high == math.inf:
        wanted = f"at least {low}"
    else:
        wanted = f"from {low} to {high}" + ("" if top_included else ", which is excluded")
    raise ValueError(f"{name}={value} is out of range: give {wanted}")

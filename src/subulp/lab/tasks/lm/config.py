"""Options of a language-model comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from cyclopts import Parameter

from ...engine.config import (
    COMPARED,
    MEASURED,
    MODEL,
    MOST_STEPS,
    NAMES,
    OPTIMIZER,
    check_fields,
    check_names,
    overridable,
)
from ...engine.linear_operands import LinearConfig

ParameterDtype = Literal["bf16", "fp16", "e4m3"]
ActivationDtype = Literal["fp32", "bf16"]
ModelName = Literal["gpt", "llama", "bert"]

VOCABULARY = 2048
LEAST_VOCABULARY = 257
"""The bytes, and a pair of them."""
MOST_VOCABULARY = 1_000_000


@dataclass(frozen=True, kw_only=True)
class LMConfig(LinearConfig):
    """A small GPT trained once for every precision, kind of linear layers and seed, on the same
    data in the same order.

    Raises:
        ValueError: A field is out of range, or two fields contradict each other.
    """

    task: ClassVar[str] = "lm"
    decides: ClassVar[tuple[str, ...]] = ("linear",)
    earlier: ClassVar[dict[str, Any]] = {
        **LinearConfig.earlier,
        "activations": "fp32",
        "model": "gpt",
        "mor_gradients": None,
        "vocabulary": None,
    }

    precision: Annotated[tuple[str, ...], NAMES] = overridable(
        ("master", "nearest", "collage-light", "collage-plus")
    )
    """Strategies to compare, separated by commas: fp32, nearest, stochastic, kahan, collage-light,
    collage-plus, fp32-states, master, extra-bits-K, also with -deterministic, -truncate or
    -stochastic behind it. With several --linear, the default is master alone."""

    data: Annotated[Literal["definitions"] | Path | None, COMPARED] = None
    """Text file to train on, plain or .gz; definitions: nearly two bundled megabytes of WordNet's
    definitions of words, one a line; without it, the bundled megabyte of Shakespeare."""

    level: Annotated[Literal["char", "byte", "bpe"], COMPARED] = "char"
    """Tokens: the characters of a UTF-8 text, the bytes of any file, or bpe, pairs of bytes learned
    from the training part of a UTF-8 text."""

    vocabulary: Annotated[int | None, COMPARED, Parameter(show_default=False)] = None
    """Tokens to learn with --level bpe; by default 2048."""

    model: Annotated[ModelName, MODEL] = "gpt"
    """gpt: causal, learned positions; llama: rotary positions, RMSNorm and SwiGLU, no biases; bert:
    in both directions, trained to predict the 15 % of the tokens that are masked."""

    dtype: Annotated[ParameterDtype, MODEL] = "bf16"
    """Storage of the parameters, except under the precision fp32; e4m3 is FP8."""

    activations: Annotated[Literal["auto", "fp32", "bf16"], MODEL] = "auto"
    """Dtype in which activations and their gradients are computed; the loss is in FP32. auto takes
    bf16 on a GPU with BF16 units, and on a CPU if a block of the model is measured to be 10 %
    faster with it when the run begins; with --dtype fp16 it takes fp32."""

    steps: Annotated[int, OPTIMIZER] = 2500
    """Training steps of each run."""

    batch_size: Annotated[int, OPTIMIZER] = 4
    """Sequences in a batch."""

    context: Annotated[int, MODEL] = 64
    """Context length: tokens in a sequence."""

    width: Annotated[int, MODEL] = 96
    """Size of a token's vector; a multiple of heads."""

    layers: Annotated[int, MODEL] = 2
    """Transformer blocks."""

    heads: Annotated[int, MODEL] = 4
    """Attention heads in a block."""

    dropout: Annotated[float, MODEL] = 0.0
    """Share of the activations dropped in training."""

    tie_head: Annotated[bool, MODEL] = False
    """Share the embedding's table with the output layer."""

    lr: Annotated[float, OPTIMIZER] = 1e-3
    """Highest learning rate."""

    final_lr: Annotated[float, OPTIMIZER] = 0.1
    """Learning rate at the last step, as a share of lr; it falls along a cosine."""

    warmup: Annotated[float, OPTIMIZER] = 0.05
    """Share of the steps in which the learning rate rises linearly."""

    beta1: Annotated[float, OPTIMIZER] = 0.9
    """AdamW's decay of the first moment."""

    beta2: Annotated[float, OPTIMIZER] = 0.999
    """AdamW's decay of the second moment. BF16 rounds 0.999 to 1: here the strategies differ."""

    eps: Annotated[float, OPTIMIZER] = 1e-8
    """AdamW's epsilon, added to the denominator."""

    loss_scale: Annotated[float | None, OPTIMIZER] = None
    """Factor on the loss, and on eps to match, that keeps small gradients above the smallest number
    of their dtype; without it 1024 for e4m3 and 1 for all others."""

    weight_decay: Annotated[float, OPTIMIZER] = 0.1
    """AdamW's decoupled decay of the matrices; vectors do not decay."""

    eval_every: Annotated[int, MEASURED] = 250
    """Steps between evaluations on the whole validation part; the last step is always evaluated."""

    def _resolve(self) -> None:
        self._fill_defaults({} if len(self.linear) == 1 else {"precision": ("master",)})

    @property
    def used_activations(self) -> ActivationDtype:
        """Dtype of the activations; before ``"auto"`` is decided, the one that every device has."""
        return "fp32" if self.activations == "auto" else self.activations

    def settings(self, variant: str) -> dict[str, Any]:
        """As of every comparison of linear layers, and the dtype of the activations."""
        return {**super().settings(variant), "activations": self.used_activations}

    @property
    def tokens(self) -> int | None:
        """Tokens to learn; ``None`` where none are."""
        return self.vocabulary or VOCABULARY if self.level == "bpe" else None

    def check(self) -> None:
        """As of every configuration."""
        super().check()
        check_names("activations", (self.activations,), ("auto", *get_args(ActivationDtype)))
        if self.activations == "bf16" and self.dtype == "fp16":
            raise ValueError(
                "activations='bf16' is not available with dtype='fp16': BF16 would round the "
                "weights to fewer bits than they are stored in; use fp32 or auto"
            )
        counts = ("batch_size", "context", "width", "layers", "heads", "eval_every")
        check_fields(self, (*counts, "loss_scale"), 1)
        # The second step is measured for memory.
        check_fields(self, ("steps",), 2, MOST_STEPS)
        check_fields(self, ("warmup", "final_lr"), 0, 1)
        check_fields(self, ("dropout", "beta1", "beta2"), 0, 1, top_included=False)
        check_fields(self, ("lr", "eps", "weight_decay"), 0)
        check_fields(self, ("vocabulary",), LEAST_VOCABULARY, MOST_VOCABULARY)
        if self.vocabulary is not None and self.level != "bpe":
            raise ValueError(
                f"vocabulary={self.vocabulary} and level={self.level} contradict each other: only "
                "level=bpe learns tokens; leave vocabulary out"
            )
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}: every head takes an "
                "equal part of the width"
            )
        if self.model == "llama" and self.width // self.heads % 2:
            raise ValueError(
                f"width={self.width} and heads={self.heads} make heads of an odd size: "
                "model=llama turns pairs of numbers; give another width"
            )
        if self.max_norm is not None and self.dtype == "e4m3" and not self.fuse_backward:
            raise ValueError(
                f"max_norm={self.max_norm} is not available with dtype='e4m3': torch clips no FP8 "
                "gradients; with fuse_backward they are clipped in FP32"
            )
        if self.tie_head and self.dtype == "e4m3":
            raise ValueError(
                "tie_head=True is not available with dtype='e4m3': the two gradients of a tied "
                "table are added in its dtype, and PyTorch does not add FP8; use bf16 or fp16"
            )

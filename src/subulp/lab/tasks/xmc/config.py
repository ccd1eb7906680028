"""Options of an extreme-classification comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from cyclopts import Parameter

from ...engine.config import (
    COMPARED,
    MEASURED,
    MODEL,
    NAMES,
    OPTIMIZER,
    Default,
    check_fields,
    overridable,
    parameter_dtype,
)
from ...engine.linear_operands import PLAIN, TORCHAO, Linear, LinearConfig
from .presets import KAHAN, OutputLayer, PropensityName, preset

BASELINES = ("renee", "sampled", "shortlist")
"""Classifiers of others, all with FP32 weights and an FP32 encoder."""

# A transformer is fine-tuned: the bag's rate would undo what it has learned.
_TRANSFORMER_LR = 5e-5

_BAG_FIELDS = ("width", "layers", "max_terms")
"""Fields of the bag encoder alone; ``None`` with a transformer."""

_TRANSFORMER_FIELDS = ("max_length", "pooling")
"""Fields of a transformer alone; ``None`` with the bag encoder."""

_REFINE_LR = 0.05

_WITHOUT_DEFAULT = Parameter(show_default=False)

PLUS = "collage-plus"
"""Of ours: under KAHAN a second moment in BF16 never falls, as 0.999 of a number rounds to it."""

E4M3_HEAD_FRACTION = 0.2
"""Share of the labels whose rows carry a remainder where all are in E4M3, if none is given."""

ENOUGH_STEPS, FEWEST_EPOCHS, MOST_EPOCHS = 2_000, 4, 16
"""How long sets train if nothing is given: in fewer steps the encoder has not learned enough."""

LEAST_LABELS, MOST_LABELS = 64, 1 << 20
"""Labels of a generated set."""


@dataclass(frozen=True, kw_only=True)
class XMCConfig(LinearConfig):
    """A text encoder and a classifier over very many labels, trained once for every precision and
    seed, on the same texts in the same order.

    Raises:
        ValueError: A field is out of range, or two fields contradict each other.
    """

    task: ClassVar[str] = "xmc"
    decides: ClassVar[tuple[str, ...]] = ("preset", "encoder")
    earlier: ClassVar[dict[str, Any]] = {
        **LinearConfig.earlier,
        "encoder_precision": KAHAN,
        "generated_labels": None,
        "mor_gradients": None,
        "output_layer": "normalized",
        "refine_epochs": 0,
        "refine_lr": _REFINE_LR,
    }

    preset: Annotated[str | None, COMPARED] = None
    """A row of the ELMO paper's Table 9, such as amazon-3m-fp8, which sets the defaults of other
    options. An unknown name lists them all. It needs --encoder."""

    precision: Annotated[tuple[str, ...], NAMES] = overridable(("fp32", "fp8"))
    """Storage of the classifier's rows, separated by commas: fp32, bf16, fp16; fp8, which is E4M3;
    int8, int4, int2, integers with a scale and a bias for each row; eEmM with E exponent and M
    mantissa bits, simulated; renee, FP16-FP32 mixed precision with master weights and momentum;
    sampled and shortlist, FP32 rows that train on labels drawn at random, or of the best clusters.
    With +nearest rows are rounded to nearest instead of stochastically."""

    linear: Annotated[tuple[str, ...], NAMES] = overridable((PLAIN,))
    """Operands of the products of the encoder's linear layers, separated by commas. bf16:
    unchanged; e4m3: all in E4M3; mor-tensor, mor-2way, mor-3way: each tensor or block in E4M3,
    E5M2 or BF16, by its error; torchao-fp8: a transformer's in FP8 through the package torchao,
    which emulates it where there are no FP8 units. Runs of fp32, renee,
    sampled and shortlist have an FP32 encoder."""

    data: Annotated[Path | None, COMPARED] = None
    """Folder of a data set of the Extreme Classification Repository; without it, the bundled
    reverse dictionary of 10,222 words."""

    generated_labels: Annotated[int | None, COMPARED, _WITHOUT_DEFAULT] = None
    """Instead of data, a generated set of this many labels, without texts: features of their own in
    clusters, as frequent as Zipf's law has it, four instances a label."""

    label_texts: Annotated[bool | None, COMPARED, _WITHOUT_DEFAULT] = overridable(None)
    """Train on the labels' texts too; by default, wherever there are any."""

    encoder: Annotated[str, MODEL] = overridable("bag")
    """bag: words and word pairs, or a data set's own features, summed; or the folder of a
    Hugging Face transformer, which reads texts."""

    width: Annotated[int | None, MODEL] = overridable(256)
    """Size of a text's vector in the bag encoder; a transformer has its own."""

    layers: Annotated[int | None, MODEL, _WITHOUT_DEFAULT] = overridable(0)
    """Residual layers of the bag encoder: by default none, or one for the products of --linear; a
    transformer has its own."""

    max_terms: Annotated[int | None, MODEL] = overridable(500_000)
    """How many words and word pairs, or features, the bag encoder knows: the most frequent ones; a
    transformer has its own tokens."""

    max_length: Annotated[int | None, MODEL] = overridable(128)
    """Tokens of a text that a transformer reads."""

    pooling: Annotated[Literal["mean", "cls"] | None, MODEL] = overridable("mean")
    """A text's vector in a transformer: the mean of its tokens' vectors, or the first one."""

    gradient_checkpointing: Annotated[bool, MODEL] = False
    """Keep of a transformer's layers their inputs alone, and compute the rest again in the backward
    pass: less memory, more time, the same bits."""

    dropout: Annotated[float, MODEL] = overridable(0.5)
    """Share of a text's vector that is dropped while training."""

    output_layer: Annotated[OutputLayer, MODEL] = overridable("normalized")  # noqa: RUF009
    """What the classifier takes of a text. normalized: its vector at a length of 4, dropped out,
    and constants, in whose weights each label begins as rare as all are; plain: its vector, dropped
    out, and nothing else, as the authors of ELMO have it, and presets with a transformer."""

    weight_dropout: Annotated[float, MODEL] = 0.0
    """Dropout of the classifier's weights: the share that each step drops."""

    chunks: Annotated[int, MODEL] = 4
    """Chunks into which the labels are split."""

    head_fraction: Annotated[float | None, MODEL, _WITHOUT_DEFAULT] = overridable(None)
    """Share of the labels, the most frequent ones, whose rows carry a BF16 remainder, as in Kahan
    summation; by default, 0.2 with rows in fp8 and 0 with others or a preset."""

    scale: Annotated[Literal["none", "table"], MODEL] = "none"
    """Factor of the stored rows: none, as in the paper, or a power of two that fits the initial
    ones. Rows of integers have scales of their own."""

    products: Annotated[Literal["auto", "fp32", "bf16", "fp8"], MODEL] = "auto"
    """Operands of the products with the rows. fp32; bf16, for rows in BF16 and narrower: the texts'
    vectors and logits are BF16; fp8, for rows in E4M3: the vectors of the logits are E4M3, as in
    the paper. Other rows have auto: fp8 on a GPU of sm_89 or later, bf16 on a CPU with units of
    BF16, else fp32."""

    epochs: Annotated[int | None, OPTIMIZER, _WITHOUT_DEFAULT] = overridable(None)
    """Passes over the training texts; by default as many as make 2,000 steps, 4 at least and 16 at
    most."""

    steps: Annotated[int | None, OPTIMIZER] = None
    """Training steps of each run, instead of epochs."""

    batch_size: Annotated[int, OPTIMIZER] = overridable(64)
    """Texts in a batch."""

    encoder_precision: Annotated[str, OPTIMIZER] = overridable(PLUS)
    """Strategy of the encoder's AdamW: collage-plus; kahan, as the authors and presets have it;
    nearest, stochastic, collage-light, fp32-states, master or extra-bits-K on parameters in BF16;
    or fp32, an encoder in FP32. Runs of fp32, renee, sampled and shortlist have an FP32 encoder."""

    encoder_lr: Annotated[float, OPTIMIZER] = overridable(2e-3)
    """Highest learning rate of the encoder's AdamW; without it, 5e-5 for a transformer."""

    head_lr: Annotated[float, OPTIMIZER] = overridable(0.1)
    """Highest learning rate of the classifier's SGD, for a loss that is summed over the batch."""

    encoder_weight_decay: Annotated[float, OPTIMIZER] = overridable(0.01)
    """AdamW's decoupled decay of the encoder's matrices; vectors do not decay."""

    head_weight_decay: Annotated[float, OPTIMIZER] = overridable(0.0)
    """Decay of the classifier's rows, times the learning rate."""

    refine_epochs: Annotated[int, OPTIMIZER] = 0
    """After the training, passes in which the classifier alone goes on in FP32, on frozen vectors;
    its rows are then stored in BF16, or FP32 if they were. The refined one is measured and
    saved."""

    refine_lr: Annotated[float, OPTIMIZER] = _REFINE_LR
    """Learning rate of these passes, for a loss that is summed over the batch; falls linearly."""

    warmup: Annotated[float | None, OPTIMIZER] = overridable(0.1)
    """Share of the steps in which the learning rates rise linearly."""

    warmup_steps: Annotated[int | None, OPTIMIZER, _WITHOUT_DEFAULT] = overridable(None)
    """Warmup as a number of steps; give one of the two."""

    final_lr: Annotated[float, OPTIMIZER] = 0.0
    """Learning rates at the last step, as a share of the highest; they fall along a cosine."""

    propensity: Annotated[PropensityName, MEASURED] = overridable("default")  # noqa: RUF009
    """Constants of the propensity-scored measures."""

    eval_epochs: Annotated[int, MEASURED] = 1
    """Epochs between evaluations on the whole test part; the last step is always evaluated."""

    def check(self) -> None:
        """As of every configuration."""
        super().check()
        self._check_length()
        counts = ("width", "max_terms", "max_length", "chunks", "batch_size", "eval_epochs")
        check_fields(self, counts, 1)
        check_fields(self, ("final_lr", "head_fraction", "warmup"), 0, 1)
        check_fields(self, ("dropout", "weight_dropout"), 0, 1, top_included=False)
        rates = ("encoder_lr", "head_lr", "encoder_weight_decay", "head_weight_decay")
        check_fields(self, (*rates, "layers", "warmup_steps", "refine_epochs", "refine_lr"), 0)
        check_fields(self, ("generated_labels",), LEAST_LABELS, MOST_LABELS)
        if self.generated_labels is not None and self.data is not None:
            raise ValueError(
                f"generated_labels={self.generated_labels} and data={self.data} contradict each "
                "other: leave one of the two out"
            )
        if self.generated_labels is not None and self.encoder != "bag":
            raise ValueError(
                f"generated_labels={self.generated_labels} makes features, and "
                f"encoder={self.encoder} reads texts: use --encoder bag"
            )
        if self.refine_epochs and (wide := [b for b in BASELINES if b in self.precision]):
            raise ValueError(
                f"refine_epochs={self.refine_epochs} and precision={','.join(self.precision)} "
                f"contradict each other: {wide[0]} has FP32 weights already; leave one of the two "
                "out"
            )
        others = [b for b in BASELINES if b in self.precision]
        if others and self.weight_dropout:
            raise ValueError(
                f"weight_dropout={self.weight_dropout} and precision={','.join(self.precision)} "
                f"contradict each other: {others[0]} drops no weights; leave one of the two out"
            )
        if self.gradient_checkpointing and self.encoder == "bag":
            raise ValueError(
                "gradient_checkpointing has no effect on encoder=bag: give the folder of a "
                "transformer with --encoder DIR, or leave it out"
            )
        if TORCHAO in self.linear and self.encoder == "bag":
            raise ValueError(
                f"linear={','.join(self.linear)} and encoder=bag contradict each other: "
                f"{TORCHAO} is for the linear layers of a transformer; give its folder with "
                "--encoder DIR, or another --linear"
            )
        # Looking a strategy up imports torch, which help, with the default, need not wait for.
        if self.encoder_precision not in (KAHAN, PLUS):
            dtype = parameter_dtype("encoder_precision", self.encoder_precision, "bf16")
            if dtype == "float32" and self.linear != (PLAIN,):
                raise ValueError(
                    f"encoder_precision={self.encoder_precision} and "
                    f"linear={','.join(self.linear)} contradict each other: linear is for an "
                    "encoder in BF16; leave one of the two out"
                )
        plain = set(self.precision) <= set(self.plain_precisions)
        if self.layers == 0 and self.linear != (PLAIN,) and not plain:
            raise ValueError(
                f"layers=0 and linear={','.join(self.linear)} contradict each other: linear is for "
                "the products of the bag encoder's layers; give --layers 1, or leave layers out"
            )

    def check_effects(self) -> None:
        """As of every configuration."""
        super().check_effects()
        encoder, rows = {}, {}
        if set(self.precision) <= set(self.plain_precisions):
            # Files have KAHAN there, see _resolve, and a configuration of others that is given
            # these precisions may have PLUS.
            encoder = {"linear": ((PLAIN,),), "encoder_precision": (KAHAN, PLUS)}
        if set(self.precision) <= set(BASELINES):
            rows = {"head_fraction": (None, 0.0), "scale": ("none",)}
        for plain, what in ((encoder, "encoder is"), (rows, "rows are")):
            for name, without in plain.items():
                value = getattr(self, name)
                if value in without:
                    continue
                text = ",".join(value) if isinstance(value, tuple) else value
                raise ValueError(
                    f"{name}={text} has no effect on precision={','.join(self.precision)}, "
                    f"whose {what} in FP32: add another precision, or leave {name} out"
                )
        if not self.refine_epochs and self.refine_lr != _REFINE_LR:
            raise ValueError(
                f"refine_lr={self.refine_lr} has no effect without refine_epochs: give "
                "refine_epochs too, or leave refine_lr out"
            )

    def _check_length(self) -> None:
        # The data decide where neither is given.
        if self.steps is not None or self.epochs is not None:
            super()._check_length()

    def epochs_of(self, per_epoch: int) -> int | None:
        """Passes over the training texts, of ``per_epoch`` steps each; ``None`` with ``steps``."""
        if self.steps is not None or self.epochs is not None:
            return self.epochs
        enough = -(-ENOUGH_STEPS // max(per_epoch, 1))
        return min(max(enough, FEWEST_EPOCHS), MOST_EPOCHS)

    @property
    def may_skip(self) -> bool:
        """Whether steps that are not finite may be skipped: the scaler of ``renee`` does so."""
        return "renee" in self.precision or super().may_skip

    @property
    def linear_choices(self) -> tuple[str, ...]:
        """What ``linear`` may name: torchao's layers too."""
        return get_args(Linear)

    @property
    def plain_precisions(self) -> tuple[str, ...]:
        """Precisions with an encoder in FP32."""
        return ("fp32", *BASELINES)

    def encoder_strategy(self, precision: str) -> str:
        """Strategy of the encoder's AdamW in runs of ``precision``; ``fp32`` is an FP32 encoder."""
        return "fp32" if precision in self.plain_precisions else self.encoder_precision

    def rising_steps(self, total: int) -> int:
        """Steps in which the learning rates rise, of ``total``."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return 0 if self.warmup is None else int(self.warmup * total)

    def _resolve(self) -> None:
        """Give every field the value that was given, else the preset's, else its default."""
        settings = {} if self.preset is None else preset(self.preset).settings()
        bag = not self._given("encoder") or self.encoder == "bag"
        own, others = (
            (_BAG_FIELDS, _TRANSFORMER_FIELDS) if bag else (_TRANSFORMER_FIELDS, _BAG_FIELDS)
        )
        if bag:
            # Of a transformer: the bag encoder has its own.
            for name in ("linear", "output_layer"):
                settings.pop(name, None)
            if self._given("linear") and self.linear != (PLAIN,):
                settings["layers"] = 1
        else:
            settings.setdefault("encoder_lr", _TRANSFORMER_LR)
        settings |= dict.fromkeys(others)
        precision = self.precision if self._given("precision") else settings.get("precision")
        if precision and set(precision) <= set(self.plain_precisions):
            # It has no effect there; as files of earlier versions have it.
            settings["encoder_precision"] = KAHAN
        for name in filter(self._given, others):
            encoder = "bag" if bag else self.encoder
            raise ValueError(
                f"{name}={getattr(self, name)} and encoder={encoder} contradict each other: {name} "
                f"belongs to {'a transformer' if bag else 'the bag encoder'}; leave "
                "one of the two out"
            )
        if self.preset is not None and isinstance(self.encoder, Default):
            raise ValueError(
                f"preset={self.preset} trains the transformer {preset(self.preset).encoder}, which "
                "is never downloaded: give its folder with --encoder DIR, or --encoder bag"
            )
        if self._given("warmup") and self._given("warmup_steps"):
            raise ValueError(
                f"warmup={self.warmup} and warmup_steps={self.warmup_steps} contradict each other: "
                "give one of the two"
            )
        if self._given("warmup"):
            settings["warmup_steps"] = None
        elif self._given("warmup_steps") or "warmup_steps" in settings:
            settings["warmup"] = None
        for name in own:
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(XMCConfig, name))  # The class is frozen.
        self._fill_defaults(settings | self._decided_epochs())

    def _located(self, name: str, value: Any) -> Any:
        if name == "encoder" and value != "bag":
            return str(Path(value).absolute())
        return super()._located(name, value)

    def _given(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not isinstance(value, Default)

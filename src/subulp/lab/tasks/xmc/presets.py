# ruff: noqa: E501 - a row of the table is a line
"""The ELMO paper's hyper-parameters for its eight data sets: its Table 9, row by row."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from ...engine.config import check_names
from ...engine.linear_operands import PLAIN, TORCHAO, Linear

Precision = Literal["bf16", "fp8"]
Encoder = Literal["bert-base", "distil-bert", "distil-roberta"]
PropensityName = Literal["default", "wikipedia", "amazon"]
KAHAN = "kahan"
"""The strategy of the authors' encoders."""

OutputLayer = Literal["normalized", "plain"]
"""What the classifier takes of a text's vector, see :class:`.encoder.ClassifierInput`."""


@dataclass(frozen=True)
class Preset:
    """One row of the table, and two things that belong to its data set.

    Attributes:
        data_set: Its name, as the paper writes it.
        precision: Storage of the classifier's rows.
        encoder: The transformer.
        batch_size: Instances of a step.
        max_length: Tokens of a text.
        dropout: Share of the embedding that is dropped.
        encoder_lr: Highest learning rate of the encoder.
        head_lr: Highest learning rate of the classifier, which the paper calls XMC.
        epochs: Passes over the training part.
        warmup_steps: Steps in which the learning rates rise.
        encoder_weight_decay: Weight decay of the encoder.
        head_weight_decay: Weight decay of the classifier.
        label_texts: Whether label texts are training instances too, as in all data sets with label
            features.
        propensity: Constants of the propensity-scored measures, a name in
            ``metrics.PROPENSITIES``. The paper does not print them; they are the repository's.
    """

    data_set: str
    precision: Precision
    encoder: Encoder
    batch_size: int
    max_length: int
    dropout: float
    encoder_lr: float
    head_lr: float
    epochs: int
    warmup_steps: int
    encoder_weight_decay: float
    head_weight_decay: float
    label_texts: bool
    propensity: PropensityName

    @property
    def name(self) -> str:
        """What ``--preset`` calls it."""
        return f"{self.data_set.lower()}-{self.precision}"

    def settings(self) -> dict[str, Any]:
        """The fields of the task's configuration that it sets."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # Names of the data set and of the transformer, which are nowhere but in local folders.
        del values["data_set"], values["encoder"]
        return {
            **values,
            "precision": (self.precision,),
            "linear": (self.linear,),
            "output_layer": "plain",
            "encoder_precision": KAHAN,
            "head_fraction": 0.0,
        }

    @property
    def linear(self) -> Linear:
        """Operands of the encoder's linear layers: with FP8 rows they are in FP8 too, section 4.3."""
        return TORCHAO if self.precision == "fp8" else PLAIN


# fmt: off
_TABLE = (
    #                                                      batch length drop  enc lr  xmc lr epochs warmup  weight decay
    Preset("Wiki-500K",              "bf16", "bert-base",      128, 128, 0.65, 2e-5, 0.05,  35,  1_000, 1e-2, 1e-4, False, "wikipedia"),
    Preset("Wiki-500K",              "fp8",  "bert-base",      128, 128, 0.65, 2e-5, 0.15,  70,  1_000, 1e-2, 1e-4, False, "wikipedia"),
    Preset("AmazonTitles-670K",      "bf16", "bert-base",      256,  32, 0.70, 5e-5, 0.05, 100,  1_000, 1e-2, 1e-4, False, "amazon"),
    Preset("AmazonTitles-670K",      "fp8",  "bert-base",      256,  32, 0.75, 5e-5, 0.05, 150,  1_000, 1e-2, 1e-4, False, "amazon"),
    Preset("Amazon-670K",            "bf16", "bert-base",       64, 128, 0.75, 2e-5, 0.06, 100,    500, 1e-2, 1e-4, False, "amazon"),
    Preset("Amazon-670K",            "fp8",  "bert-base",       64, 128, 0.70, 2e-5, 0.05, 150,  1_000, 1e-2, 1e-4, False, "amazon"),
    Preset("Amazon-3M",              "bf16", "bert-base",      128, 128, 0.60, 5e-5, 0.05,  90, 10_000, 1e-3, 1e-3, False, "amazon"),
    Preset("Amazon-3M",              "fp8",  "bert-base",      128, 128, 0.65, 2e-5, 0.05, 150, 10_000, 1e-3, 1e-3, False, "amazon"),
    Preset("LF-AmazonTitles-131K",   "bf16", "distil-bert",    512,  32, 0.84, 1e-5, 0.10, 100, 15_000, 0.0,  0.0,  True,  "amazon"),
    Preset("LF-AmazonTitles-131K",   "fp8",  "distil-bert",    512,  32, 0.85, 1e-5, 0.05, 100,  5_000, 1e-2, 1e-4, True,  "amazon"),
    Preset("LF-WikiSeeAlso-320K",    "bf16", "distil-roberta", 128, 256, 0.75, 2e-5, 0.08, 100,  5_000, 1e-2, 1e-4, True,  "default"),
    Preset("LF-WikiSeeAlso-320K",    "fp8",  "distil-roberta", 128, 256, 0.75, 2e-5, 0.08, 100,  5_000, 1e-2, 1e-4, True,  "default"),
    Preset("LF-AmazonTitles-1.3M",   "bf16", "distil-bert",    512,  32, 0.65, 5e-6, 0.05, 100,  5_000, 1e-4, 1e-4, True,  "amazon"),
    Preset("LF-AmazonTitles-1.3M",   "fp8",  "distil-bert",    512,  32, 0.60, 5e-6, 0.20, 150, 15_000, 1e-2, 1e-4, True,  "amazon"),
    Preset("LF-Paper2Keywords-8.6M", "bf16", "distil-bert",    128, 128, 0.70, 2e-5, 0.05,  12,  5_000, 1e-2, 1e-4, True,  "default"),
    Preset("LF-Paper2Keywords-8.6M", "fp8",  "distil-bert",    128, 128, 0.70, 2e-5, 0.05,  12,  5_000, 1e-2, 1e-4, True,  "default"),
)
# fmt: on

PRESETS = {preset.name: preset for preset in _TABLE}


def preset(name: str) -> Preset:
    """The preset called ``name``.

    Raises:
        ValueError: There is none.
    """
    check_names("preset", (name,), sorted(PRESETS))
    return PRESETS[name]


def describe(name: str) -> str:
    """The settings of a preset, one per line.

    Raises:
        ValueError: There is no such preset.
    """
    chosen = preset(name)
    settings = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    settings |= {"linear": chosen.linear, "output_layer": "plain"}
    width = max(map(len, settings))
    lines = (f"  {key.replace('_', '-'):{width}}  {value}" for key, value in settings.items())
    return "\n".join((name, *lines))

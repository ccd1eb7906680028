"""Options of an image-classification comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ...engine.config import (
    COMPARED,
    MEASURED,
    MODEL,
    NAMES,
    OPTIMIZER,
    RunConfig,
    check_fields,
    overridable,
)

ParameterDtype = Literal["bf16", "fp16"]

WIDE = ("fp32", "amp")
"""Precisions whose parameters are in FP32."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig(RunConfig):
    """A ResNet-18 trained once for every precision and seed, on the same pictures in the same
    order.

    Raises:
        ValueError: A field is out of range, or two fields contradict each other.
    """

    task: ClassVar[str] = "image"

    precision: Annotated[tuple[str, ...], NAMES] = (
        "fp32",
        "amp",
        "extra-bits-13",
        "extra-bits-8",
        "nearest",
    )
    """Strategies to compare, separated by commas: fp32, amp (FP32 weights, arithmetic in --dtype),
    nearest, stochastic, kahan, collage-light, collage-plus, fp32-states, master, extra-bits-K,
    also with -deterministic, -truncate or -stochastic behind it; and simulated in FP16, e5m2 and
    e5m2+K with K extra bits."""

    data: Annotated[str, COMPARED] = "digits"
    """digits: 1,797 bundled pictures of handwritten digits, 8 x 8; cifar10:DIR: CIFAR-10's binary
    version, unpacked or as the archive; generated: figures of ten kinds in CIFAR-10's shape, with
    options as in generated:pictures=6000,noise=0.3,seed=0."""

    dtype: Annotated[ParameterDtype, MODEL] = "fp16"
    """Storage of parameters and activations, except under fp32 and e5m2, which is simulated in
    FP16; of activations alone under amp."""

    width: Annotated[int | None, MODEL] = None
    """Channels of the first stage; without it 64, as in ResNet-18, for pictures of 32 x 32 and 32
    for the digits."""

    epochs: Annotated[int | None, OPTIMIZER] = overridable(12)
    """Passes over the training pictures."""

    steps: Annotated[int | None, OPTIMIZER] = None
    """Training steps of each run, instead of epochs."""

    batch_size: Annotated[int, OPTIMIZER] = 64
    """Pictures in a batch."""

    augment: Annotated[bool, OPTIMIZER] = True
    """Shift every picture at random, and mirror all but digits."""

    lr: Annotated[float, OPTIMIZER] = 0.1
    """Highest learning rate."""

    final_lr: Annotated[float, OPTIMIZER] = 1e-3
    """Learning rate at the last step, as a share of lr; it falls along a cosine."""

    warmup: Annotated[float, OPTIMIZER] = 0.2
    """Share of the steps in which the learning rate rises linearly."""

    momentum: Annotated[float, OPTIMIZER] = 0.9
    """SGD's decay of the momentum buffer."""

    nesterov: Annotated[bool, OPTIMIZER] = False
    """Nesterov's momentum."""

    weight_decay: Annotated[float, OPTIMIZER] = 2e-4
    """SGD's decay of the kernels and matrices; vectors do not decay."""

    grad_scaler: Annotated[bool, OPTIMIZER] = False
    """Scale the loss as torch.amp.GradScaler does, which also skips steps that are not finite. The
    paper trains without it."""

    eval_epochs: Annotated[int, MEASURED] = 1
    """Epochs between evaluations on the validation part; the last step is always evaluated."""

    @property
    def may_skip(self) -> bool:
        """Whether steps that are not finite may be skipped."""
        return self.grad_scaler or super().may_skip

    def _resolve(self) -> None:
        self._fill_defaults(self._decided_epochs())

    def check(self) -> None:
        """As of every configuration."""
        super().check()
        self._check_length()
        check_fields(self, ("width", "batch_size", "eval_epochs"), 1)
        check_fields(self, ("warmup", "final_lr"), 0, 1)
        check_fields(self, ("momentum",), 0, 1, top_included=False)
        check_fields(self, ("lr", "weight_decay"), 0)
        if self.max_norm is not None and self.grad_scaler and not self.fuse_backward:
            self._check_unscaled()
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs momentum above 0")

    def _check_unscaled(self) -> None:
        """Refuse gradients that torch's scaler cannot unscale in FP32 before they are clipped."""
        narrow = [name for name in self.precision if name not in WIDE]
        if narrow:
            raise ValueError(
                f"max_norm={self.max_norm} is not available with grad_scaler and "
                f"precision={narrow[0]}: torch's scaler unscales BF16 gradients in BF16, and FP16 "
                "ones not at all; with fuse_backward they are unscaled and clipped in FP32"
            )

    def _located(self, name: str, value: Any) -> Any:
        if name == "data" and value.startswith("cifar10:") and value != "cifar10:":
            return f"cifar10:{Path(value.removeprefix('cifar10:')).absolute()}"
        return super()._located(name, value)

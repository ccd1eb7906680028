"""Training loops whose memory is compared, and the bytes that arithmetic predicts of each.

The model is a row of equal square layers, large beside its batch, so that weights, gradients and
states are nearly all of the memory. Every loop trains the same weights on the same batch with SGD,
momentum 0.9 and a loss scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .... import nn, optim
from ....diagnostics import track_memory
from ....diagnostics.memory import CATEGORIES
from ..found import Curve, Found, Observation

MOMENTUM = 0.9
LEARNING_RATE = 0.01
LOSS_SCALE = 2.0**12
WEIGHT_DECAY = 5e-4
STEPS = 3

Mark = Callable[[str], None]
"""Told which phase begins: "forward", "backward" or "step"."""
Training = tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[Mark], float]]
"""A model, its optimizer, and a training step that returns the loss."""


@dataclass(frozen=True)
class Shape:
    """Size of the model and of its batch."""

    layers: int
    width: int
    batch_size: int

    @classmethod
    def of(cls, parameters: int, layers: int, batch_size: int) -> Shape:
        """The shape nearest to so many parameters, in whole groups of 32 extra-bits tails."""
        return cls(layers, max(32, round((parameters / layers) ** 0.5 / 32) * 32), batch_size)

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return self.width**2

    @property
    def parameters(self) -> int:
        """Parameters of all layers."""
        return self.layers * self.layer


@dataclass(frozen=True)
class Case:
    """A training loop and its bytes.

    Attributes:
        about: The loop in words.
        bytes: What is alive at the highest point, bytes a parameter by category.
        layer_bytes: What is alive beside it, of one layer only, bytes a parameter of that layer.
        train: Makes the model, the optimizer and the step.
    """

    about: str
    train: Callable[[Shape], Training]
    bytes: dict[str, float]
    layer_bytes: dict[str, float] = field(default_factory=dict)

    def expected(self, shape: Shape) -> int:
        """Bytes at the peak, without what depends on the batch."""
        everywhere = sum(self.bytes.values()) * shape.parameters
        return round(everywhere + sum(self.layer_bytes.values()) * shape.layer)


# ------------------------------------------------------------------------------------ loops


def standard(
    shape: Shape,
    *,
    zero_grad_late: bool = False,
    backward_inside_autocast: bool = False,
    foreach: bool = False,
    weight_decay: float = 0.0,
) -> Training:
    """FP32 weights, gradients and momentum; torch.autocast in FP16; GradScaler."""
    model = network(shape, torch.nn.Linear, torch.float32)
    x = batch(shape, torch.float32)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
        foreach=foreach,
        weight_decay=weight_decay,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)

    def backward(loss: Tensor, mark: Mark) -> None:
        if zero_grad_late:
            optimizer.zero_grad()
        mark("backward")
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(mark: Mark) -> float:
        mark("forward")
        if not zero_grad_late:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = mean_square(model(x))
            if backward_inside_autocast:
                backward(loss, mark)
        if not backward_inside_autocast:
            backward(loss, mark)
        mark("step")
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return model, optimizer, step


def narrow(
    shape: Shape, *, precision: str, fused: bool = True, weight_decay: float = 0.0
) -> Training:
    """FP16 weights, activations and gradients; what FP16 loses is kept by the optimizer."""
    model = network(shape, nn.Linear, torch.float16)
    x = batch(shape, torch.float16)
    # The loss scale stays in the gradient and in the momentum, and leaves with the learning rate.
    optimizer = optim.SGD(
        model.parameters(),
        lr=LEARNING_RATE / LOSS_SCALE,
        momentum=MOMENTUM,
        weight_decay=weight_decay * LOSS_SCALE,
        precision=precision,
    )
    if fused:
        optim.fuse_backward(model, optimizer)

    def step(mark: Mark) -> float:
        mark("forward")
        # While fused, the backward pass steps and frees: zero_grad() and step() do nothing.
        optimizer.zero_grad()
        loss = mean_square(model(x))
        mark("backward")
        (loss * LOSS_SCALE).backward()  # type: ignore[no-untyped-call]
        mark("step")
        optimizer.step()
        return loss.item()

    return model, optimizer, step


def network(shape: Shape, linear: type[torch.nn.Linear], dtype: torch.dtype) -> torch.nn.Sequential:
    """Layers that keep the scale of their input, the same ones for every dtype up to rounding."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(shape.layers):
        layer = linear(shape.width, shape.width, bias=False)
        with torch.no_grad():
            # From torch's uniform bound 1 / sqrt(n) to He's for ReLU, sqrt(6 / n).
            layer.weight.mul_(6**0.5)
        layers += [layer.to(dtype), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def batch(shape: Shape, dtype: torch.dtype) -> Tensor:
    """The inputs of every step, ``(batch_size, width)``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape.batch_size, shape.width, generator=generator).to(dtype)


def mean_square(y: Tensor) -> Tensor:
    """The loss."""
    return y.float().square().mean()


# ------------------------------------------------------------------------------------ cases


def _standard(about: str, copies: float, half_gradients: float, **options: bool | float) -> Case:
    return Case(
        f"standard mixed precision, {about}",
        partial(standard, **options),  # type: ignore[arg-type]
        {"weights": 4, "gradients": 4, "states": 4, "activations": copies},
        # Autograd casts the FP16 gradient of a layer to FP32 while both are alive.
        {"activations": half_gradients},
    )


def _fused(precision: str, states: float, about: str, weight_decay: float = 0.0) -> Case:
    return Case(
        f"subulp, {about}, step inside the backward pass",
        partial(narrow, precision=precision, weight_decay=weight_decay),
        {"weights": 2, "gradients": 0, "states": states},
        {"gradients": 2},
    )


CASES = {
    # zero_grad() first, as in PyTorch's automatic mixed precision recipe. Half copies die during
    # the backward pass while gradients are born: they are never all alive together.
    "standard": _standard("zero_grad() before the forward pass", 0, 2),
    # The old gradients are still there when all half copies are.
    "standard-late-zero-grad": _standard(
        "zero_grad() before the backward pass", 2, 0, zero_grad_late=True
    ),
    # autocast frees its half copies when its block ends, here after the backward pass.
    "standard-backward-inside": _standard(
        "backward() inside autocast", 2, 2, backward_inside_autocast=True
    ),
    # foreach=True, the default on GPUs, decays all weights into new gradients at once.
    "standard-foreach-decay": _standard(
        "weight decay, foreach=True", 4, 0, foreach=True, weight_decay=WEIGHT_DECAY
    ),
    "extra-bits-8-unfused": Case(
        "subulp, FP16 + 8 bits, FP32 momentum, step after the backward pass",
        partial(narrow, precision="extra-bits-8", fused=False),
        {"weights": 2, "gradients": 2, "states": 5},
    ),
    "extra-bits-13": _fused("extra-bits-13", 4 + 13 / 8, "FP16 + 13 bits, FP32 momentum"),
    "extra-bits-8": _fused("extra-bits-8", 5, "FP16 + 8 bits, FP32 momentum"),
    "extra-bits-8-decay": _fused(
        "extra-bits-8", 5, "FP16 + 8 bits, FP32 momentum, weight decay", WEIGHT_DECAY
    ),
    "extra-bits-4": _fused("extra-bits-4", 4.5, "FP16 + 4 bits, FP32 momentum"),
    "collage-light": _fused("collage-light", 4, "FP16 + FP16, FP16 momentum"),
}
STANDARD = tuple(name for name in CASES if name.startswith("standard"))


# -------------------------------------------------------------------------------- measuring


def live(name: str, shape: Shape) -> dict[str, Any]:
    """Bytes of live tensors over the steps of one loop."""
    return live_of(CASES[name], shape)


def live_of(case: Case, shape: Shape) -> dict[str, Any]:
    """The same of a loop that is none of :data:`CASES`."""
    model, optimizer, step = case.train(shape)
    losses = []
    with track_memory(model, optimizer) as memory:
        for i in range(STEPS):
            losses.append(step(lambda phase, i=i: memory.mark(f"{i} {phase}")))  # type: ignore[misc]
    highest = max(memory.timeline, key=lambda moment: moment.bytes["total"])
    return {
        "peak_bytes": memory.peak_bytes,
        "peak_at": highest.mark,
        "category_peak_bytes": memory.category_peak_bytes,
        "losses": losses,
        "timeline": memory.timeline,
    }


EXTRA_BITS_16 = _fused("extra-bits-16", 6, "FP16 + 16 bits, FP32 momentum")
"""As many extra bits as there are."""


def timeline(cases: list[str], parameters: int, layers: int, batch_size: int) -> Found:
    """Live bytes over three steps of loops, and their peaks by category.

    Args:
        cases: Names in :data:`CASES`, or ``"extra-bits-16"``.
        parameters: Size of the model, about.
        layers: Equal layers.
        batch_size: Rows of the batch.
    """
    shape = Shape.of(parameters, layers, batch_size)
    found: list[Observation] = []
    curves = []
    for name in cases:
        measured = live_of(CASES.get(name, EXTRA_BITS_16), shape)
        count = shape.parameters
        peak, categories = measured["peak_bytes"], measured["category_peak_bytes"]
        found.append(Observation(name, "peak bytes per parameter", peak["total"] / count))
        found += [
            Observation(name, f"{category} at the peak", peak[category] / count)
            for category in CATEGORIES
        ]
        found.append(
            Observation(name, "largest gradients per parameter", categories["gradients"] / count)
        )
        moments = measured["timeline"]
        curves.append(
            Curve(
                name,
                "bytes per parameter",
                tuple(float(i) for i in range(len(moments))),
                tuple(moment.bytes["total"] / count for moment in moments),
            )
        )
    return Found(tuple(found), tuple(curves))

"""Scaled losses: unscaling in FP32, and how ``torch.amp.GradScaler`` learns what was found.

FP16 gradients underflow, so a scaler multiplies the loss. PyTorch refuses to unscale FP16 gradients
where they lie, for there they would underflow after all. Here the step unscales them, a few at a
time, into FP32: exact for scales that are powers of two.

``scaler.step(optimizer)`` hands ``grad_scale`` and ``found_inf`` to optimizers with
``_step_supports_amp_scaling``, as it does to PyTorch's own fused ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .parameters import Bucket

# FP32 gradients that are alive at a time, unless a single one is larger.
_UNSCALED_BYTES = 1024 * 1024


def unscaled(bucket: Bucket, scale: Tensor | float | None) -> Iterator[Bucket]:
    """A bucket in parts with unscaled FP32 gradients; as it is if there is no ``scale``."""
    if scale is None:
        yield bucket
        return
    factor, part = inverse(float(scale)), replace(bucket, params=[], grads=[], streams=[])
    for p, grad, stream in zip(bucket.params, bucket.grads, bucket.streams, strict=True):
        if part.params and part.nbytes + 4 * grad.numel() > _UNSCALED_BYTES:
            yield part
            part = replace(bucket, params=[], grads=[], streams=[])
        part.params.append(p)
        part.grads.append(unscale(grad, factor))
        part.streams.append(stream)
    yield part


def inverse(scale: float) -> float:
    """What scaled gradients are multiplied by: the reciprocal, rounded to FP32 by its use."""
    return 1.0 / scale


def unscale(grad: Tensor, factor: float) -> Tensor:
    """An FP32 gradient of the loss from one of the scaled loss."""
    return grad.to(torch.float32) * factor


class ScalerLink:
    """Reads the scale of a scaler and tells it what a fused step has found.

    ``GradScaler`` learns of overflows where it looks for them: in the gradients of an optimizer
    given to ``unscale_``. While fused there are none left to look at. So it gets to see a witness,
    an optimizer of one number, whose gradient is infinite if one of the model was not finite. All
    of this is the public interface; ``scaler.update()`` then does what it always does.

    Args:
        scaler: As ``torch.amp.GradScaler``.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._witness = torch.nn.Parameter(torch.zeros(()))
        self._optimizer = torch.optim.SGD([self._witness])

    @property
    def active(self) -> bool:
        """Whether the scaler is enabled."""
        return self._scaler.is_enabled()

    def factor(self) -> float:
        """What unscales the gradients of this step."""
        return inverse(self._scaler.get_scale())

    def report(self, finite: bool) -> None:
        """Tell the scaler whether all gradients of this step are finite.

        Raises:
            RuntimeError: It was not updated since the last step.
        """
        self._witness.grad = torch.full_like(self._witness, 0.0 if finite else torch.inf)
        try:
            self._scaler.unscale_(self._optimizer)
        except RuntimeError as error:
            raise RuntimeError(
                "the scaler was not updated since the last step; nothing was updated. Call "
                "scaler.update() after each step"
            ) from error

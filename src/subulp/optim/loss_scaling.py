"""Loss scaling: unscaling in FP32, and reporting overflows to ``torch.amp.GradScaler``.

FP16 gradients underflow, so a scaler multiplies the loss. PyTorch refuses to unscale FP16 gradients
in place, where they would underflow after all. Here the step unscales them into FP32, a few at a
time, which is exact for scales that are powers of two.

``scaler.step(optimizer)`` hands ``grad_scale`` and ``found_inf`` to optimizers with
``_step_supports_amp_scaling``, as it does to PyTorch's own fused ones. Others who ask for that, as
Lightning does, take it for a step that nobody may clip before; but what ``scaler.unscale_`` has
unscaled, or no scaler has scaled, is clipped as ever. So the scaler alone is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

import torch
from torch import Tensor

from .parameters import Bucket

# Bytes of FP32 gradients alive at a time, unless a single one is larger.
_UNSCALED_BYTES = 1024 * 1024


def is_asked_by_scaler(caller: FrameType) -> bool:
    """Whether ``GradScaler`` asks if a step unscales by itself, and not who clips before it.

    Args:
        caller: The frame that asks.
    """
    return caller.f_globals.get("__name__") == torch.amp.GradScaler.__module__


def read(
    found_inf: Tensor | float | None, scale: Tensor | float | None
) -> tuple[bool, float | None]:
    """What a scaler has found and scaled by; from a GPU in one copy, for which the host waits."""
    if (
        isinstance(found_inf, Tensor)
        and isinstance(scale, Tensor)
        and found_inf.device == scale.device
    ):
        found_inf, scale = torch.stack((found_inf.reshape(()), scale.reshape(()))).tolist()
    return bool(found_inf), None if scale is None else float(scale)


def unscaled(bucket: Bucket, scale: float | None) -> Iterator[Bucket]:
    """Parts of a bucket with unscaled FP32 gradients; without a ``scale``, the bucket itself."""
    if scale is None:
        yield bucket
        return
    # Of a bucket's kind, and empty.
    factor, part = inverse(scale), replace(bucket)
    for p, grad, stream in zip(bucket.params, bucket.grads, bucket.streams, strict=True):
        if part.params and part.nbytes + 4 * grad.numel() > _UNSCALED_BYTES:
            yield part
            part = replace(bucket)
        part.add((p,), (unscale(grad, factor),), (stream,))
    yield part


def inverse(scale: float) -> float:
    """The factor that unscales gradients: the reciprocal, rounded to FP32 when it is used."""
    return 1.0 / scale


def unscale(grad: Tensor, factor: float) -> Tensor:
    """The FP32 gradient of the loss, from that of the scaled loss."""
    return grad.to(torch.float32) * factor


class ScalerLink:
    """Reads a scaler's scale, and reports to it whether a fused step overflowed.

    ``GradScaler`` looks for overflows in the gradients of an optimizer given to ``unscale_``; a
    fused step has none left to look at. So the scaler is given a witness: an optimizer of one
    number, whose gradient is infinite if any of the model's is not finite. Only its public
    interface is used, and ``scaler.update()`` then works as usual.

    Args:
        scaler: The scaler of the loss.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._witness = torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device="cpu"))
        self._optimizer = torch.optim.SGD([self._witness])

    @property
    def active(self) -> bool:
        """Whether the scaler is enabled."""
        return self._scaler.is_enabled()

    def factor(self) -> float:
        """The factor that unscales the gradients of this step."""
        return inverse(self._scaler.get_scale())

    def report(self, finite: bool) -> None:
        """Tell the scaler whether all gradients of this step are finite.

        Raises:
            RuntimeError: ``scaler.update()`` was not called since the last step.
        """
        self._witness.grad = torch.full_like(self._witness, 0.0 if finite else torch.inf)
        try:
            self._scaler.unscale_(self._optimizer)
        except RuntimeError as error:
            raise RuntimeError(
                "the scaler was not updated since the last step; nothing was updated. Call "
                "scaler.update() after each step"
            ) from error

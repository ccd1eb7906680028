"""The interfaces of what observes an optimizer's steps, and of what takes them over."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .parameters import Bucket
from .pending import Pending


class StepObserver(Protocol):
    """Called at every step, inside the backward pass or after it; must not change anything."""

    def begin_step(self) -> None:
        """A step begins; it may still be skipped."""

    def fold(self, pending: Pending) -> None:
        """Gradients enter the moments of a bucket before the step (Adam accumulation)."""

    def begin_update(self, pending: Pending) -> None:
        """A bucket is about to be updated."""

    def end_update(self, bucket: Bucket) -> None:
        """A bucket has been updated."""

    def end_step(self) -> None:
        """All parameters with a gradient have been updated."""


class FusedStep(Protocol):
    """Takes the step inside the backward pass, instead of ``optimizer.step()``."""

    def gradient_bytes(self, p: Tensor) -> int:
        """Bytes that a parameter's gradient takes between backward passes."""

    def check_scaled(self) -> None:
        """Raise RuntimeError unless it was given the gradient scaler that calls ``step()``."""

    def check_saved(self) -> None:
        """Raise RuntimeError if the states hold a part of a step."""

    def loaded(self) -> None:
        """Other states have been loaded."""

    def check_step(self) -> None:
        """Raise RuntimeError if ``step()`` is called where no step was taken as expected."""

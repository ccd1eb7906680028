"""What an optimizer knows of those who watch its steps, and of the one who takes them over."""

from __future__ import annotations

from typing import Protocol

from .parameters import Bucket


class StepObserver(Protocol):
    """Is told of every step, inside the backward pass or after it; may change nothing."""

    def begin_step(self) -> None:
        """A step begins; it may still be left out."""

    def begin_update(self, bucket: Bucket) -> None:
        """A bucket is about to be updated."""

    def end_update(self, bucket: Bucket) -> None:
        """It has been."""

    def end_step(self) -> None:
        """All parameters with a gradient have been updated."""


class FusedStep(Protocol):
    """Steps the parameters inside the backward pass, instead of ``optimizer.step()``."""

    def check_scaled(self) -> None:
        """Raise RuntimeError unless it knows of the gradient scaler that calls ``step()``."""

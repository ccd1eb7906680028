"""Hooks of frameworks between a backward pass and its step, which a fused step comes before."""

from __future__ import annotations

import warnings
from collections.abc import Iterable


def warn_of_late_hooks(owners: Iterable[object], base: type, name: str) -> None:
    """Warn of each that has a hook of its own.

    Args:
        owners: Modules or callbacks.
        base: The framework's class, whose hook does nothing.
        name: The hook.
    """
    for each in owners:
        if getattr(type(each), name) is not getattr(base, name):
            warnings.warn(
                f"{name} of {type(each).__name__} is called after the step, which is fused into "
                "the backward pass: it finds no gradients, and what it changes of them is lost",
                stacklevel=3,
            )

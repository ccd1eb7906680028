"""Functions that compiled models call between their graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def between_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """``torch.compiler.disable``, applied at the first call instead of when a module is imported.

    Applying it imports all of Dynamo, which takes longer than importing torch itself. An exported
    program has one graph: ``torch.export`` goes through the function, which must suit it.
    """
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_exporting():
            return function(*args, **kwargs)
        if not disabled:
            disable = cast("Callable[[Callable[P, T]], Callable[P, T]]", torch.compiler.disable)
            disabled.append(disable(function))
        return disabled[0](*args, **kwargs)

    return call

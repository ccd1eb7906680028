"""Functions that compiled models call between their graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")

_REASON = "it runs between graphs: call it outside of what fullgraph=True compiles"
"""What a program that must be one graph is told."""


def between_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """``torch.compiler.disable``, applied at the first call instead of when a module is imported.

    Applying it imports all of Dynamo, which takes longer than importing torch itself; so it waits
    until somebody else has. An exported program has one graph: ``torch.export`` goes through the
    function, which must suit it.
    """
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _may_compile() or torch.compiler.is_exporting():
            return function(*args, **kwargs)
        if not disabled:
            disable = cast("Callable[..., Callable[P, T]]", torch.compiler.disable)
            disabled.append(disable(function, reason=_REASON))
        return disabled[0](*args, **kwargs)

    return call


def untraced(method: Callable[P, T]) -> Callable[P, T]:
    """A method that torch keeps out of graphs, which imports Dynamo at its first call.

    Where nothing can be compiling, the plain method.
    """
    plain = getattr(method, "__wrapped__", None)
    if _may_compile() or plain is None:
        return method
    return functools.partial(plain, method.__self__)  # type: ignore[attr-defined]


def _may_compile() -> bool:
    return "torch._dynamo" in sys.modules

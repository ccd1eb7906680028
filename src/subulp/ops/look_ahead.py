"""Backward passes that only look at gradients: rows that update themselves leave such a pass be.

A fused step that must know all gradients before it begins runs the pass twice. Usually the first
one does not come to tables and heads at all; it does where a function runs a pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Of all threads: autograd runs the passes of GPUs in its own.
_under_way: list[object] = []


@contextmanager
def looking_ahead() -> Iterator[None]:
    """Run a backward pass in the block, which another one repeats."""
    mark = object()
    _under_way.append(mark)
    try:
        yield
    finally:
        _under_way.remove(mark)


def is_under_way() -> bool:
    """Whether a backward pass is one that another one repeats."""
    return bool(_under_way)

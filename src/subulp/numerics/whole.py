"""Whole numbers, as arguments."""

from __future__ import annotations

from numbers import Integral
from typing import TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, NumPy's too, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)

"""Environment variables that every step reads."""

from __future__ import annotations

import os


def variable(name: str) -> str:
    """What an environment variable is set to; ``""`` if it is not set, as nearly always.

    As ``os.environ.get``, which raises an error inside for a variable that is not set, and passes
    it through six functions: 15 µs in the middle of a training step, whose caches hold none of
    them.
    """
    values = getattr(os.environ, "_data", None)
    if isinstance(values, dict) and os.name == "posix" and name.encode() not in values:
        return ""
    return os.environ.get(name, "")

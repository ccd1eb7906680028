"""Digests of data: a run resumes only on the data it started with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from torch import Tensor

Content = str | np.ndarray | Tensor


def digest(contents: Iterable[Content]) -> str:
    """SHA-256 over some contents and their sizes, in hexadecimal digits."""
    total = hashlib.sha256()
    for content in contents:
        array = content.numpy() if isinstance(content, Tensor) else content
        raw = array.encode() if isinstance(array, str) else np.ascontiguousarray(array).data
        size = len(raw) if isinstance(raw, bytes) else raw.nbytes
        total.update(size.to_bytes(8, "little"))
        total.update(raw)
    return total.hexdigest()

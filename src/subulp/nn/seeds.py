"""Seeds of modules that draw random bits of their own."""

from __future__ import annotations

import torch

from ..numerics.whole import is_whole

_WORDS = 2**32


def seed_of(given: int | None) -> int:
    """A module's seed, one word of Philox's key.

    Args:
        given: The ``seed=`` argument; ``None`` draws one from torch's generator, as the initial
            weights of torch's modules are drawn: modules differ, and ``torch.manual_seed`` repeats
            them.

    Raises:
        ValueError: It is no whole number, or out of range.
    """
    if given is None:
        return int(torch.randint(_WORDS, (), dtype=torch.int64, device="cpu"))
    if not is_whole(given) or not 0 <= given < _WORDS:
        raise ValueError(f"seed={given!r} is out of range: a whole number from 0 to 2**32 - 1")
    return int(given)

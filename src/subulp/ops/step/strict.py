"""What the strict steps share: rounded constants, and the parameter update."""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics import Format, expansion, round_to
from ..strategy import Strategy
from .storage import rest_of


def constant(value: float, like: Tensor, fmt: Format) -> Tensor:
    """A scalar rounded to ``fmt`` once, as an FP32 tensor () on the device of ``like``."""
    return round_to(torch.tensor(value, dtype=torch.float32, device=like.device), fmt)


def add_to_parameter(
    strategy: Strategy, param: Tensor, extra: Tensor | None, update: Tensor, fmt: Format
) -> None:
    """``param + update`` in place: rounded, by Kahan summation (appendix B) or Grow (line 13)."""
    theta = param.float()
    if strategy.weight == "plain":
        param.copy_(expansion.add(theta, update, fmt))
        return
    assert extra is not None
    if strategy.weight == "kahan":
        # Its remainder is rounded twice, and may be a whole ulp.
        update = expansion.add(update, rest_of(theta, extra, half_ulps=2), fmt)
        new = expansion.add(theta, update, fmt)
        extra.copy_(expansion.sub(update, expansion.sub(new, theta, fmt), fmt))
        param.copy_(new)
        return
    # A weight that starts at or near zero is smaller than its updates.
    rest = rest_of(theta, extra)
    hi, lo = expansion.grow(theta, rest, update, fmt, ordered=False)
    param.copy_(hi)
    extra.copy_(lo)

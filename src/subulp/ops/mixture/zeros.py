"""Zeros for kernels that begin with them: made many at a time, since to make them is a launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Memory is reused in the order of its stream, so each stream has its own.
_left: dict[tuple[torch.device, int], Iterator[Tensor]] = {}
_AT_ONCE = 256
# Those at even places are aligned for any load.
_NUMBERS = 6


def zeros(device: torch.device) -> Tensor:
    """Six zeros, int64, which nobody else is given."""
    is_cuda = device.type == "cuda"
    if is_cuda and torch.cuda.is_current_stream_capturing():
        # A graph that is replayed begins with zeros again.
        return torch.zeros(_NUMBERS, dtype=torch.int64, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
    found = next(_left.get((device, stream), iter(())), None)
    if found is None:
        made = torch.zeros(_AT_ONCE, _NUMBERS, dtype=torch.int64, device=device)
        left = _left[device, stream] = iter(made.unbind())
        found = next(left)
    return found

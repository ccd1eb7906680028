"""The same computation on a CPU by C++, and by Triton's kernels: on a GPU, or interpreted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.support import DEVICES, environment

on_every_device = pytest.mark.parametrize("device", DEVICES)


@contextlib.contextmanager
def kernels_of(device: str) -> Iterator[torch.device]:
    """Run Triton's kernels on tensors of ``device``."""
    with environment(SUBULP_BACKEND="triton") if device == "cpu" else contextlib.nullcontext():
        yield torch.device(device)


def on_both(device: str, compute: Callable[[torch.device], Any]) -> tuple[Any, Any]:
    """What ``compute`` gives on the CPU, and by the kernels of ``device``."""
    with environment(SUBULP_BACKEND="cpu"):
        expected = compute(torch.device("cpu"))
    with kernels_of(device) as place:
        return expected, compute(place)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, wherever they lie, have the same bits."""
    return torch.equal(*(t.detach().cpu().reshape(-1).view(torch.uint8) for t in (a, b)))


def tensors_of(state: Any) -> list[Tensor]:
    """All tensors of a nested state, in its order."""
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state
    nested = isinstance(state, dict | list | tuple)
    return [t for value in values for t in tensors_of(value)] if nested else []

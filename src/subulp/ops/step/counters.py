"""The step counters of a bucket's parameters, where the host counts.

Each is a tensor of its own, as ``torch.optim`` has them. To stack two hundred of them and to add
one to each takes PyTorch as long as a step of a million numbers takes; two loops in C++ do not.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import backend, native, pointers
from ..kinds import Remembered

FEWEST = 16
"""Counters that C++ counts: fewer are as fast in PyTorch."""

LAST = 2.0**24 - 1
"""The last count after which FP32 counts on to another number that it counts on from."""

# Not of a default device.
_ONE = torch.ones((), dtype=torch.float32, device="cpu")
_SIZE = 4
_NAME = "the step counters"

_plain: Remembered[bool] = Remembered()


class Counters:
    """The counters before a step, and after it.

    Args:
        steps: Floating-point tensors () on the CPU.
        device: Of the parameters.
        draws: The steps draw random bits, by their numbers: after 2**24 - 1, where FP32 would soon
            stop, they are counted on from 2**23 (default: ``False``).

    Attributes:
        after: (n,), what they count once the step is taken.

    Raises:
        ValueError: One is no such tensor, has no memory, or counts what no steps are.
    """

    def __init__(
        self, steps: Sequence[Tensor], device: torch.device, *, draws: bool = False
    ) -> None:
        self._steps = steps
        self._read(device)
        for before in set((self.after.double().numpy() - 1.0).tolist()):
            if not is_count(before):
                raise ValueError(
                    f"a step counter is {before}: expected how many steps were taken, a whole "
                    "number from 0 on, as the optimizer counts; nothing was updated"
                )
        if draws and self.after.numpy().max() > LAST:
            for step in steps:
                step.masked_fill_(step >= LAST, 2.0**23)
            self._read(device)

    def _read(self, device: torch.device) -> None:
        steps = self._steps
        self._addresses: array[int] | None = None
        many = len(steps) >= FEWEST
        if many and backend.choose(device).backend == "cpu" and are_counters(steps):
            self._addresses = array("Q", pointers.held_ptrs(_NAME, steps, [_SIZE] * len(steps)))
            self.after = torch.empty(len(steps), dtype=torch.float32, device="cpu")
            native.library().subulp_gather(*self._where(), self.after.data_ptr())
            self.after += 1.0
            return
        for step in steps:
            if not step.is_floating_point() or step.dim():
                raise ValueError(
                    f"a step counter is {step.dtype} of shape {tuple(step.shape)}: expected a "
                    "float32 tensor (), as the optimizer makes it"
                )
        pointers.dense_ptrs(_NAME, steps)
        # In one piece: one by one takes longer still.
        self.after = torch.stack(tuple(steps)) + 1.0

    def count(self) -> None:
        """Count the step."""
        if self._addresses is None:
            torch._foreach_add_(list(self._steps), [_ONE] * len(self._steps))
            return
        native.library().subulp_count(*self._where())
        torch.autograd.graph.increment_version(self._steps)

    def _where(self) -> tuple[int, int]:
        assert self._addresses is not None
        return len(self._addresses), self._addresses.buffer_info()[0]


def is_count(number: float) -> bool:
    """Whether as many steps may have been taken."""
    return 0.0 <= number < math.inf and number.is_integer()


def are_counters(steps: Sequence[Tensor]) -> bool:
    """Whether all are what C++ counts: FP32 tensors () with memory of their own on the CPU."""
    key = id(steps[0])
    if (found := _plain.get(key, steps)) is not None:
        return found
    cpu = torch.device("cpu")
    plain = pointers.are_plain(steps) and all(
        step.dtype == torch.float32 and step.device == cpu and step.dim() == 0 for step in steps
    )
    _plain.put(key, steps, plain)
    return plain

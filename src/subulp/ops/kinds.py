"""What tensors are but for their numbers and addresses, asked of all of them in one call.

A step of two hundred small parameters reads eight hundred tensors. To ask each of them for its
dtype, its device, its shape and its strides takes longer than the step, and the answers are those
of the step before. So what a check has found is remembered with the kinds of the tensors that it
looked at; it is looked for by them again, and tensors of another kind are checked as ever.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

FEWEST = 2
"""Tensors that are worth remembering: one alone is checked as fast."""

MOST = 1 << 17
"""Tensors whose kinds are remembered, those of the latest checks: about 20 MB."""

Found = TypeVar("Found")

# What compiled functions are guarded by: C++ that compares a tensor with the type, the dispatch
# keys (device, layout, negation, wrappers), the dtype, the sizes and the strides of another one.
_Guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_Guards = getattr(_Guards, "TensorGuards", None)


class Kinds:
    """The type, device, layout, dtype, shape and strides of each of several tensors.

    No tensor is kept alive.

    Args:
        tensors: The tensors.

    Attributes:
        count: How many there are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.count = len(tensors)
        self._guards = _Guards and _Guards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )

    def are_those_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether other tensors are of these kinds, one for one.

        ``False`` also where this PyTorch cannot tell, or a mode in which tensors are others than
        they look (``torch.inference_mode``, ``torch.func``) has begun or ended.
        """
        if self._guards is None or len(tensors) != self.count:
            return False
        return bool(self._guards.check(*tensors))


class Remembered(Generic[Found]):
    """What checks have found, which depends on nothing but a key and the kinds of tensors.

    Threads may share one: what another thread has forgotten meanwhile is checked again.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, tuple[Kinds, Found]] = OrderedDict()
        # Those of all kinds. They are counted as they come and go: a model may have an optimizer
        # for each parameter, and whoever went through all of them would take their square.
        self._tensors = 0
        self._lock = threading.RLock()

    def get(self, key: Hashable, tensors: Sequence[Tensor]) -> Found | None:
        """What was found of tensors of these kinds; ``None`` if they have to be checked.

        Args:
            key: Whatever else it depends on. One that also tells apart whose tensors they are
                keeps those of several optimizers.
            tensors: The tensors.
        """
        if len(tensors) < FEWEST:
            return None
        kinds, found = self._found.get(key, (None, None))
        if kinds is None or not kinds.are_those_of(tensors):
            return None
        # contextlib.suppress is three calls of Python more, in every step.
        try:  # noqa: SIM105
            self._found.move_to_end(key)
        except KeyError:
            pass
        return found

    def put(self, key: Hashable, tensors: Sequence[Tensor], found: Found) -> None:
        """Remember what was found of tensors, unless they are few."""
        if len(tensors) < FEWEST:
            return
        with self._lock:
            kinds, _ = self._found.pop(key, (None, None))
            if kinds is not None:
                self._tensors -= kinds.count
            if kinds is None or not kinds.are_those_of(tensors):
                kinds = Kinds(tensors)
            self._found[key] = kinds, found
            self._tensors += kinds.count
            while len(self._found) > 1 and self._tensors > MOST:
                _, (oldest, _) = self._found.popitem(last=False)
                self._tensors -= oldest.count

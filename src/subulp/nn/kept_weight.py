"""The encoded weight of a layer, for as long as the weight has the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..numerics.metrics import terms_of
from ..numerics.mixture import Summary
from ..ops import backend
from ..ops.fingerprint import fingerprint
from ..ops.mixture import KeptEncoding
from ..ops.mixture.operand import Operand
from .mor import MoR

Encode = Callable[[Tensor, KeptEncoding | None], tuple[Operand, Summary]]


class KeptWeight:
    """Encodes a weight once for as long as it has the same bytes, in each direction.

    C++ compares the bytes beforehand. It takes the memory of the encoded weight, so a layer that
    C++ trains clears it. Triton's kernels compare them on their way, see
    :class:`subulp.ops.mixture.KeptEncoding`: gradients that are accumulated and activations that
    are computed anew meet the same weight again, so they keep it in training too.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[object, ...], tuple[Operand, Summary]] | None = None
        self._there: dict[str, tuple[tuple[object, ...], KeptEncoding]] = {}
        self._latest: Operand | None = None

    def get(
        self, weight: Tensor, mor: MoR, encode: Encode, role: str = "weight"
    ) -> tuple[Operand, Summary]:
        """``encode(weight)``, computed where the weight or ``mor`` is another than before.

        Args:
            weight: The matrix.
            mor: How it is represented.
            encode: Encodes it; by Triton, into what is kept.
            role: Direction of the weight, each of which Triton keeps (default: ``"weight"``).
        """
        if keeps_in_training(weight.device):
            found = encode(weight, self._encoding(weight, mor, role))
            self._latest = found[0]
            return found
        number = fingerprint(weight)
        if number is None:
            return encode(weight, None)
        # A name of a metric may be registered anew.
        key = (mor, terms_of(mor.metric), *number)
        # In one piece: threads may be here at once, of which one clears what another has found.
        kept = self._kept
        if kept is None or kept[0] != key:
            self.clear()
            kept = self._kept = key, encode(weight, None)
        return kept[1]

    def is_latest(self, operand: Operand) -> bool:
        """Whether nothing was encoded since, which Triton's kernels would have written over it."""
        return self._latest is operand

    def clear(self) -> None:
        """Keep nothing."""
        self._kept = self._latest = None
        self._there.clear()

    def _encoding(self, weight: Tensor, mor: MoR, role: str) -> KeptEncoding | None:
        is_cuda = weight.device.type == "cuda"
        if is_cuda and torch.cuda.is_current_stream_capturing():
            # The host would not take turns when the graph is replayed.
            return None
        stream = torch.cuda.current_stream(weight.device).cuda_stream if is_cuda else 0
        key = mor, weight.dtype, weight.shape, weight.device, stream
        if role not in self._there or self._there[role][0] != key:
            self._there[role] = key, KeptEncoding()
        return self._there[role][1]

    def __deepcopy__(self, memo: object) -> KeptWeight:
        return KeptWeight()

    def __reduce__(self) -> tuple[type[KeptWeight], tuple[()]]:
        return KeptWeight, ()


def keeps_in_training(device: torch.device) -> bool:
    """Whether encoded weights are kept in training too, there."""
    return backend.choose(device).backend == "triton"

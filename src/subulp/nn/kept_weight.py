"""The encoded weight of a layer that is evaluated again and again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..numerics.mixture import Summary
from ..ops.fingerprint import fingerprint
from ..ops.mixture.operand import Operand
from .mor import MoR

Encode = Callable[[Tensor], tuple[Operand, Summary]]


class KeptWeight:
    """Encodes a weight once for as long as it has the same bytes, on a CPU.

    It takes the memory of the encoded weight, so a layer in training clears it.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._found: tuple[Operand, Summary] | None = None

    def get(self, weight: Tensor, mor: MoR, encode: Encode) -> tuple[Operand, Summary]:
        """``encode(weight)``, computed where the weight or ``mor`` is another than before."""
        number = fingerprint(weight)
        if number is None:
            return encode(weight)
        key = (mor, *number)
        if self._found is None or key != self._key:
            self.clear()
            self._found, self._key = encode(weight), key
        return self._found

    def clear(self) -> None:
        """Keep nothing."""
        self._key = self._found = None

    def __deepcopy__(self, memo: object) -> KeptWeight:
        return KeptWeight()

    def __reduce__(self) -> tuple[type[KeptWeight], tuple[()]]:
        return KeptWeight, ()

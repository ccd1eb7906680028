"""FP8 parameters with extra bits, simulated on FP16 storage.

"Memory Efficient Mixed Precision Optimizers", Table 3: an E5M2 number is the upper half of an FP16
number, so FP16 parameters whose lower halves are zero compute as E5M2 ones would. Beside each the
simulation keeps k more bits of its mantissa, in an FP32 master weight that holds no more than them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .... import optim
from ....numerics import E5M2, extra_bits, round_to
from ....optim.parameters import Bucket, Params
from ....optim.pending import Prepared

_NAME = re.compile(r"e5m2(?:\+(\d+))?")


def simulated_bits(precision: str) -> int | None:
    """The k of ``"e5m2+K"``, 0 for ``"e5m2"``, ``None`` for any other name.

    Raises:
        ValueError: K is not from 1 to 16.
    """
    match = _NAME.fullmatch(precision)
    if match is None:
        return None
    if match[1] is None:
        return 0
    return extra_bits.tail_width(int(match[1]), "truncate")


class SimulatedSGD(optim.SGD):
    """SGD on E5M2 parameters with k extra bits, truncated; without any, rounded to nearest.

    Args:
        params: FP16 parameters.
        bits: k, 0 to 16.
        **options: As of :class:`subulp.optim.SGD`, without ``precision``.
    """

    def __init__(self, params: Params, bits: int, **options: Any) -> None:
        super().__init__(params, precision="master", **options)
        self._bits = bits

    def load_full_precision_state_dict(self, model: nn.Module, state_dict: Any) -> None:
        """As for any optimizer; what the simulated components cannot hold is cut off."""
        super().load_full_precision_state_dict(model, state_dict)
        self._cut(p for group in self.param_groups for p in group["params"])

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes of the format that is simulated."""
        stored = super().bytes_per_parameter()
        simulated = {"parameter": 1.0, "gradient": stored["gradient"]}
        simulated |= {k: v for k, v in stored.items() if k.endswith("buffer")}
        if self._bits:
            simulated["extra_bits"] = self._bits / 8
        return {**simulated, "total": sum(simulated.values())}

    def _pending(self, bucket: Bucket) -> Prepared:
        # What the model computes with is cut to E5M2, and is no FP16 rounding of the master weight:
        # a step would take it for a weight that somebody has written.
        for p in bucket.params:
            if self.state[p]:
                p.copy_(self.state[p]["master"])
        return super()._pending(bucket)

    def _wide_value(self, group: dict[str, Any], p: Tensor) -> Tensor:
        state = self.state.get(p)
        return state["master"] if state else super()._wide_value(group, p)

    def update(self, bucket: Bucket, pending: Prepared | None = None) -> None:
        """As for any optimizer; then the master weights lose what is not stored."""
        super().update(bucket, pending)
        self._cut(bucket.params)

    @torch.no_grad()
    def _cut(self, params: Iterable[Tensor]) -> None:
        for p in params:
            master = self.state[p]["master"]
            if self._bits:
                head, tail = extra_bits.split(master, E5M2, self._bits, "truncate")
                master.copy_(extra_bits.join(head, tail, E5M2, self._bits, "truncate"))
            else:
                head = round_to(master, E5M2, "nearest")
                master.copy_(head)
            p.copy_(head)

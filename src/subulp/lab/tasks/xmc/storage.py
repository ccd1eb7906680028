"""The names that ``--precision`` gives to the classifier's storage."""

from __future__ import annotations

import re
from typing import NamedTuple

from ....nn.row_table import Storage, parse_storage
from ....numerics.int_rows import IntFormat
from ....ops.head import Rounding
from .config import BASELINES

RENEE, SAMPLED, SHORTLIST = BASELINES

_NAMED: dict[str, Storage] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "e4m3",
    "e4m3": "e4m3",
    "int8": "int8",
    "int4": "int4",
    "int2": "int2",
}
_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int4": 4, "int2": 2}
_SIMULATED = re.compile(r"e(\d)m(\d+)")


class HeadStorage(NamedTuple):
    """How the classifier's rows are kept.

    Attributes:
        storage: As :class:`subulp.nn.ExtremeClassifier` takes it.
        rounding: How their updates are rounded.
        bits: Bits of a number; rows of integers have a scale and a bias as well.
    """

    storage: Storage
    rounding: Rounding
    bits: int

    @property
    def simulated(self) -> bool:
        """Whether the numbers are stored wider than they are."""
        return isinstance(self.storage, tuple)

    @property
    def integers(self) -> bool:
        """Whether a row is made of integers, with a scale and a bias of its own."""
        return isinstance(parse_storage(self.storage), IntFormat)


def parse_precision(precision: str) -> HeadStorage | None:
    """The storage that a name stands for, ``None`` for one of :data:`BASELINES`.

    Raises:
        ValueError: It is unknown.
    """
    if precision in BASELINES:
        return None
    name, plus, rounding = precision.partition("+")
    if (plus and rounding != "nearest") or (name not in _NAMED and not _SIMULATED.fullmatch(name)):
        raise ValueError(
            f"precision={precision!r} is unknown: use fp32, bf16, fp16, fp8, int8, int4, int2, "
            "renee, sampled, shortlist, or eEmM with E exponent and M mantissa bits; all but fp32, "
            "renee, sampled and shortlist also with +nearest"
        )
    if plus and name == "fp32":
        raise ValueError("precision=fp32+nearest: FP32 rows are not rounded; give fp32")
    chosen: Rounding = "nearest" if plus else "stochastic"
    if name in _NAMED:
        return HeadStorage(_NAMED[name], chosen, _BITS.get(name, 8))
    match = _SIMULATED.fullmatch(name)
    assert match is not None
    exponent, mantissa = int(match[1]), int(match[2])
    return HeadStorage((exponent, mantissa), chosen, 1 + exponent + mantissa)

"""The ``precision=`` argument of the optimizers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..numerics.extra_bits import TailRounding, tail_width
from ..ops.strategy import Strategy, parse_strategy

AUTO = "auto"
"""``"fp32"`` for FP32 parameters, ``"collage-plus"`` for narrow ones."""


@dataclass(frozen=True)
class ExtraBits:
    """Keep k mantissa bits beside each 16-bit parameter instead of an FP32 master weight.

    "Memory Efficient Mixed Precision Optimizers", section 3.1.

    Args:
        bits: k, 1 to 16; 16 with BF16 and 13 with FP16 hold an FP32 weight whole.
        rounding: ``"truncate"``, or ``"stochastic"`` for a parameter without bias, at one more bit
            (default: ``"truncate"``).

    Raises:
        ValueError: ``bits`` is out of range or ``rounding`` is unknown.
    """

    bits: int
    rounding: TailRounding = "truncate"

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int):
            raise ValueError(f"bits={self.bits!r} is not an integer: keep 1 to 16 bits")
        tail_width(self.bits, self.rounding)

    def __str__(self) -> str:
        return f"extra-bits-{self.bits}" + ("-stochastic" if self.rounding == "stochastic" else "")


def parse_precision(precision: str | ExtraBits) -> str:
    """Canonical name of a ``precision=`` argument; a plain string, so that state dicts stay plain.

    Raises:
        ValueError: It is unknown or out of range; the message lists the choices.
    """
    if isinstance(precision, ExtraBits):
        return str(precision)
    if not isinstance(precision, str):
        raise ValueError(
            f"precision={precision!r} is neither a name nor an ExtraBits: pass for example "
            "precision='collage-plus' or precision=ExtraBits(8)"
        )
    return AUTO if precision == AUTO else parse_strategy(precision).name


def strategy_for(precision: str, dtype: torch.dtype) -> Strategy:
    """The strategy of a parameter of ``dtype`` under a canonical ``precision``.

    Raises:
        ValueError: The dtype cannot have it.
    """
    if precision == AUTO:
        precision = "fp32" if dtype == torch.float32 else "collage-plus"
    strategy = parse_strategy(precision)
    strategy.check_dtype(dtype)
    return strategy

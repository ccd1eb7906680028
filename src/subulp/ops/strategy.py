"""Precision strategies: which tensors an optimizer step keeps, in which formats.

The options A to D of the Collage paper (Table 2), Kahan summation (appendix B), stochastic rounding
(appendix B) and extra bits ("Memory Efficient Mixed Precision Optimizers", section 3.1), as data
that every implementation of a step reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from ..numerics import FP32, Format, format_of
from ..numerics.extra_bits import TailRounding, tail_width

WeightKind = Literal["plain", "stochastic", "kahan", "expansion", "master", "extra-bits"]
StateKind = Literal["plain", "stochastic", "expansion"]

_HALVES = (torch.bfloat16, torch.float16)
_NARROW = (*_HALVES, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Strategy:
    """How one optimizer step stores the parameter and its states.

    Attributes:
        name: Canonical name, as in ``precision=``.
        weight: How the parameter is kept.
        slow_state: How the state that moves in small steps is kept (Adam's second moment, SGD's
            momentum buffer).
        wide_states: Optimizer states are FP32; otherwise they have the parameter's width.
        dtypes: Parameter dtypes that can have the strategy.
        k: Extra bits kept of the parameter (0 unless ``weight`` is ``"extra-bits"``).
        tail_rounding: How the tail of k bits is rounded.
    """

    name: str
    weight: WeightKind
    slow_state: StateKind
    wide_states: bool
    dtypes: tuple[torch.dtype, ...]
    k: int = 0
    tail_rounding: TailRounding = "truncate"

    @property
    def extra_name(self) -> str | None:
        """Name of the tensor kept beside the parameter, ``None`` without one."""
        return _EXTRA_NAMES.get(self.weight)

    @property
    def tail_width(self) -> int:
        """Stored bits of one packed tail."""
        return tail_width(self.k, self.tail_rounding)

    @property
    def stochastic(self) -> bool:
        """Whether a step draws random bits."""
        return self.weight == "stochastic" or (self.k > 0 and self.tail_rounding == "stochastic")

    def fast_format(self, dtype: torch.dtype) -> Format:
        """Format of Adam's first moment for parameters of ``dtype``."""
        return FP32 if self.wide_states else format_of(dtype)

    def slow_format(self, dtype: torch.dtype) -> Format:
        """Format of the slow state for parameters of ``dtype``.

        FP8 gives it E5M2: a second moment spans twice the exponents of a first.
        """
        if self.wide_states:
            return FP32
        return format_of(torch.float8_e5m2 if dtype == torch.float8_e4m3fn else dtype)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError if parameters of ``dtype`` cannot have this strategy."""
        if dtype in self.dtypes:
            return
        have = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
        others = ", ".join(name for name, s in _FIXED.items() if dtype in s.dtypes)
        raise ValueError(
            f"precision={self.name!r} is not available for a parameter of dtype {dtype}: it needs "
            f"{have}. "
            + (f"For this dtype use one of: {others}." if others else "Convert the model first.")
        )


_EXTRA_NAMES: dict[WeightKind, str] = {
    "kahan": "compensation",
    "expansion": "parameter_low",
    "master": "master",
    "extra-bits": "extra_bits",
}

_FIXED = {
    s.name: s
    for s in (
        Strategy("fp32", "plain", "plain", True, (torch.float32,)),
        Strategy("nearest", "plain", "plain", False, _NARROW),
        Strategy("stochastic", "stochastic", "stochastic", False, _NARROW),
        Strategy("kahan", "kahan", "plain", False, _HALVES),
        Strategy("collage-light", "expansion", "plain", False, _NARROW),
        Strategy("collage-plus", "expansion", "expansion", False, _NARROW),
        Strategy("fp32-states", "plain", "plain", True, _HALVES),
        Strategy("master", "master", "plain", True, _HALVES),
    )
}

_EXTRA_BITS = re.compile(r"extra-bits-(\d+)(?:-(truncate|stochastic))?")


@cache
def parse_strategy(name: str) -> Strategy:
    """The strategy of a canonical or short name.

    Args:
        name: ``"fp32"``, ``"nearest"``, ``"stochastic"``, ``"kahan"``, ``"collage-light"``,
            ``"collage-plus"``, ``"fp32-states"``, ``"master"``, ``"extra-bits-K"`` or
            ``"extra-bits-K-stochastic"`` with K from 1 to 16.

    Raises:
        ValueError: The name is unknown or K is out of range.
    """
    if name in _FIXED:
        return _FIXED[name]
    match = _EXTRA_BITS.fullmatch(name)
    if not match:
        raise ValueError(
            f"precision={name!r} is unknown: use one of {', '.join(_FIXED)}, extra-bits-K or "
            "extra-bits-K-stochastic (K from 1 to 16)"
        )
    k = int(match[1])
    rounding: TailRounding = "stochastic" if match[2] == "stochastic" else "truncate"
    tail_width(k, rounding)
    canonical = f"extra-bits-{k}" + ("-stochastic" if rounding == "stochastic" else "")
    return Strategy(canonical, "extra-bits", "plain", True, _HALVES, k, rounding)

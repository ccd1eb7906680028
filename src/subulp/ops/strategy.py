"""Precision strategies: which tensors an optimizer step keeps, in which formats.

The options A to D of the Collage paper (Table 2), Kahan summation (appendix B), stochastic rounding
(appendix B) and extra bits ("Memory Efficient Mixed Precision Optimizers", section 3.1), as one
table. The reference and Triton read it; the C++ kernels have a copy, ``SUBULP_STRATEGIES`` in
csrc/subulp.h, which :mod:`.native` compares with this one when the library is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from ..numerics import E4M3, FP32, Format, format_of
from ..numerics.extra_bits import TailRounding, tail_width

WeightKind = Literal["plain", "stochastic", "kahan", "expansion", "master", "extra-bits"]
StateKind = Literal["plain", "stochastic", "expansion"]

DTYPES = {
    "whole": (torch.float32,),
    "halves": (torch.bfloat16, torch.float16),
    "narrow": (torch.bfloat16, torch.float16, torch.float8_e4m3fn),
}
"""Sets of parameter dtypes, by their name in the table."""


@dataclass(frozen=True)
class Strategy:
    """How one optimizer step stores the parameter and its states.

    Attributes:
        name: Canonical name, as in ``precision=``.
        weight: How the parameter is kept.
        slow_state: How the state that moves in small steps is kept (Adam's second moment, SGD's
            momentum buffer).
        wide_states: Optimizer states are FP32; otherwise they have the parameter's width.
        dtype_set: Parameter dtypes that can have the strategy, a key of :data:`DTYPES`.
        strict: Whether the strategy also exists in the papers' arithmetic, every operation rounded
            to the narrow format.
        k: Extra bits kept of the parameter (0 unless ``weight`` is ``"extra-bits"``).
        tail_rounding: How the tail of k bits is rounded.
    """

    name: str
    weight: WeightKind
    slow_state: StateKind
    wide_states: bool
    dtype_set: str
    strict: bool = False
    k: int = 0
    tail_rounding: TailRounding = "truncate"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Parameter dtypes that can have the strategy."""
        return DTYPES[self.dtype_set]

    @property
    def family(self) -> str:
        """Name of the strategy's row in the table, where ``K`` stands for a number of bits."""
        return self.name.replace(str(self.k), "K") if self.k else self.name

    @property
    def extra_name(self) -> str | None:
        """Name of the tensor kept beside the parameter, ``None`` without one."""
        return _EXTRA[self.weight][0] if self.weight in _EXTRA else None

    def extra_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Dtype of the tensor kept beside a parameter of ``dtype``, ``None`` without one."""
        return (_EXTRA[self.weight][1] or dtype) if self.weight in _EXTRA else None

    @property
    def tail_width(self) -> int:
        """Stored bits of one packed tail."""
        return tail_width(self.k, self.tail_rounding)

    def stored_bytes(self, dtype: torch.dtype) -> float:
        """Bytes of a parameter of ``dtype``, what is kept beside it, and Adam's two moments."""
        extra = self.extra_dtype(dtype)
        low = self.slow_state == "expansion"
        return (
            dtype.itemsize
            + (self.tail_width / 8 if self.k else extra.itemsize if extra else 0)
            + self.fast_format(dtype).itemsize
            + self.slow_format(dtype).itemsize * (2 if low else 1)
        )

    @property
    def stochastic(self) -> bool:
        """Whether a step draws random bits."""
        return "stochastic" in (self.weight, self.slow_state, self.tail_rounding)

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
        others = ", ".join(name for name, s in FIXED.items() if dtype in s.dtypes)
        raise ValueError(
            f"precision={self.name!r} is not available for a parameter of dtype {dtype}: it needs "
            f"{have}. "
            + (f"For this dtype use one of: {others}." if others else "Convert the model first.")
        )


# The tensor beside the parameter: its name, and its dtype unless that is the parameter's.
_EXTRA: dict[WeightKind, tuple[str, torch.dtype | None]] = {
    "kahan": ("compensation", None),
    "expansion": ("parameter_low", None),
    "master": ("master", torch.float32),
    "extra-bits": ("extra_bits", torch.int32),
}

TABLE = (
    # name, weight, slow state, FP32 states, parameter dtypes
    Strategy("fp32", "plain", "plain", True, "whole"),
    Strategy("nearest", "plain", "plain", False, "narrow", strict=True),
    Strategy("stochastic", "stochastic", "stochastic", False, "narrow"),
    Strategy("kahan", "kahan", "plain", False, "halves", strict=True),
    Strategy("collage-light", "expansion", "plain", False, "narrow", strict=True),
    Strategy("collage-plus", "expansion", "expansion", False, "narrow", strict=True),
    Strategy("fp32-states", "plain", "plain", True, "halves"),
    Strategy("master", "master", "plain", True, "halves"),
    Strategy("extra-bits-K", "extra-bits", "plain", True, "halves"),
    Strategy(
        "extra-bits-K-stochastic", "extra-bits", "plain", True, "halves", tail_rounding="stochastic"
    ),
)
"""All strategies; a row's place is its code in the C++ kernels."""

CODES = {s.name: code for code, s in enumerate(TABLE)}
"""Code of each :attr:`Strategy.family` in the C++ kernels."""

FIXED = {s.name: s for s in TABLE if s.weight != "extra-bits"}
"""The strategies whose names hold no number."""


def all_names(*ks: int) -> tuple[str, ...]:
    """Names of all strategies, those with extra bits for each k of ``ks`` (1 to 16)."""
    patterns = [s.name for s in TABLE if s.name not in FIXED]
    return (*FIXED, *(name.replace("K", str(k)) for k in ks for name in patterns))


def low_scale(fmt: Format) -> float:
    """Power of two that multiplies the stored second component of a parameter.

    1, and 16 for E4M3: with three mantissa bits a weight below 2**-5 already lies where the grid
    stops getting finer, and so would its second component. Stored four bits up, it does not.
    """
    return 16.0 if fmt == E4M3 else 1.0


_EXTRA_BITS = re.compile(r"extra-bits-(\d+)(?:-(truncate|stochastic))?")


@cache
def parse_strategy(name: str) -> Strategy:
    """The strategy of a canonical or short name.

    Args:
        name: A name of :data:`TABLE`, with K from 1 to 16; ``"-truncate"`` may follow
            ``"extra-bits-K"``.

    Raises:
        ValueError: The name is unknown or K is out of range.
    """
    if name in FIXED:
        return FIXED[name]
    match = _EXTRA_BITS.fullmatch(name)
    if not match:
        *names, last = CODES
        raise ValueError(
            f"precision={name!r} is unknown: use one of {', '.join(names)} or {last} "
            "(K from 1 to 16)"
        )
    k, rounding = int(match[1]), match[2] or "truncate"
    found = next(s for s in TABLE if s.weight == "extra-bits" and s.tail_rounding == rounding)
    tail_width(k, found.tail_rounding)
    return replace(found, name=found.name.replace("K", str(k)), k=k)

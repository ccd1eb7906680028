"""Precision strategies: which tensors an optimizer step keeps, in which formats.

The options A to D of the Collage paper (Table 2), Kahan summation (appendix B), stochastic rounding
(appendix B) and extra bits ("Memory Efficient Mixed Precision Optimizers", section 3.1, and two
codings of our own), as one table. The reference and Triton read it; the C++ kernels have a copy,
``SUBULP_STRATEGIES`` in csrc/subulp.h, which :mod:`.native` compares with this one when the library
is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from ..numerics import BF16, E4M3, E5M2, FP32, Format, format_of
from ..numerics.extra_bits import Coding, tail_width

WeightKind = Literal[
    "plain", "stochastic", "kahan", "expansion", "master", "extra-bits", "signed-bits"
]
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
        stochastic: Whether a step draws random bits.
        k: Extra bits kept of the parameter; 0 for strategies without.
    """

    name: str
    weight: WeightKind
    slow_state: StateKind
    wide_states: bool
    dtype_set: str
    strict: bool = False
    stochastic: bool = False
    k: int = 0

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
    def coding(self) -> Coding | None:
        """How head and tail of a parameter with extra bits are coded, ``None`` without a tail."""
        if self.weight == "signed-bits":
            return "nearest"
        if self.weight == "extra-bits":
            return "stochastic" if self.stochastic else "truncate"
        return None

    @property
    def words_name(self) -> str:
        """Name of the packed tails kept beside the parameter, empty without."""
        return self.extra_name or "" if self.coding else ""

    @property
    def tail_width(self) -> int:
        """Stored bits of one packed tail, 0 without one."""
        return tail_width(self.k, self.coding) if self.coding else 0

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
    def dithered(self) -> bool:
        """Whether a step rounds what carries nothing on, as the first moment, by a dither.

        Rounded to nearest, a moment stops short of gradients that hardly change: with decay 0.9, up
        to five ulps short. The dither is one number for a tensor and step, so that errors cancel
        over steps; see :func:`subulp.ops.step.job.dither`.
        """
        return self.slow_state != "plain"

    def fast_format(self, dtype: torch.dtype) -> Format:
        """Format of Adam's first moment for parameters of ``dtype``.

        FP16 gives its states BF16, as wide and with FP32's exponents: FP16 would lose the square of
        a gradient below 2**-12, and a step divides by its root.
        """
        if self.wide_states:
            return FP32
        return BF16 if dtype == torch.float16 else format_of(dtype)

    def slow_format(self, dtype: torch.dtype) -> Format:
        """Format of the slow state for parameters of ``dtype``.

        FP8 gives it E5M2: a second moment spans twice the exponents of a first.
        """
        if dtype == torch.float8_e4m3fn and not self.wide_states:
            return E5M2
        return self.fast_format(dtype)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError if parameters of ``dtype`` cannot have this strategy."""
        if dtype in self.dtypes:
            return
        have = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
        others = ", ".join(name for name, s in FIXED.items() if dtype in s.dtypes)
        raise ValueError(
            f"precision={self.name!r} is not available for a parameter of dtype {dtype}: it needs "
            f"{have}. "
            + (f"For this dtype use one of: {others}." if others else _WAYS_OUT.get(dtype, _ANY))
        )


# The tensor beside the parameter: its name, and its dtype unless that is the parameter's.
_EXTRA: dict[WeightKind, tuple[str, torch.dtype | None]] = {
    "kahan": ("compensation", None),
    "expansion": ("parameter_low", None),
    "master": ("master", torch.float32),
    "extra-bits": ("extra_bits", torch.int32),
    # Another name, so that a state dict of the one is not read as the other.
    "signed-bits": ("signed_bits", torch.int32),
}

_ANY = "Convert the model first."
_WAYS_OUT = {
    torch.float64: "Convert the model first, with model.float(), or give its FP64 parameters to an "
    "optimizer of torch.optim.",
    torch.float8_e5m2: "Convert the model first, to float8_e4m3fn: two mantissa bits are for "
    "gradients and states.",
}

TABLE = (
    # name, weight, slow state, FP32 states, parameter dtypes
    Strategy("fp32", "plain", "plain", True, "whole"),
    Strategy("nearest", "plain", "plain", False, "narrow", strict=True),
    Strategy("stochastic", "stochastic", "stochastic", False, "narrow", stochastic=True),
    Strategy("kahan", "kahan", "plain", False, "halves", strict=True),
    Strategy("collage-light", "expansion", "plain", False, "narrow", strict=True),
    Strategy("collage-plus", "expansion", "expansion", False, "narrow", strict=True),
    Strategy("fp32-states", "plain", "plain", True, "halves"),
    Strategy("master", "master", "plain", True, "halves"),
    Strategy("extra-bits-K", "signed-bits", "plain", True, "halves", stochastic=True),
    Strategy("extra-bits-K-deterministic", "signed-bits", "plain", True, "halves"),
    Strategy("extra-bits-K-truncate", "extra-bits", "plain", True, "halves"),
    Strategy("extra-bits-K-stochastic", "extra-bits", "plain", True, "halves", stochastic=True),
)
"""All strategies; a row's place is its code in the C++ kernels."""

CODES = {s.name: code for code, s in enumerate(TABLE)}
"""Code of each :attr:`Strategy.family` in the C++ kernels."""

FIXED = {s.name: s for s in TABLE if s.coding is None}
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


_EXTRA_BITS = re.compile(r"(extra-bits)-(0|[1-9][0-9]*)(-\w+)?")


@cache
def parse_strategy(name: str) -> Strategy:
    """The strategy of a canonical name.

    Args:
        name: A name of :data:`TABLE`, with K from 1 to 16.

    Raises:
        ValueError: The name is unknown or K is out of range.
    """
    if name in FIXED:
        return FIXED[name]
    match = _EXTRA_BITS.fullmatch(name)
    family = f"{match[1]}-K{match[3] or ''}" if match else ""
    if not match or family not in CODES:
        names = ", ".join(CODES)
        raise ValueError(f"precision={name!r} is unknown: use one of {names} (K from 1 to 16)")
    found, k = TABLE[CODES[family]], int(match[2])
    assert found.coding is not None
    tail_width(k, found.coding)
    return replace(found, name=name, k=k)

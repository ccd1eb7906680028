"""Options of the optimizers: parsing ``precision=``, and checks of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, SupportsFloat, get_args

import torch
from torch import Tensor

from ..ops.strategy import Strategy, parse_strategy

NonFinite = Literal["raise", "skip", "propagate"]
Arithmetic = Literal["wide", "strict"]
ExtraBitsRounding = Literal["nearest", "deterministic", "truncate", "stochastic"]


@dataclass(frozen=True)
class ExtraBits:
    """Keep k mantissa bits beside each 16-bit parameter instead of an FP32 master weight.

    After "Memory Efficient Mixed Precision Optimizers", section 3.1.

    Args:
        bits: k, 1 to 16; 16 with BF16 and 13 with FP16 hold an FP32 weight whole.
        rounding: How a step rounds (default: ``"nearest"``):

            * ``"nearest"``: the kept value stochastically to k extra bits, so that small updates
              count on average; the parameter is the 16-bit number nearest to it.
            * ``"deterministic"``: the same, but the kept value to nearest.
            * ``"truncate"``, the paper's: both are cut, which shrinks weights a little at every
              step.
            * ``"stochastic"``, the paper's other one: both stochastically, at one more bit.

    Raises:
        ValueError: ``bits`` is out of range or ``rounding`` is unknown.
    """

    bits: int
    rounding: ExtraBitsRounding = "nearest"

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int):
            raise ValueError(f"bits={self.bits!r} is not an integer: keep 1 to 16 bits")
        if self.rounding not in get_args(ExtraBitsRounding):
            choices = ", ".join(map(repr, get_args(ExtraBitsRounding)))
            raise ValueError(f"rounding={self.rounding!r} is unknown: use one of {choices}")
        parse_strategy(str(self))

    def __str__(self) -> str:
        return f"extra-bits-{self.bits}" + (
            "" if self.rounding == "nearest" else f"-{self.rounding}"
        )


LARGEST = 3.4028234663852886e38
"""The largest number of FP32, which options are read in."""

AUTO = "auto"
"""``"fp32"`` for FP32 parameters, ``"collage-plus"`` for narrow ones."""

Precision = str | ExtraBits | Mapping[torch.dtype, str | ExtraBits]
"""A precision for all parameters of a group, or one for those of each dtype."""


def parse_precision(precision: Precision) -> str:
    """Canonical name of a ``precision=`` argument; a plain string, so that state dicts stay plain.

    Of a precision for each dtype it is for example ``"bfloat16:collage-light,float32:fp32"``.

    Raises:
        ValueError: It is unknown or out of range; the message lists the choices.
    """
    if isinstance(precision, ExtraBits):
        return str(precision)
    if isinstance(precision, Mapping):
        return _parse_by_dtype(precision)
    if not isinstance(precision, str):
        raise ValueError(
            f"precision={precision!r} is neither a name nor an ExtraBits: pass for example "
            "precision='collage-plus' or precision=ExtraBits(8)"
        )
    if ":" in precision:
        _by_dtype(precision)
        return precision
    return AUTO if precision == AUTO else parse_strategy(precision).name


def _parse_by_dtype(precision: Mapping[torch.dtype, str | ExtraBits]) -> str:
    parts = {}
    for dtype, each in precision.items():
        if not isinstance(dtype, torch.dtype) or not isinstance(each, (str, ExtraBits)):
            raise ValueError(
                f"precision has {each!r} for {dtype!r}: give names of precisions, all for dtypes "
                "or all for patterns of parameters' names"
            )
        name = parse_precision(each)
        strategy_for(name, dtype)
        parts[str(dtype).removeprefix("torch.")] = name
    if not parts:
        raise ValueError("precision={} has no dtype: pass for example {torch.float32: 'fp32'}")
    return ",".join(f"{dtype}:{name}" for dtype, name in sorted(parts.items()))


@cache
def _by_dtype(precision: str) -> dict[torch.dtype, str]:
    """The precision of each dtype, from the canonical name of all."""
    found = {}
    for part in precision.split(","):
        dtype, _, name = part.partition(":")
        key = getattr(torch, dtype, None)
        if not isinstance(key, torch.dtype):
            raise ValueError(
                f"precision={precision!r} has no dtype of torch in {part!r}: write for example "
                "'bfloat16:collage-light,float32:fp32'"
            )
        found[key] = AUTO if name == AUTO else parse_strategy(name).name
        strategy_for(found[key], key)
    return found


def check_torch_options(
    optimizer: str, defaults: Mapping[str, object], given: Mapping[str, object]
) -> None:
    """Accept arguments of torch.optim that have no counterpart here, at their default values.

    ``foreach`` and ``fused`` choose among torch's implementations, and may have any value: a step
    is one fused pass for many tensors in any case.

    Args:
        optimizer: What errors call the optimizer.
        defaults: Their names and default values.
        given: What was passed.

    Raises:
        TypeError: A name is unknown.
        ValueError: A value is not the default.
    """
    for name, value in given.items():
        if name not in defaults:
            raise TypeError(f"{optimizer} has no argument {name!r}")
        # What else chooses an implementation of torch's is what every step here is.
        if name in ("foreach", "fused") and isinstance(value, bool):
            continue
        # As torch.optim does, also take None where the default is False, and False for None.
        if value is not defaults[name] and value not in (None, False):
            raise ValueError(
                f"{name}={value!r} is not available for subulp's {optimizer}, whose step is always "
                f"one fused pass over memory: leave {name} out"
            )


def strategy_for(precision: str, dtype: torch.dtype) -> Strategy:
    """The strategy of a parameter of ``dtype`` under a canonical ``precision``.

    Raises:
        ValueError: The dtype cannot have it.
    """
    if ":" in precision:
        known = _by_dtype(precision)
        if dtype not in known:
            have = ", ".join(sorted(str(each).removeprefix("torch.") for each in known))
            raise ValueError(
                f"precision={precision!r} has nothing for a parameter of dtype {dtype}, only for "
                f"{have}: add it"
            )
        precision = known[dtype]
    if precision == AUTO:
        precision = "fp32" if dtype == torch.float32 else "collage-plus"
    strategy = parse_strategy(precision)
    strategy.check_dtype(dtype)
    return strategy


def is_random(group: dict[str, Any]) -> bool:
    """Whether steps of a group may draw random bits."""
    return any(strategy_for(group["precision"], p.dtype).stochastic for p in group["params"])


def check_shared(options: dict[str, Any]) -> None:
    """Raise ValueError unless the options that all optimizers share are in range."""
    for name, choices in (("nonfinite", NonFinite), ("arithmetic", Arithmetic)):
        if options[name] not in get_args(choices):
            raise ValueError(
                f"{name}={options[name]!r} is unknown: use "
                f"{' or '.join(map(repr, get_args(choices)))}"
            )
    for name in ("maximize", "nesterov"):
        if not isinstance(options.get(name, False), bool):
            raise ValueError(f"{name}={options[name]!r} is unknown: use True or False")
    check_capturable(options)
    seed = options["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} is out of range: use an integer from 0 to 2**32 - 1")


def check_capturable(options: dict[str, Any]) -> None:
    """Raise ValueError if a step that may be captured in a CUDA graph would need the host."""
    capturable = options["capturable"]
    if not isinstance(capturable, bool):
        raise ValueError(f"capturable={capturable!r} is unknown: use True or False")
    if not capturable:
        return
    if options["nonfinite"] != "propagate":
        raise ValueError(
            f"nonfinite={options['nonfinite']!r} is not available with capturable=True: the host "
            "would wait for the gradients, and a CUDA graph has no host; use 'propagate', or leave "
            "capturable out"
        )
    if options["arithmetic"] == "strict":
        raise ValueError(
            "arithmetic='strict' is not available with capturable=True: its steps are counted by "
            "the host; use 'wide', or leave capturable out"
        )
    for name in ("betas", "eps", "weight_decay", "momentum", "dampening"):
        value = options.get(name)
        if any(
            isinstance(x, Tensor) for x in (value if isinstance(value, (tuple, list)) else (value,))
        ):
            raise ValueError(
                f"{name}={value!r} has a tensor, which is not available with capturable=True: a "
                "CUDA graph would go on with the number that it has now; pass plain numbers (lr "
                "alone may be a tensor)"
            )


def check_rate(lr: float | Tensor, *, capturable: bool = False) -> None:
    """Raise ValueError unless ``lr`` is a non-negative number or a tensor with one element.

    Args:
        lr: The learning rate.
        capturable: The host does not read a tensor, on whatever device it lies: a step that is
            captured must not wait (default: ``False``).
    """
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError(
                f"lr has shape {tuple(lr.shape)}: a tensor learning rate has one element; for "
                "several rates make several groups"
            )
        if capturable:
            if lr.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"lr is a tensor of {lr.dtype}: with capturable=True the step reads it on the "
                    "device, in float32 or float64"
                )
            return
        lr = float(lr.item())
    check_number("lr", lr)


def check_number(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a finite number of FP32, 0 or more."""
    # A protocol takes longer to look up than a small step.
    if isinstance(value, str) or not isinstance(value, (float, int, SupportsFloat)):
        raise ValueError(f"{name}={value!r} is not a number: use 0 or more")
    # Of an integer that no float holds, `float` makes an OverflowError.
    if not 0.0 <= (value if isinstance(value, int) else float(value)) <= LARGEST:
        raise ValueError(f"{name}={value} is out of range: use a finite number of FP32, 0 or more")

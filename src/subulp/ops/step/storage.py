"""How the tensors of a strategy hold wide values: the reference codec of every optimizer step.

A *wide* value is the FP32 number that the stored components stand for together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics import Format, extra_bits, format_of, random_bits, round_to
from ...numerics.random_bits import Region
from ..strategy import Strategy, low_scale
from .job import StepJob


def new_extra(strategy: Strategy, param: Tensor) -> Tensor | None:
    """The tensor kept beside a fresh parameter: its wide value is the parameter's own value."""
    if strategy.weight in ("kahan", "expansion"):
        return torch.zeros_like(param, memory_format=torch.preserve_format)
    if strategy.weight == "master":
        return param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
    if strategy.coding:
        words = extra_bits.packed_words(param.numel(), strategy.tail_width)
        return torch.zeros(words, dtype=torch.int32, device=param.device)
    return None


def decode_parameter(
    strategy: Strategy, param: Tensor, extra: Tensor | None, *, exact: bool = False
) -> Tensor:
    """Wide value of a parameter, FP32, of its shape.

    Args:
        strategy: How it is stored.
        param: The parameter.
        extra: What is stored beside it.
        exact: Give a sum of two components in FP64, in which none is rounded: the second may be far
            below the last bit that FP32 has of the first (default: ``False``).
    """
    if strategy.weight == "master":
        assert extra is not None
        # Beyond the largest number it was stored as that, where torch's cast has infinity.
        stored = round_to(extra, format_of(param.dtype)).to(param.dtype)
        same = stored.view(torch.int16) == param.view(torch.int16)
        return torch.where(same, extra, param.to(torch.float32))
    if strategy.coding:
        assert extra is not None
        tail = extra_bits.unpack(extra, param.numel(), strategy.tail_width).view(param.shape)
        return extra_bits.join(param, tail, format_of(param.dtype), strategy.k, strategy.coding)
    wide = param.to(torch.float32)
    if strategy.weight in ("expansion", "kahan"):
        assert extra is not None
        rest = rest_of(wide, extra)
        return wide.to(torch.float64) + rest if exact else wide + rest
    return wide


def rest_of(head: Tensor, extra: Tensor, *, half_ulps: int = 1) -> Tensor:
    """What an expansion or Kahan summation adds to a parameter, FP32: its rest, where believed.

    The parameter is the truth: whoever overwrites it, in whatever way, means it. A rest that no
    step could have left beside it, larger than half an ulp, belongs to an earlier value and counts
    as zero. So what was written stays, and what was not touched keeps its components.

    Args:
        head: The parameter in FP32.
        extra: What is kept beside it.
        half_ulps: The largest rest, 1 or 2 (default: 1).
    """
    fmt = format_of(extra.dtype)
    rest = extra.to(torch.float32) * (1.0 / low_scale(fmt))
    lowest = fmt.min_exponent + 127 << 23
    binade = (head.contiguous().view(torch.int32) & 0x7F800000).clamp(min=lowest)
    bound = binade.view(torch.float32)
    return torch.where(
        (rest * 2.0 ** (fmt.mantissa_bits + 2 - half_ulps)).abs() <= bound, rest, 0.0
    )


def encode_parameter(
    strategy: Strategy,
    wide: Tensor,
    param: Tensor,
    extra: Tensor | None,
    bits: Tensor | None,
    dither: Tensor | None = None,
) -> None:
    """Store a wide value in a parameter and the tensor beside it, in place.

    Args:
        strategy: How the parameter is kept.
        wide: FP32 tensor of the parameter's shape.
        param: Overwritten.
        extra: Overwritten; ``None`` if the strategy has none.
        bits: Random bits of the parameter's shape if the strategy is stochastic, else ``None``.
        dither: See :func:`dither_bits`, for the second component (default: ``None``, to nearest).
    """
    fmt = format_of(param.dtype)
    if strategy.coding:
        assert extra is not None
        head, tail = extra_bits.split(wide, fmt, strategy.k, strategy.coding, bits=bits)
        param.copy_(head)
        extra.copy_(extra_bits.pack(tail, strategy.tail_width))
        return
    if strategy.weight == "stochastic":
        param.copy_(round_to(wide, fmt, "stochastic", bits=bits))
        return
    hi = round_to(wide, fmt)
    if strategy.weight == "master":
        assert extra is not None
        extra.copy_(wide)
    elif strategy.weight in ("expansion", "kahan"):
        assert extra is not None
        extra.copy_(_rounded(remainder(wide - hi) * low_scale(fmt), fmt, dither))
    param.copy_(hi)


def dither_bits(strategy: Strategy, number: int, like: Tensor) -> Tensor | None:
    """A dither as the random bits of a tensor, ``None`` if the strategy rounds to nearest.

    Args:
        strategy: See :attr:`Strategy.dithered`.
        number: The dither, from :func:`subulp.ops.step.job.dither`.
        like: Of the tensor's shape and device.
    """
    if not strategy.dithered:
        return None
    return torch.full((), number, dtype=torch.int64, device=like.device).expand(like.shape)


def _rounded(x: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    return round_to(x, fmt) if bits is None else round_to(x, fmt, "stochastic", bits=bits)


def remainder(difference: Tensor) -> Tensor:
    """What rounding left over; zero where the rounded value is not finite (inf - inf)."""
    return torch.where(torch.isnan(difference), 0.0, difference)


def decode_state(state: Tensor, low: Tensor | None, scale: float) -> Tensor:
    """Wide value of an optimizer state: ``(state + low) * scale``, ``scale`` a power of two."""
    wide = state.to(torch.float32)
    if low is not None:
        wide = wide + low.to(torch.float32)
    return wide * scale


def decode_moments(job: StepJob, i: int) -> list[Tensor]:
    """Wide values of the states of tensor ``i`` before a step, the fast one first."""
    job.settle()
    s, moments = job.scalars[i], []
    if job.fast:
        moments.append(decode_state(job.fast[i], None, float(s["fast_decode"])))
    if job.slow:
        low = job.role(job.slow_lows, i)
        moments.append(decode_state(job.slow[i], low, float(s["slow_decode"])))
    return moments


def encode_state(
    wide: Tensor, state: Tensor, low: Tensor | None, scale: float, bits: Tensor | None
) -> None:
    """Store a wide value in an optimizer state, in place: rounded, or as an expansion.

    Args:
        wide: FP32 values.
        state: Overwritten.
        low: Its second component, overwritten; ``None`` without one.
        scale: Power of two that multiplies what is stored.
        bits: Random bits or a dither for the last component; ``None`` rounds it to nearest.
    """
    fmt = format_of(state.dtype)
    x = wide * scale
    if low is None:
        state.copy_(_rounded(x, fmt, bits))
        return
    hi = round_to(x, fmt)
    low.copy_(_rounded(remainder(x - hi), fmt, bits))
    state.copy_(hi)


def apply_update(
    strategy: Strategy,
    theta: Tensor,
    delta: Tensor,
    param: Tensor,
    extra: Tensor | None,
    bits: Tensor | None,
    dither: Tensor | None,
) -> None:
    """Store ``theta - delta`` in place; Kahan summation adds the remainder of earlier steps.

    Args:
        strategy: How the parameter is kept.
        theta: Wide value before the step; for Kahan summation the parameter's own value.
        delta: What the optimizer subtracts.
        param: Overwritten.
        extra: Overwritten; ``None`` if the strategy has none.
        bits: Random bits of the parameter's shape if the strategy is stochastic, else ``None``.
        dither: See :func:`dither_bits`, for a second component.
    """
    if strategy.weight == "kahan":
        assert extra is not None
        fmt = format_of(param.dtype)
        change = rest_of(theta, extra) - delta
        rounded = round_to(theta + change, fmt)
        extra.copy_(round_to(remainder(change - (rounded - theta)), fmt))
        param.copy_(rounded)
        return
    encode_parameter(strategy, theta - delta, param, extra, bits, dither)


def draw_bits(
    strategy: Strategy, param: Tensor, *, seed: int, stream: int, step: int, region: Region
) -> Tensor | None:
    """Random bits of one step of a parameter, ``None`` if the strategy uses none."""
    if not strategy.stochastic:
        return None
    return random_bits.draw_part(
        param.shape,
        region,
        seed=seed,
        stream=stream,
        step=step,
        width=format_of(param.dtype).random_width,
        device=param.device,
    )


def slow_bits(strategy: Strategy, param: Tensor, bits: Tensor | None, dither: int) -> Tensor | None:
    """The bits that round the slow state: the parameter's swapped, a dither, or ``None``."""
    if strategy.slow_state != "stochastic":
        return dither_bits(strategy, dither, param)
    assert bits is not None
    return random_bits.swap_halves(bits, format_of(param.dtype).random_width)

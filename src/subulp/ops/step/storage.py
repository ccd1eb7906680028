"""How the tensors of a strategy hold wide values: the reference codec of every optimizer step.

A *wide* value is the FP32 number that the stored components stand for together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics import extra_bits, format_of, random_bits, round_to
from ..strategy import Strategy, low_scale


def new_extra(strategy: Strategy, param: Tensor) -> Tensor | None:
    """The tensor kept beside a fresh parameter: its wide value is the parameter's own value."""
    if strategy.weight in ("kahan", "expansion"):
        return torch.zeros_like(param, memory_format=torch.preserve_format)
    if strategy.weight == "master":
        return param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
    if strategy.weight == "extra-bits":
        words = extra_bits.packed_words(param.numel(), strategy.tail_width)
        return torch.zeros(words, dtype=torch.int32, device=param.device)
    return None


def decode_parameter(strategy: Strategy, param: Tensor, extra: Tensor | None) -> Tensor:
    """Wide value of a parameter, FP32, of its shape."""
    if strategy.weight == "master":
        assert extra is not None
        return extra
    if strategy.weight == "extra-bits":
        assert extra is not None
        tail = extra_bits.unpack(extra, param.numel(), strategy.tail_width).view(param.shape)
        return extra_bits.join(
            param, tail, format_of(param.dtype), strategy.k, strategy.tail_rounding
        )
    wide = param.to(torch.float32)
    if strategy.weight in ("expansion", "kahan"):
        assert extra is not None
        return wide + extra.to(torch.float32) * (1.0 / low_scale(format_of(param.dtype)))
    return wide


def encode_parameter(
    strategy: Strategy, wide: Tensor, param: Tensor, extra: Tensor | None, bits: Tensor | None
) -> None:
    """Store a wide value in a parameter and the tensor beside it, in place.

    Args:
        strategy: How the parameter is kept.
        wide: FP32 tensor of the parameter's shape.
        param: Overwritten.
        extra: Overwritten; ``None`` if the strategy has none.
        bits: Random bits of the parameter's shape if the strategy is stochastic, else ``None``.
    """
    fmt = format_of(param.dtype)
    if strategy.weight == "extra-bits":
        assert extra is not None
        head, tail = extra_bits.split(wide, fmt, strategy.k, strategy.tail_rounding, bits=bits)
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
        extra.copy_(round_to(remainder(wide - hi) * low_scale(fmt), fmt))
    param.copy_(hi)


def remainder(difference: Tensor) -> Tensor:
    """What rounding left over; zero where the rounded value is not finite (inf - inf)."""
    return torch.where(torch.isnan(difference), 0.0, difference)


def decode_state(state: Tensor, low: Tensor | None, scale: float) -> Tensor:
    """Wide value of an optimizer state: ``(state + low) * scale``, ``scale`` a power of two."""
    wide = state.to(torch.float32)
    if low is not None:
        wide = wide + low.to(torch.float32)
    return wide * scale


def encode_state(
    wide: Tensor, state: Tensor, low: Tensor | None, scale: float, bits: Tensor | None
) -> None:
    """Store a wide value in an optimizer state, in place: rounded, or as an expansion."""
    fmt = format_of(state.dtype)
    x = wide * scale
    if bits is not None:
        state.copy_(round_to(x, fmt, "stochastic", bits=bits))
        return
    hi = round_to(x, fmt)
    if low is not None:
        low.copy_(round_to(remainder(x - hi), fmt))
    state.copy_(hi)


def apply_update(
    strategy: Strategy,
    theta: Tensor,
    delta: Tensor,
    param: Tensor,
    extra: Tensor | None,
    bits: Tensor | None,
) -> None:
    """Store ``theta - delta`` in place; Kahan summation adds the remainder of earlier steps.

    Args:
        strategy: How the parameter is kept.
        theta: Wide value before the step; for Kahan summation the parameter's own value.
        delta: What the optimizer subtracts.
        param: Overwritten.
        extra: Overwritten; ``None`` if the strategy has none.
        bits: Random bits of the parameter's shape if the strategy is stochastic, else ``None``.
    """
    if strategy.weight == "kahan":
        assert extra is not None
        fmt = format_of(param.dtype)
        change = extra.to(torch.float32) - delta
        rounded = round_to(theta + change, fmt)
        extra.copy_(round_to(remainder(change - (rounded - theta)), fmt))
        param.copy_(rounded)
        return
    encode_parameter(strategy, theta - delta, param, extra, bits)


def draw_bits(
    strategy: Strategy, param: Tensor, *, seed: int, stream: int, step: int, offset: int
) -> Tensor | None:
    """Random bits of one step of a parameter, ``None`` if the strategy uses none."""
    if not strategy.stochastic:
        return None
    return random_bits.draw(
        param.shape,
        seed=seed,
        stream=stream,
        step=step,
        offset=offset,
        width=format_of(param.dtype).random_width,
        device=param.device,
    )


def state_bits(strategy: Strategy, param: Tensor, bits: Tensor | None) -> Tensor | None:
    """The bits that round the slow state in the same step, ``None`` if it is not stochastic."""
    if strategy.slow_state != "stochastic":
        return None
    assert bits is not None
    return random_bits.swap_halves(bits, format_of(param.dtype).random_width)

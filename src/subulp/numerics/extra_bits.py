"""Extra bits: an FP32 value as a 16-bit float and the next k bits of its mantissa.

The representation of "Memory Efficient Mixed Precision Optimizers", section 3.1. ``head`` is the
BF16 or FP16 value that the model computes with. ``tail`` holds k bits: the position of the wide
value between the head and its neighbour away from zero, in steps of 2**-k ulp.

Range. BF16 with k = 16 holds every FP32 value below BF16's largest exactly. FP16 with k = 13 holds
every FP32 value in FP16's normal range exactly. Below it the steps stay those of the subnormals,
2**-(24 + k): a fixed-point grid that cuts finer bits. Beyond the largest finite head the value
saturates at the last step before its (missing) neighbour (FP32 has that step for FP16 up to k = 13;
with more it reads back as 65536). Infinities and NaN live in the head alone, with a tail of zero.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .formats import Format
from .rounding import FRACTION_BITS, check_bits, position, restore_special, value_at

TailRounding = Literal["truncate", "stochastic"]

GROUP = 32
"""Values that share one run of packed words."""


def tail_width(k: int, rounding: TailRounding) -> int:
    """Stored bits of one tail: k, and one more to un-round a stochastically rounded head.

    Raises:
        ValueError: ``k`` is not in 1 to 16, or the rounding is unknown.
    """
    if not 1 <= k <= 16:
        raise ValueError(f"extra bits k={k} is out of range: keep 1 to 16 bits")
    if rounding not in get_args(TailRounding):
        raise ValueError(f"rounding={rounding!r} is unknown: use 'truncate' or 'stochastic'")
    return k + (rounding == "stochastic")


def split(
    x: Tensor,
    fmt: Format,
    k: int,
    rounding: TailRounding = "truncate",
    *,
    bits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Split FP32 values into heads on the grid of ``fmt`` and integer tails.

    ``"truncate"`` cuts the value to k extra bits and the head toward zero. ``"stochastic"`` rounds
    both without bias, from disjoint bits of one draw: the low bits decide the last extra bit, the
    top k bits decide whether the head is the neighbour away from zero. Bit k of the tail records
    that it is, so that ``join`` can un-round it.

    Args:
        x: FP32 tensor, any shape.
        fmt: BF16 or FP16 (or any other format).
        k: Extra bits, 1 to 16.
        rounding: ``"truncate"`` or ``"stochastic"`` (default: ``"truncate"``).
        bits: Random bits for ``"stochastic"``, as in ``round_to``.

    Returns:
        ``(head, tail)``: FP32 tensor on the grid of ``fmt``, int32 tensor in
        ``[0, 2**tail_width(k, rounding))``.

    Raises:
        ValueError: ``x`` is not FP32, ``k`` or ``rounding`` is unavailable, or ``bits`` is missing,
            superfluous, of another shape or dtype.
    """
    tail_width(k, rounding)
    if x.dtype != torch.float32:
        raise ValueError(f"x has dtype {x.dtype}: split takes FP32 values; call x.float() first")
    if rounding == "stochastic" and bits is None:
        raise ValueError("rounding='stochastic' needs bits: see numerics.random_bits.draw")
    if rounding == "truncate" and bits is not None:
        raise ValueError("bits are given but rounding='truncate' uses none: leave them out")

    drop = FRACTION_BITS - k
    last = (fmt.max_code + 1 << k) - 1
    where = position(x, fmt)
    mask = (1 << k) - 1
    if bits is None:
        kept = (where >> drop).clamp(max=last)
        code, tail = kept >> k, kept & mask
    else:
        check_bits(bits, x)
        bits = bits.to(torch.int64)
        kept = (where + (bits & (1 << drop) - 1) >> drop).clamp(max=last)
        code = (kept + (bits >> drop) >> k).clamp(max=fmt.max_code)
        rounded_up = code - (kept >> k)
        tail = rounded_up << k | kept & mask
    tail = torch.where(torch.isfinite(x), tail, 0)
    return restore_special(value_at(code, fmt), x, fmt), tail.to(torch.int32)


def join(
    head: Tensor, tail: Tensor, fmt: Format, k: int, rounding: TailRounding = "truncate"
) -> Tensor:
    """The FP32 value of a head and its tail; the inverse of ``split``.

    Args:
        head: Tensor on the grid of ``fmt``, in FP32 or in the format's own dtype.
        tail: int32 tensor of the same shape, from ``split``.
        fmt: Format of the head.
        k: Extra bits, 1 to 16.
        rounding: The one that ``split`` used.

    Returns:
        FP32 tensor: ``tail / 2**k`` of the way from the (un-rounded) head to its neighbour
        away from zero.

    Raises:
        ValueError: ``k`` or ``rounding`` is not available.
    """
    tail_width(k, rounding)
    head = head.to(torch.float32)
    tail = tail.to(torch.int64)
    code = (position(head, fmt) >> FRACTION_BITS) - (tail >> k)
    where = code << k | tail & (1 << k) - 1
    return torch.where(torch.isfinite(head), torch.copysign(value_at(where, fmt, k), head), head)


def packed_words(count: int, width: int) -> int:
    """int32 words that ``count`` tails of ``width`` bits take: ``width`` for each group of 32."""
    return -(-count // GROUP) * width


def pack(tail: Tensor, width: int) -> Tensor:
    """Pack each group of 32 tails into ``width`` int32 words, least significant bit first.

    Args:
        tail: Integer tensor with values in ``[0, 2**width)``, any shape; flattened.
        width: Bits of one tail, 1 to 32.

    Returns:
        int32 tensor (packed_words(tail.numel(), width),); missing values of the last group are 0.
    """
    groups = torch.zeros(
        packed_words(tail.numel(), 1) * GROUP, dtype=torch.int64, device=tail.device
    )
    groups[: tail.numel()] = tail.flatten().to(torch.int64)
    string = (groups.view(-1, GROUP, 1) >> torch.arange(width, device=tail.device)) & 1
    words = (string.view(-1, width, 32) << torch.arange(32, device=tail.device)).sum(-1)
    return words.flatten().to(torch.int32)


def unpack(words: Tensor, count: int, width: int) -> Tensor:
    """The first ``count`` tails of packed words; the inverse of ``pack``.

    Returns:
        int32 tensor (count,).

    Raises:
        ValueError: ``words`` has another length than ``packed_words(count, width)``.
    """
    if words.numel() != packed_words(count, width):
        raise ValueError(
            f"words has {words.numel()} entries: {count} values of {width} bits take "
            f"{packed_words(count, width)}"
        )
    bit = (words.view(-1, 1).to(torch.int64) >> torch.arange(32, device=words.device)) & 1
    string = bit.view(-1, GROUP, width)
    values = (string << torch.arange(width, device=words.device)).sum(-1)
    return values.flatten()[:count].to(torch.int32)

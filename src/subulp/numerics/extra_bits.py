"""Extra bits: an FP32 value as a 16-bit float and the next k bits of its mantissa.

After "Memory Efficient Mixed Precision Optimizers", section 3.1. ``head`` is the BF16 or FP16 value
that the model computes with, ``tail`` the distance of the wide value from it in steps of 2**-k ulp
(of the grid between two heads). Three codings differ in which head they keep:

* ``"nearest"``: the nearest head, of two at the same distance the one away from zero; the tail is
  signed, k bits in two's complement.
* ``"truncate"``, the paper's: the head toward zero, and an unsigned tail of k bits. Both are cut,
  so every encoding takes half a step off the magnitude on average, and half an ulp off the head.
* ``"stochastic"``, the paper's other one: a head rounded without bias. One more bit of the tail
  records that it was rounded up.

Range. BF16 with k = 16 holds every FP32 value below BF16's largest exactly. FP16 with k = 13 holds
every FP32 value in FP16's normal range exactly. Below it the steps stay those of the subnormals,
2**-(24 + k): a fixed-point grid. Beyond the largest finite head the value saturates at the last
step that head can have (FP32 has that step for FP16 up to k = 13; with more it reads back as the
next number). Infinities and NaN live in the head alone, with a tail of zero.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .formats import Format
from .rounding import FRACTION_BITS, check_bits, position, restore_special, value_at

Coding = Literal["nearest", "truncate", "stochastic"]

GROUP = 32
"""Values that share one run of packed words."""


def tail_width(k: int, coding: Coding) -> int:
    """Stored bits of one tail: k, and one more to un-round a stochastically rounded head.

    Raises:
        ValueError: ``k`` is not in 1 to 16, or the coding is unknown.
    """
    if not 1 <= k <= 16:
        raise ValueError(f"extra bits k={k} is out of range: keep 1 to 16 bits")
    if coding not in get_args(Coding):
        choices = ", ".join(map(repr, get_args(Coding)))
        raise ValueError(f"coding={coding!r} is unknown: use one of {choices}")
    return k + (coding == "stochastic")


def split(
    x: Tensor,
    fmt: Format,
    k: int,
    coding: Coding = "nearest",
    *,
    bits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Split FP32 values into heads on the grid of ``fmt`` and integer tails.

    With ``bits``, the low bits of each draw round the value to k extra bits without bias; without
    them ``"nearest"`` rounds it to nearest-even and ``"truncate"`` cuts it. ``"stochastic"`` rounds
    the head from the top k bits of the same draw.

    Args:
        x: FP32 tensor, any shape.
        fmt: BF16 or FP16 (or any other format).
        k: Extra bits, 1 to 16.
        coding: See the module (default: ``"nearest"``).
        bits: Random bits as in ``round_to``: ``"stochastic"`` needs them, ``"nearest"`` may have
            them (default: ``None``).

    Returns:
        ``(head, tail)``: FP32 tensor on the grid of ``fmt``, int32 tensor in
        ``[0, 2**tail_width(k, coding))``.

    Raises:
        ValueError: ``x`` is not FP32, ``k`` or ``coding`` is unavailable, or ``bits`` is missing,
            superfluous, of another shape or dtype.
    """
    tail_width(k, coding)
    if x.dtype != torch.float32:
        raise ValueError(f"x has dtype {x.dtype}: split takes FP32 values; call x.float() first")
    if coding == "stochastic" and bits is None:
        raise ValueError("coding='stochastic' needs bits: see numerics.random_bits.draw")
    if coding == "truncate" and bits is not None:
        raise ValueError("bits are given but coding='truncate' uses none: leave them out")

    drop = FRACTION_BITS - k
    where = position(x, fmt)
    if bits is not None:
        check_bits(bits, x)
        bits = bits.to(torch.int64)
        kept = where + (bits & (1 << drop) - 1) >> drop
    elif coding == "nearest":
        kept = where + ((1 << drop - 1) - 1) + (where >> drop & 1) >> drop
    else:
        kept = where >> drop

    mask, half = (1 << k) - 1, 1 << k - 1
    if coding == "nearest":
        # The last step that is nearest to a finite head.
        kept = kept.clamp(max=(fmt.max_code << k) + half - 1)
        code, tail = kept + half >> k, kept & mask
    else:
        kept = kept.clamp(max=(fmt.max_code + 1 << k) - 1)
        code, tail = kept >> k, kept & mask
        if coding == "stochastic":
            assert bits is not None
            code = (kept + (bits >> drop) >> k).clamp(max=fmt.max_code)
            tail |= code - (kept >> k) << k
    tail = torch.where(torch.isfinite(x), tail, 0)
    return restore_special(value_at(code, fmt), x, fmt), tail.to(torch.int32)


def join(head: Tensor, tail: Tensor, fmt: Format, k: int, coding: Coding = "nearest") -> Tensor:
    """The FP32 value of a head and its tail; the inverse of ``split``.

    Args:
        head: Tensor on the grid of ``fmt``, in FP32 or in the format's own dtype.
        tail: int32 tensor of the same shape, from ``split``.
        fmt: Format of the head.
        k: Extra bits, 1 to 16.
        coding: The one that ``split`` used.

    Returns:
        FP32 tensor: ``tail / 2**k`` of the way from the (un-rounded) head to its neighbour. A tail
        that no head of ``split`` could have, for it leads below zero, gives zero.

    Raises:
        ValueError: ``k`` or ``coding`` is not available.
    """
    tail_width(k, coding)
    head = head.to(torch.float32)
    tail = tail.to(torch.int64)
    where = position(head, fmt) >> FRACTION_BITS - k
    # The last bit of the tail, counted twice with its sign, or the bit beyond it.
    where += (
        tail - ((tail & 1 << k - 1) << 1) if coding == "nearest" else tail - (tail >> k << k + 1)
    )
    where = where.clamp(min=0)
    return torch.where(torch.isfinite(head), torch.copysign(value_at(where, fmt, k), head), head)


def packed_words(count: int, width: int) -> int:
    """int32 words that ``count`` tails of ``width`` bits take: ``width`` for each group of 32."""
    return -(-count // GROUP) * width


def pack(tail: Tensor, width: int) -> Tensor:
    """Pack each group of 32 tails into ``width`` int32 words, least significant bit first.

    Args:
        tail: Integer tensor with values in ``[0, 2**width)``, any shape; flattened.
        width: Bits of one tail, 1 to 31.

    Returns:
        int32 tensor (packed_words(tail.numel(), width),); missing values of the last group are 0.
    """
    groups = torch.zeros(
        packed_words(tail.numel(), 1), GROUP, dtype=torch.int64, device=tail.device
    )
    groups.view(-1)[: tail.numel()] = tail.flatten()
    word, shift = _places(width, tail.device)
    # Bits of different tails never overlap, so that their sum is their union.
    pairs = groups << shift
    words = groups.new_zeros(groups.shape[0], width + 1)
    words.index_add_(1, word, pairs & _WORD)
    words.index_add_(1, word + 1, pairs >> 32)
    return words[:, :width].flatten().to(torch.int32)


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
    word, shift = _places(width, words.device)
    # A tail lies in one word or in two that follow each other; the last group's last has no next.
    wide = torch.nn.functional.pad(words.view(-1, width).to(torch.int64) & _WORD, (0, 1))
    pairs = wide[:, word + 1] << 32 | wide[:, word]
    values = pairs >> shift & (1 << width) - 1
    return values.flatten()[:count].to(torch.int32)


_WORD = (1 << 32) - 1


def _places(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The word in which each tail of a group begins, and its place there."""
    bit = torch.arange(GROUP, device=device) * width
    return bit // 32, bit % 32

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""How the tensors of a strategy hold wide values, in Triton: see :mod:`subulp.ops.step.storage`.

A stored tensor is its address, an int64 scalar. ``at`` are the elements of a block (int64 tensor),
``inside`` tells which of them exist, ``None`` if all do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import strategy
from ..triton import codec

_LOW_SCALES = {name: strategy.low_scale(fmt) for name, fmt in codec.FORMATS.items()}


@triton.constexpr_function
def low_scale(fmt):
    """See :func:`subulp.ops.strategy.low_scale`."""
    return _LOW_SCALES[fmt]


@triton.jit
def pieces(
    numel,
    first,
    whole,
    end,
    masked: tl.constexpr,
    block: tl.constexpr,
    strip: tl.constexpr,
):
    """What a program does of its blocks: the whole ones, or the strips of all others.

    Masks cost registers, which all pieces of a kernel have alike: strips are small.

    Args:
        numel: Elements of the tensor, int64 scalar.
        first: The program's first block, int64 scalar.
        whole: One past the tensor's last block that is aligned and has all its elements.
        end: One past the program's last block.
        masked: Which of the two.
        block: Elements of a block, a power of two.
        strip: Elements of a strip, a lesser one.

    Returns:
        The first piece and one past the last, counted from the tensor's first element.
    """
    ragged = tl.maximum(tl.minimum(whole, end), first)
    if masked:
        strips = tl.minimum(end * (block // strip), tl.cdiv(numel, strip))
        return ragged * (block // strip), strips
    return first, ragged


# ---------------------------------------------------------------------------------------- elements


@triton.jit
def pointer(address, fmt: tl.constexpr, aligned: tl.constexpr):
    """Pointer to the codes of a tensor; ``aligned`` promises a multiple of 16 bytes."""
    if codec.width(fmt) == 32:
        typed = address.to(tl.pointer_type(tl.uint32))
    elif codec.width(fmt) == 16:
        typed = address.to(tl.pointer_type(tl.uint16))
    else:
        typed = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(typed, 16) if aligned else typed


@triton.jit
def load_code(address, at, inside, fmt: tl.constexpr):
    """Codes of elements, uint32."""
    return tl.load(pointer(address, fmt, inside is None) + at, mask=inside).to(tl.uint32)


@triton.jit
def load(address, at, inside, fmt: tl.constexpr):
    """FP32 values of elements."""
    return codec.value(load_code(address, at, inside, fmt), fmt)


@triton.jit
def store_code(address, at, inside, code, fmt: tl.constexpr):
    """Store codes."""
    to = pointer(address, fmt, inside is None) + at
    tl.store(to, code.to(to.dtype.element_ty), mask=inside)


@triton.jit
def store(address, at, inside, x, fmt: tl.constexpr):
    """Store FP32 values, rounded to nearest-even; return what was stored."""
    code = codec.nearest(x, fmt)
    store_code(address, at, inside, code, fmt)
    return codec.value(code, fmt)


@triton.jit
def largest_code(
    address,
    numel,
    first,
    whole,
    end,
    fmt: tl.constexpr,
    block: tl.constexpr,
    strip: tl.constexpr,
):
    """The largest magnitude's code in blocks of a tensor, uint32; 0 where there is none.

    Args:
        address: The tensor.
        numel: See :func:`pieces`, like all others but the format.
        first: The first block.
        whole: Where whole ones end.
        end: One past the last.
        fmt: Its format.
        block: Elements of a block.
        strip: Elements of a strip.
    """
    most = tl.zeros((), tl.uint32)
    for masked in tl.static_range(2):
        begin, stop = pieces(numel, first, whole, end, masked, block, strip)
        found = tl.zeros((strip if masked else block,), tl.uint32)
        for index in range(begin, stop):
            at = index * (strip if masked else block) + tl.arange(0, strip if masked else block)
            inside = at < numel if masked else None
            magnitude = load_code(address, at, inside, fmt) & ((1 << (codec.width(fmt) - 1)) - 1)
            found = tl.maximum(found, tl.where(inside, magnitude, 0) if masked else magnitude)
        most = tl.maximum(most, tl.max(found, axis=0))
    return most


@triton.jit
def remainder(difference):
    """What rounding left over; zero where the rounded value is not finite (inf - inf)."""
    return tl.where(codec.magnitude_of(difference) > 0x7F800000, 0.0, difference)


@triton.jit
def believed(head, rest, fmt: tl.constexpr):
    """The rest beside a head, or zero, see :func:`subulp.ops.step.storage.rest_of`."""
    binade = tl.maximum(codec.magnitude_of(head) & 0x7F800000, codec.first_normal(fmt) << 23)
    steps = rest * codec.two_to(codec.mantissa_bits(fmt) + 1)
    return tl.where(codec.magnitude_of(steps) > binade, 0.0, rest)


# ------------------------------------------------------------------------------------------- tails


@triton.jit
def load_tails(address, at, inside, width: tl.constexpr):
    """Tails of ``width`` bits of elements, from packed words, uint32."""
    bit = (at & 31).to(tl.uint32) * width
    word = pointer(address, "fp32", False) + (at >> 5) * width + (bit >> 5)
    shift = bit & 31
    reaches_next = shift + width > 32
    low = tl.load(word, mask=inside)
    high = tl.load(
        word + 1, mask=reaches_next if inside is None else reaches_next & inside, other=0
    )
    # Where the shift is 0, so is `high`.
    return ((low >> shift) | (high << ((32 - shift) & 31))) & ((1 << width) - 1)


@triton.jit
def store_tails(address, start, numel, inside, tail, width: tl.constexpr, block: tl.constexpr):
    """Pack the tails of a block, whole groups of 32: each word has one owner.

    Missing tails of the last group are stored as 0.
    """
    groups: tl.constexpr = block // 32
    columns: tl.constexpr = triton.next_power_of_2(width)
    if inside is not None:
        tail = tl.where(inside, tail, 0)
    tail = tl.reshape(tail, (groups, 32))
    word = tl.broadcast_to(tl.arange(0, columns)[None, :], (groups, columns))
    packed = tl.zeros((groups, columns), tl.uint32)
    first = word * 32 // width
    for i in tl.static_range(32 // width + 2):
        source = first + i
        # From the word's lowest bit to the tail's; negative if the tail begins in an earlier word.
        shift = source * width - word * 32
        part = tl.gather(tail, tl.minimum(source, 31), axis=1)
        part = tl.where(shift < 0, part >> tl.maximum(-shift, 0), part << (shift & 31))
        packed |= tl.where((shift < 32) & (source < 32), part, 0)
    group = tl.arange(0, groups)[:, None]
    to = pointer(address, "fp32", False) + (start >> 5) * width + group * width + word
    exists = word < width
    if inside is not None:
        exists &= group * 32 < numel - start
    # Other threads than those that write a word have read it.
    tl.debug_barrier()
    tl.store(to, packed, mask=exists)


# -------------------------------------------------------------------------- parameters and states


@triton.jit
def decode_parameter(
    param,
    extra,
    at,
    inside,
    fmt: tl.constexpr,
    weight: tl.constexpr,
    k: tl.constexpr,
    tail_width: tl.constexpr,
):
    """Wide values of a parameter; for Kahan summation the parameter's own."""
    if weight == "master":
        wide = load(extra, at, inside, "fp32")
        code = load_code(param, at, inside, fmt)
        theta = tl.where(codec.nearest(wide, fmt) == code, wide, codec.value(code, fmt))
    elif k > 0:
        tail = load_tails(extra, at, inside, tail_width)
        theta = codec.join(load_code(param, at, inside, fmt), tail, fmt, k, weight == "signed-bits")
    else:
        theta = load(param, at, inside, fmt)
        if weight == "expansion":
            rest = load(extra, at, inside, fmt) * (1.0 / low_scale(fmt))
            theta += believed(theta, rest, fmt)
    return theta


@triton.jit
def apply_update(
    theta,
    delta,
    param,
    extra,
    at,
    inside,
    start,
    numel,
    bits,
    dither,
    fmt: tl.constexpr,
    weight: tl.constexpr,
    k: tl.constexpr,
    tail_width: tl.constexpr,
    random: tl.constexpr,
    dithered: tl.constexpr,
    block: tl.constexpr,
):
    """Store ``theta - delta``; Kahan summation adds the remainder of earlier steps."""
    wide = theta - delta
    if weight == "kahan":
        change = believed(theta, load(extra, at, inside, fmt), fmt) - delta
        rounded = store(param, at, inside, theta + change, fmt)
        store(extra, at, inside, remainder(change - (rounded - theta)), fmt)
    elif k > 0:
        if weight == "signed-bits":
            head, tail = codec.split_nearest(wide, bits, fmt, k, random)
        else:
            head, tail = codec.split(wide, bits, fmt, k)
        store_code(param, at, inside, head, fmt)
        store_tails(extra, start, numel, inside, tail, tail_width, block)
    elif weight == "stochastic":
        store_code(param, at, inside, codec.stochastic(wide, bits, fmt), fmt)
    else:
        hi = store(param, at, inside, wide, fmt)
        if weight == "master":
            store(extra, at, inside, wide, "fp32")
        elif weight == "expansion":
            low = remainder(wide - hi) * low_scale(fmt)
            store_last(extra, at, inside, low, dither, fmt, dithered)


@triton.jit
def decode_state(
    state, low, at, inside, scale, fmt: tl.constexpr, kind: tl.constexpr, scaled: tl.constexpr
):
    """Wide values of an optimizer state."""
    wide = load(state, at, inside, fmt)
    if kind == "expansion":
        wide += load(low, at, inside, fmt)
    return wide * scale if scaled else wide


@triton.jit
def encode_state(
    wide,
    state,
    low,
    at,
    inside,
    scale,
    bits,
    fmt: tl.constexpr,
    kind: tl.constexpr,
    scaled: tl.constexpr,
    randomly: tl.constexpr,
):
    """Store wide values in an optimizer state: the last component by bits, or to nearest."""
    if scaled:
        wide *= scale
    if kind == "expansion":
        hi = store(state, at, inside, wide, fmt)
        store_last(low, at, inside, remainder(wide - hi), bits, fmt, randomly)
    else:
        store_last(state, at, inside, wide, bits, fmt, randomly)


@triton.jit
def store_last(address, at, inside, x, bits, fmt: tl.constexpr, randomly: tl.constexpr):
    """Store FP32 values, rounded by bits, of elements or a dither, or to nearest."""
    code = codec.stochastic(x, bits, fmt) if randomly else codec.nearest(x, fmt)
    store_code(address, at, inside, code, fmt)

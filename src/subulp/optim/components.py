"""The tensors that a parameter is stored in: memory order, initial states, and the wide value.

Elementwise passes see every tensor in storage order, as one dense run of memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from ..numerics import extra_bits
from ..numerics.random_bits import WHOLE, Region
from ..ops.step import storage
from ..ops.strategy import Strategy, parse_strategy
from . import shards

States = tuple[tuple[str, Literal["fast", "slow"]], ...]
"""Names and roles of state tensors; the role determines the format."""

SCALAR_STATES = ("step", "gradient_amax")
"""States that hold one number for the whole tensor."""

# ------------------------------------------------------------------------------- storage order


def storage_view(tensor: Tensor, like: Tensor) -> Tensor:
    """A contiguous view of ``tensor``, its dimensions in the memory order of ``like``.

    A parameter and all that is stored beside it are permuted alike, so their elements stay paired.
    For a contiguous ``like`` it is ``tensor`` itself.
    """
    if like.is_contiguous():
        return tensor
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    return tensor.permute(order)


def restored(stored: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """A contiguous tensor in the storage order of ``before``, in that of ``after`` instead."""
    order = sorted(range(before.dim()), key=before.stride, reverse=True)
    if before.is_contiguous():
        order = list(range(before.dim()))
    whole = stored.permute([order.index(d) for d in range(before.dim())])
    return storage_view(whole, after).contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory without gaps or overlaps."""
    return storage_view(tensor, tensor).is_contiguous()


def same_layout(tensor: Tensor, like: Tensor) -> bool:
    """Whether two tensors of one shape, ``like`` dense, keep their elements in the same order."""
    return tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous())


def in_layout_of(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` in the memory layout of ``like``, copied only if its layout differs."""
    if same_layout(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def repack(words: Tensor, width: int, before: Tensor, after: Tensor) -> Tensor:
    """Packed tails in the storage order of ``after`` instead of that of ``before``.

    Args:
        words: From :func:`subulp.numerics.extra_bits.pack`.
        width: Bits of one tail.
        before: Dense tensor of the parameter's shape; only its strides matter.
        after: Dense tensor of the same shape.

    Returns:
        Words of the same length; ``words`` itself if the orders agree.
    """
    if same_layout(before, after):
        return words
    tails = torch.empty_like(before, dtype=torch.int32, device=words.device)
    ordered = storage_view(tails, before)
    ordered.copy_(extra_bits.unpack(words, tails.numel(), width).view(ordered.shape))
    return extra_bits.pack(storage_view(in_layout_of(tails, after), after).reshape(-1), width)


def unpacked(words: Tensor, width: int, p: Tensor) -> Tensor:
    """Packed tails as a tensor of the parameter's shape, in the narrowest integers.

    Args:
        words: Tails in the storage order of ``p``.
        width: Bits of one tail.
        p: Dense tensor; only its shape and strides matter.

    Returns:
        Contiguous, see :func:`tails_dtype`.
    """
    tails = torch.empty_like(p, dtype=tails_dtype(width), device=words.device)
    ordered = storage_view(tails, p)
    ordered.copy_(extra_bits.unpack(words, p.numel(), width).view(ordered.shape))
    return tails.contiguous()


def packed(tails: Tensor, width: int, p: Tensor) -> Tensor:
    """What :func:`unpacked` was given."""
    wide = in_layout_of(tails.to(torch.int32), p)
    return extra_bits.pack(storage_view(wide, p).reshape(-1), width)


def tails_dtype(width: int) -> torch.dtype:
    """The narrowest integers that hold a tail of ``width`` bits, and that gloo and NCCL send."""
    return torch.uint8 if width <= torch.iinfo(torch.uint8).bits else torch.int32


def beside(value: Tensor, p: Tensor) -> Tensor:
    """A state in the storage order of its parameter; packed words and scalars are in it already."""
    return value if value.dim() != p.dim() else storage_view(value, p)


def follow_layout(strategy: Strategy, state: dict[str, Tensor], p: Tensor) -> None:
    """Lay states out like their parameter, which ``model.to(memory_format=...)`` may change."""
    stride, words = p.stride(), strategy.words_name
    for name, value in state.items():
        if value.stride() == stride or name in SCALAR_STATES or name == words:
            continue
        if same_layout(value, p):
            continue
        if words in state:
            state[words] = repack(state[words], strategy.tail_width, value, p)
            # This state still has the order that the words are in; convert all at once.
            state.update({n: in_layout_of(v, p) for n, v in state.items() if v.shape == p.shape})
            return
        state[name] = in_layout_of(value, p)


# -------------------------------------------------------------------------------------- states


def new_state(strategy: Strategy, p: Tensor, states: States) -> dict[str, Tensor]:
    """The initial state of a parameter: zeros, and components that add nothing to its value."""
    # On the CPU whatever torch.set_default_device says: the step's scalars are computed there.
    state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for name, role in states:
        fmt = strategy.fast_format(p.dtype) if role == "fast" else strategy.slow_format(p.dtype)
        state[name] = torch.zeros_like(p, dtype=fmt.dtype, requires_grad=False)
        if role == "slow" and strategy.slow_state == "expansion":
            state[f"{name}_low"] = torch.zeros_like(state[name])
    extra = storage.new_extra(strategy, p.detach())
    if extra is not None:
        assert strategy.extra_name is not None
        state[strategy.extra_name] = extra
    if not strategy.wide_states and p.dtype.itemsize == 1:
        state["gradient_amax"] = torch.zeros((), dtype=torch.float32, device=p.device)
    return state


def shown(p: Tensor, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state as the optimizer shows it: of a DTensor, DTensors of its placement.

    Args:
        p: The parameter.
        held: What this rank holds of its state; packed words and scalars stay as they are.
    """
    if not shards.is_sharded(p):
        return held
    shape = shards.local(p).shape
    return {
        name: value
        if name in SCALAR_STATES or value.shape != shape or value.dtype == torch.int32
        else shards.part_of(p, value)
        for name, value in held.items()
    }


def converted(
    old: Strategy,
    new: Strategy,
    p: Tensor,
    state: dict[str, Tensor],
    states: States,
    *,
    seed: int,
    stream: int,
    region: Region = WHOLE,
) -> tuple[Tensor, dict[str, Tensor], bool]:
    """A parameter and its state under another strategy, and whether that loses nothing.

    Args:
        old: How they are stored.
        new: How they are to be stored.
        p: The parameter, left alone.
        state: Its state, laid out as it is; left alone.
        states: Names and roles of all states that it may have.
        seed: Philox key word.
        stream: Philox key word of the parameter.
        region: Which elements of its whole tensor the parameter is (default: all).
    """
    exact = True
    kept = tuple((name, role) for name, role in states if name in state)
    value, result = p.detach().clone(), new_state(new, p, kept)
    result |= {name: state[name] for name in SCALAR_STATES if name in state}
    for name, _ in kept:
        wide = storage.decode_state(state[name], state.get(f"{name}_low"), 1.0)
        storage.encode_state(wide, result[name], result.get(f"{name}_low"), 1.0, None)
        back = storage.decode_state(result[name], result.get(f"{name}_low"), 1.0)
        exact = exact and torch.equal(back, wide)
    wide = wide_value(old, p, state)
    store_wide(new, value, result, wide, seed=seed, stream=stream, region=region)
    return value, result, exact and torch.equal(wide_value(new, value, result), wide)


def gradient_bytes(p: Tensor) -> int:
    """Bytes of a parameter's gradient, also of one that does not exist yet."""
    dtype = p.grad.dtype if p.grad is not None else getattr(p, "grad_dtype", None)
    return shards.local(p).numel() * (dtype or p.dtype).itemsize


def bytes_per_parameter(
    stored: Iterable[tuple[Tensor, int, dict[str, Any]]],
) -> dict[str, float]:
    """See ``Optimizer.bytes_per_parameter``; from parameters, bytes of gradients, and states.

    Returns:
        Bytes by tensor name and ``"total"``, averaged over all parameters.
    """
    totals: dict[str, int] = {"parameter": 0, "gradient": 0}
    count = 0
    for p, gradient, state in stored:
        part = shards.local(p)
        count += part.numel()
        totals["parameter"] += part.nbytes
        totals["gradient"] += gradient
        for name, value in state.items():
            if value.dim() > 0 or (p.dim() == 0 and name not in SCALAR_STATES):
                totals[name] = totals.get(name, 0) + value.nbytes
    result = {name: total / max(count, 1) for name, total in totals.items()}
    result["total"] = sum(result.values())
    return result


# ---------------------------------------------------------------------------------- wide value


def wide_value(
    strategy: Strategy, p: Tensor, state: dict[str, Tensor] | None, *, exact: bool = False
) -> Tensor:
    """The FP32 value that the stored components of a parameter stand for, in its own layout.

    Args:
        strategy: How it is stored.
        p: The parameter.
        state: Its state, laid out as it is; empty or ``None`` before the first step.
        exact: Give a sum of two components in FP64 (default: ``False``).
    """
    if strategy.extra_name is None or not state:
        return p.detach().to(torch.float32)
    p, extra = p.detach(), state[strategy.extra_name]
    dense = storage.decode_parameter(strategy, storage_view(p, p), beside(extra, p), exact=exact)
    return (
        storage_view(torch.empty_like(p, dtype=dense.dtype), p)
        .copy_(dense)
        .as_strided(p.shape, p.stride())
    )


def store_wide(
    strategy: Strategy,
    p: Tensor,
    state: dict[str, Tensor],
    wide: Tensor,
    *,
    seed: int,
    stream: int,
    region: Region = WHOLE,
) -> None:
    """Store FP32 values in the components of a parameter, as exactly as they can hold them.

    Args:
        strategy: How it is stored.
        p: The parameter, written to.
        state: Its state, laid out as it is; written to.
        wide: FP32 values of its shape.
        seed: Philox key word.
        stream: Philox key word of the parameter.
        region: Which elements of its whole tensor the parameter is (default: all).
    """
    extra = state.get(strategy.extra_name) if strategy.extra_name else None
    target = storage_view(p.detach(), p)
    if strategy.weight == "stochastic":
        strategy = parse_strategy("nearest")
    # A given weight is best stored as its nearest neighbour; only updates must be unbiased.
    bits = None
    if strategy.coding == "stochastic":
        step = int(state["step"].item())
        bits = storage.draw_bits(
            strategy, target, seed=seed, stream=stream, step=step, region=region
        )
    aligned = torch.empty_like(p, dtype=torch.float32).copy_(wide)
    storage.encode_parameter(
        strategy,
        storage_view(aligned, p),
        target,
        None if extra is None else beside(extra, p),
        bits,
    )

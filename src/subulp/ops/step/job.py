"""One call of a fused step: its tensors, and its numbers rounded to FP32 once.

Every implementation reads the same job, so none of them computes a scalar of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from ...numerics import E4M3, format_of
from ...numerics.extra_bits import packed_words
from ...numerics.random_bits import Region
from ..strategy import TABLE, Strategy, parse_strategy

RUNS = ("run", "count_1", "count_2", "stride_1", "stride_2", "stride_3")
"""What :attr:`subulp.numerics.random_bits.Region.runs` holds."""

SCALARS = np.dtype(
    [
        ("step_size", np.float32),
        ("inv_sqrt_bias2", np.float32),
        ("decay", np.float32),
        ("fast_decode", np.float32),
        ("fast_encode", np.float32),
        ("slow_decode", np.float32),
        ("slow_encode", np.float32),
        ("slow_floor", np.float32),
        ("step", np.uint32),
        ("first", np.uint32),
        ("fast_dither", np.uint32),
        ("slow_dither", np.uint32),
        ("extra_dither", np.uint32),
        ("stream", np.uint32),
        ("offset", np.uint64),
        *((name, np.uint64) for name in RUNS),
    ],
    align=True,
)
"""The scalars of one tensor. ``subulp_scalars`` of csrc/subulp.h is compared with them when the
library is loaded; Triton's kernels look their places up here."""

SCALES = ("fast_decode", "fast_encode", "slow_decode", "slow_encode", "slow_floor")
"""The scalars that belong to FP8 states."""

# FP8 states are stored relative to the largest recent gradient A (a power of two): the first moment
# as m / A * 2**7, the second as v / A**2 * 2**13. Both then reach down to about 2**-16 A.
_FAST_HEADROOM = 2.0**7
_SLOW_HEADROOM = 2.0**13
_AMAX_MEMORY = 0.99
# The largest exponent of a unit: its square stays in FP32's range.
_MOST = 50

_dtype, _device, _shape = map(attrgetter, ("dtype", "device", "shape"))

# In units of 2**-32: the fraction of the golden ratio, and a third.
_GOLDEN, _THIRD = 0x9E3779B9, 0x55555555


@dataclass
class StepJob:
    """Arguments of ``subulp::adam_step`` and ``subulp::sgd_step``, checked and completed.

    The lists have one entry a tensor; lists of roles that the strategy lacks are empty. ``fast``
    is Adam's first moment; ``slow`` Adam's second moment or SGD's momentum buffer.
    """

    strategy: Strategy
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    fast: Sequence[Tensor]
    slow: Sequence[Tensor]
    extras: Sequence[Tensor]
    slow_lows: Sequence[Tensor]
    scalars: np.ndarray
    seed: int
    beta1: float
    one_minus_beta1: float
    beta2: float = 0.0
    one_minus_beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    nesterov: bool = False
    maximize: bool = False
    strict: bool = False
    exact: dict[str, float] = field(default_factory=dict)
    """Hyperparameters before they were rounded, for strict arithmetic."""
    scales: Tensor | None = None
    """FP32 ``(count, 5)``, what :data:`SCALES` of the scalars are where a GPU has computed them."""

    def __post_init__(self) -> None:
        if len(self.scalars) != len(self.params):
            raise ValueError(
                f"steps has {len(self.scalars)} entries: expected one for each of "
                f"{len(self.params)} parameters"
            )

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.params[0].device

    @property
    def scaled_states(self) -> bool:
        """Whether stored states are scaled by powers of two (FP8)."""
        return not self.strategy.wide_states and self.params[0].dtype == E4M3.dtype

    def settle(self) -> None:
        """Have the host know all scalars: it waits for those that a GPU has computed."""
        if self.scales is None:
            return
        for name, column in zip(SCALES, self.scales.t().cpu().numpy(), strict=True):
            self.scalars[name] = column

    def roles(self) -> dict[str, Sequence[Tensor]]:
        """All lists, by what errors call them."""
        return {
            "params": self.params,
            "grads": self.grads,
            "the fast states": self.fast,
            "the slow states": self.slow,
            "extras": self.extras,
            "the slow lows": self.slow_lows,
        }

    def region(self, i: int) -> Region:
        """Which elements of its whole tensor, whose random bits they draw, tensor ``i`` holds."""
        s = self.scalars[i]
        run, count_1, count_2, *strides = (int(s[name]) for name in RUNS)
        stride_1, stride_2, stride_3 = strides
        return Region(int(s["offset"]), run, (count_1, count_2), (stride_1, stride_2, stride_3))

    def role(self, tensors: Sequence[Tensor], i: int) -> Tensor | None:
        """Entry ``i`` of a role that may be absent."""
        return tensors[i] if tensors else None


def new_scalars(
    steps: Sequence[Tensor] | Tensor,
    streams: Sequence[int],
    offsets: Sequence[int],
    numbers: Callable[[int], tuple[float, float, float]] = lambda t: (0.0, 1.0, 0.0),
    fresh: Sequence[bool] | None = None,
    runs: Sequence[int] | None = None,
) -> np.ndarray:
    """Scalars of a job whose states are not scaled, and the addresses of its random bits.

    Args:
        steps: Tensors () holding t, counted from 1, or one that holds them all.
        streams: Philox key word of each tensor.
        offsets: Index of each tensor's first element in the whole tensor.
        numbers: From t to ``step_size``, ``inv_sqrt_bias2`` and ``decay``.
        fresh: Whether each momentum buffer begins with this step; all do at t = 1.
        runs: Six numbers for each tensor, see :attr:`subulp.numerics.random_bits.Region.runs`;
            ``None`` if each is a run of its whole tensor.
    """
    if not len(steps) == len(streams) == len(offsets) == len(steps if fresh is None else fresh):
        raise ValueError(
            f"steps, streams and offsets have {len(steps)}, {len(streams)} and {len(offsets)} "
            f"entries, fresh {len(fresh or steps)}: pass one for each parameter"
        )
    # One transfer for all, also where they lie on a GPU.
    together = steps if isinstance(steps, Tensor) else torch.stack(tuple(steps)) if steps else None
    counters = [] if together is None else [int(t) for t in together.tolist()]
    # Made at once and column by column: filled one by one, it takes longer than a small step.
    known = sorted(set(counters))
    rows = [
        # In SCALARS' order; the address of the random bits follows.
        (*numbers(t), 1.0, 1.0, 1.0, 1.0, 0.0, t, t == 1, *dither(t), 0, 0, 0, 1, 1, 0, 0, 0)
        for t in known
    ]
    scalars = np.array(rows, dtype=SCALARS)[np.searchsorted(known, counters)]
    scalars["stream"], scalars["offset"] = streams, offsets
    if runs:
        if len(runs) != len(RUNS) * len(scalars):
            raise ValueError(f"runs has {len(runs)} numbers: pass six for each tensor")
        for i, name in enumerate(RUNS):
            scalars[name] = runs[i :: len(RUNS)]
    if fresh:
        scalars["first"] |= np.array(fresh, dtype=np.uint32)
    return scalars


def dither(t: int) -> tuple[int, int, int]:
    """Thresholds of rounding in a step: of the fast state, the slow one, and a second component.

    Each walks through the interval by the golden ratio, which fills every run of steps evenly: an
    element's errors cancel within a few steps. The three begin a third of the interval apart.

    Args:
        t: The step, counted from 1.

    Returns:
        Three fractions of an ulp in units of 2**-32, used as random bits are.
    """
    fast, slow, extra = ((t * _GOLDEN + role * _THIRD) & 0xFFFFFFFF for role in range(3))
    return fast, slow, extra


def check_roles(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    precision: str,
    roles: dict[str, Sequence[Tensor]],
) -> Strategy:
    """The strategy of a call, once its tensors fit it.

    Raises:
        ValueError: A list has another length than ``params``, is missing or not used by the
            strategy; or a tensor has another shape, dtype or device than the strategy gives it, or
            is not contiguous.
    """
    strategy = parse_strategy(precision)
    if not params:
        raise ValueError("params is empty: pass at least one tensor")
    first = params[0]
    strategy.check_dtype(first.dtype)
    if grads:
        format_of(grads[0].dtype)
    if "momentum_buffers" in roles and not roles["momentum_buffers"]:
        if roles["momentum_lows"]:
            raise ValueError("momentum_lows are given without momentum_buffers: leave them out")
        roles = {"extras": roles["extras"]}
    dtypes = _role_dtypes(strategy, first.dtype)
    for name, tensors in {"grads": grads, **roles}.items():
        count = len(params) if name == "grads" or dtypes[name] else 0
        if len(tensors) != count:
            raise ValueError(
                f"{name} has {len(tensors)} tensors: precision={strategy.name!r} takes {count} for "
                f"{len(params)} parameters"
            )
    device = first.device
    shapes: list[tuple[int, ...]] = [p.shape for p in params]
    _check_tensors("params", params, first.dtype, shapes, device)
    _check_tensors("grads", grads, grads[0].dtype, shapes, device)
    for name, tensors in roles.items():
        dtype = dtypes[name]
        if dtype is None:
            continue
        if name == "extras" and strategy.coding:
            width = strategy.tail_width
            words: list[tuple[int, ...]] = [(packed_words(p.numel(), width),) for p in params]
            _check_tensors(name, tensors, dtype, words, device)
        else:
            _check_tensors(name, tensors, dtype, shapes, device)
    return strategy


@cache
def _role_dtypes(strategy: Strategy, dtype: torch.dtype) -> dict[str, torch.dtype | None]:
    """Dtype of each tensor beside parameters of ``dtype``, ``None`` for those they do without."""
    fast, slow = strategy.fast_format(dtype).dtype, strategy.slow_format(dtype).dtype
    low = slow if strategy.slow_state == "expansion" else None
    return {
        "exp_avgs": fast,
        "exp_avg_sqs": slow,
        "exp_avg_sq_lows": low,
        "momentum_buffers": slow,
        "momentum_lows": low,
        "extras": strategy.extra_dtype(dtype),
    }


def _check_tensors(
    role: str,
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    shapes: list[tuple[int, ...]],
    device: torch.device,
) -> None:
    if (
        set(map(_dtype, tensors)) == {dtype}
        and set(map(_device, tensors)) == {device}
        and list(map(_shape, tensors)) == shapes
        and all(map(Tensor.is_contiguous, tensors))
    ):
        return
    for i, tensor in enumerate(tensors):
        if tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"{role}[{i}] is {tensor.dtype} on {tensor.device}: expected {dtype} on {device} "
                "(call once per dtype and device)"
            )
        if tensor.shape != shapes[i]:
            raise ValueError(
                f"{role}[{i}] has shape {tuple(tensor.shape)}: expected {tuple(shapes[i])}"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{role}[{i}] has strides {tensor.stride()}: pass contiguous tensors (a permuted "
                "view of a dense tensor is one)"
            )


def is_strict(arithmetic: str, strategy: Strategy, dtype: torch.dtype) -> bool:
    """Whether a call asks for strict narrow arithmetic.

    Raises:
        ValueError: ``arithmetic`` is unknown, or the strategy does not have the strict one.
    """
    if arithmetic == "wide":
        return False
    if arithmetic != "strict":
        raise ValueError(f"arithmetic={arithmetic!r} is unknown: use 'wide' or 'strict'")
    # In FP16 the square of a small gradient is zero, and the step divides by its root.
    if not strategy.strict or dtype != torch.bfloat16:
        have = ", ".join(s.name for s in TABLE if s.strict)
        raise ValueError(
            f"arithmetic='strict' is not available for precision={strategy.name!r} with {dtype} "
            f"parameters: it exists for {have} with bfloat16; use 'wide'"
        )
    return True


def scale_states(
    job: StepJob,
    amaxes: Sequence[Tensor],
    slow_power: int,
    gradient_amaxes: Tensor | None = None,
) -> None:
    """Set the scales of FP8 states from the running largest gradient, and update it in place.

    Stored codes are decoded with the scale of the previous step and encoded with that of this one,
    so that the states follow gradients over many orders of magnitude. All scales are powers of two:
    multiplying by them rounds nothing.

    Args:
        job: Its scalars are completed.
        amaxes: FP32 tensors (), the running maximum after the previous step; updated.
        slow_power: 2 if the slow state is a second moment, 1 if it is a momentum.
        gradient_amaxes: FP32 ``(count,)``, the largest gradient of each whole tensor; ``None``
            takes those of the job (default: ``None``).
    """
    if len(amaxes) != len(job.params):
        raise ValueError(
            f"amaxes has {len(amaxes)} tensors: the scaled states of FP8 parameters take "
            f"{len(job.params)}"
        )
    if not job.slow:
        return
    now = gradient_amaxes if gradient_amaxes is not None else largest(job.grads)
    if job.device.type != "cpu":
        # The host does not wait for a number.
        least = job.strategy.slow_format(job.params[0].dtype).smallest_subnormal
        before, now = torch.stack(tuple(amaxes)), now.to(job.device)
        job.scales, after = device_scales(before, now, slow_power, least)
        torch._foreach_copy_(list(amaxes), list(after.unbind()))
        return
    # One transfer for all.
    found = torch.cat([torch.stack(tuple(amaxes)), now.to(job.device)]).cpu().double()
    before, now = found.chunk(2)
    after = torch.where(now.isfinite(), torch.maximum(before * _AMAX_MEMORY, now), before).float()
    for amax, value in zip(amaxes, after.to(job.device), strict=True):
        amax.copy_(value)
    for i, (old_amax, new_amax) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        old, new = state_scales(old_amax, slow_power), state_scales(new_amax, slow_power)
        scalars = job.scalars[i]
        scalars["fast_decode"], scalars["slow_decode"] = 1.0 / old[0], 1.0 / old[1]
        scalars["fast_encode"], scalars["slow_encode"] = new
        if slow_power == 2:
            least = job.strategy.slow_format(job.params[i].dtype).smallest_subnormal
            scalars["slow_floor"] = least / new[1]


def device_scales(
    before: Tensor, now: Tensor, slow_power: int, least: float
) -> tuple[Tensor, Tensor]:
    """The scales of FP8 states where the largest gradients lie; the numbers of the host.

    Args:
        before: FP32 ``(count,)``, the running maximum after the previous step.
        now: FP32 ``(count,)``, the largest gradient.
        slow_power: See :func:`scale_states`.
        least: The slow state's smallest number, a power of two.

    Returns:
        FP32 ``(count, 5)``, what :data:`SCALES` name, and the running maximum.
    """
    wide = torch.maximum(before.double() * _AMAX_MEMORY, now.double())
    after = torch.where(now.isfinite(), wide, before.double()).float()
    amaxes = torch.stack([before, after])
    unit = (amaxes.frexp().exponent.long() - 1).clamp(-_MOST, _MOST)
    unit = torch.where(amaxes == 0.0, 0, unit)
    # Exponents of two, from here on.
    fast = _log2(_FAST_HEADROOM) - unit
    slow = _log2(_SLOW_HEADROOM if slow_power == 2 else _FAST_HEADROOM) - slow_power * unit
    floor = _log2(least) - slow[1]
    powers = torch.stack([-fast[0], fast[1], -slow[0], slow[1], floor], 1)
    # FP64 has all of them as normal numbers, FP32 the floor as a subnormal one.
    scales = ((powers + 1023) << 52).view(torch.float64).float()
    if slow_power != 2:
        scales[:, -1] = 0.0
    return scales, after


def _log2(power: float) -> int:
    return math.frexp(power)[1] - 1


def state_scales(amax: float, slow_power: int) -> tuple[float, float]:
    """What FP8 states are multiplied by where they are stored; decoding divides by it.

    Args:
        amax: The running largest gradient.
        slow_power: Power of a gradient that the slow state holds: 2 for Adam, 1 for SGD.

    Returns:
        Powers of two: of the fast state, and of the slow one.
    """
    unit = _unit(amax)
    slow_headroom = _SLOW_HEADROOM if slow_power == 2 else _FAST_HEADROOM
    return _FAST_HEADROOM / unit, slow_headroom / unit**slow_power


def largest(grads: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each gradient, FP32 ``(count,)``."""
    return torch.stack([_amax(g) for g in grads])


def _amax(g: Tensor) -> Tensor:
    """The largest magnitude, an FP32 tensor ()."""
    if g.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=g.device)
    if g.dtype.itemsize == 1:
        # FP8 has no reductions; the codes of magnitudes are in their order.
        code = (g.contiguous().view(torch.uint8) & 0x7F).amax()
        return code.view(g.dtype).to(torch.float32)
    return g.abs().amax().to(torch.float32)


def _unit(amax: float) -> float:
    """The power of two at or below ``amax``; 1 for zero. Its square stays in FP32's range."""
    if amax == 0.0:
        return 1.0
    return 2.0 ** min(max(_log2(amax), -_MOST), _MOST)

"""One call of a fused step: its tensors, and its numbers rounded to FP32 once.

Every implementation reads the same job, so none of them computes a scalar of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from ...numerics import format_of
from ...numerics.extra_bits import packed_words
from ...numerics.ieee import as_fp32
from ...numerics.random_bits import Region
from .. import pointers
from ..capture import Held
from ..kinds import Remembered
from ..strategy import TABLE, Strategy, parse_strategy
from .counts import Counts, Numbers
from .scales import SCALES, Scaling

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

# The same as bytes: without gaps, as the addresses of eight bytes come last.
_CODES = {(4, "f"): "f", (4, "u"): "I", (8, "u"): "Q"}
_TYPES = [SCALARS[name] for name in SCALARS.names or ()]
_ROW = struct.Struct("=" + "".join(_CODES[type_.itemsize, type_.kind] for type_ in _TYPES))
assert _ROW.size == SCALARS.itemsize

OWN: int = dict(SCALARS.fields or {})["stream"][1]
"""The byte of a record from which on it is the tensor's own, the same in each step."""

NEWS = tuple(
    name
    for name in SCALARS.names or ()
    if SCALARS[name].itemsize == 4 and name not in (*SCALES, "stream")
)
"""The scalars that are others in each step, but for scales."""

_dtype, _device, _shape = map(attrgetter, ("dtype", "device", "shape"))

# In units of 2**-32: the fraction of the golden ratio, and a third.
GOLDEN, THIRD = 0x9E3779B9, 0x55555555


def _neutral(t: int) -> tuple[float, float, float]:
    return 0.0, 1.0, 0.0


Sizes = dict[str, list[int]]
"""Bytes of each tensor of a role, by the role's name in :meth:`StepJob.roles`."""

_checked: Remembered[tuple[Strategy, Sizes]] = Remembered()


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
    scaling: Scaling | None = None
    """What scales stored states by powers of two (FP8), ``None`` if they are not scaled."""
    counts: Counts | None = None
    """What the step counts on the device, ``None`` if the host has counted."""
    numbers: Callable[[float], Numbers] | None = None
    """From a learning rate to the scalars of each step."""
    sizes: Sizes | None = None
    """Known, with all but the addresses, of tensors whose like have passed before: filled as they
    are asked for. ``None`` if everything about the tensors has to be read."""

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

    def settle(self) -> None:
        """Have the host know all scalars before the step: of a GPU's FP8 states, it waits."""
        self.settle_counts()
        if self.scaling is None or self.scaling.after is not None:
            return
        for name, column in zip(SCALES, self.scaling.settle(self.grads).T, strict=True):
            self.scalars[name] = column

    def settle_counts(self) -> None:
        """Have the host know what the step counts on the device, before it is taken: it waits."""
        if self.counts is None or self.counts.settled:
            return
        counts, known = self.counts, self.scalars
        steps = torch.stack(tuple(counts.steps)) + 1.0
        numbers = counts.numbers(float(counts.lr))
        now = new_scalars(steps, known["stream"], known["offset"], numbers, counts.fresh or None)
        for name in NEWS:
            known[name] = now[name]
        counts.settled = True

    def keep_amaxes(self) -> None:
        """Update the running largest gradients, once the settled step has been taken."""
        if self.scaling is not None:
            self.scaling.keep()

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

    def addresses(self, name: str) -> list[int]:
        """The addresses of a role's tensors, none of a role that is absent.

        Raises:
            TypeError: A tensor wraps others, as DTensor does.
            ValueError: A tensor has no memory, or not as much as it says.
        """
        tensors = self.roles()[name]
        if self.sizes is None:
            return pointers.dense_ptrs(name, tensors)
        if name not in self.sizes:
            self.sizes[name] = [tensor.nbytes for tensor in tensors]
        return pointers.held_ptrs(name, tensors, self.sizes[name])

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
    streams: Sequence[int] | np.ndarray,
    offsets: Sequence[int] | np.ndarray,
    numbers: Numbers = _neutral,
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
    return _scalars(counters, streams, offsets, numbers, fresh, runs)


def _scalars(
    counters: list[int],
    streams: Sequence[int] | np.ndarray,
    offsets: Sequence[int] | np.ndarray,
    numbers: Numbers = _neutral,
    fresh: Sequence[bool] | None = None,
    runs: Sequence[int] | None = None,
) -> np.ndarray:
    # Made of bytes, and column by column: in the middle of a backward pass, where nothing is in the
    # caches, an array of NumPy's records takes a twentieth of the step.
    rows = {t: row(t, numbers(t)) for t in set(counters)}
    scalars = np.frombuffer(bytearray().join([rows[t] for t in counters]), dtype=SCALARS)
    scalars["stream"], scalars["offset"] = streams, offsets
    if runs:
        if len(runs) != len(RUNS) * len(scalars):
            raise ValueError(f"runs has {len(runs)} numbers: pass six for each tensor")
        for i, name in enumerate(RUNS):
            scalars[name] = runs[i :: len(RUNS)]
    if fresh:
        scalars["first"] |= np.array(fresh, dtype=np.uint32)
    return scalars


def row(t: int, numbers: tuple[float, float, float]) -> bytes:
    """A record of ``SCALARS``, but for the address of the random bits."""
    # In SCALARS' order.
    rest = 1.0, 1.0, 1.0, 1.0, 0.0, t, t == 1, *dither(t), 0, 0, 0, 1, 1, 0, 0, 0
    try:
        return _ROW.pack(*numbers, *rest)
    except OverflowError:
        # It refuses what rounds to infinity.
        return _ROW.pack(*map(as_fp32, numbers), *rest)


def counted(
    steps: Sequence[Tensor] | Tensor,
    streams: Sequence[int],
    offsets: Sequence[int],
    lr: Tensor | float,
    numbers: Callable[[float], Numbers],
    held: Held | None,
    *,
    betas: tuple[float, float] | None = None,
    weight_decay: float = 0.0,
    fresh: Sequence[bool] | None = None,
    runs: Sequence[int] | None = None,
) -> tuple[np.ndarray, Counts | None]:
    """Scalars of a job, and what it counts on the device.

    Args:
        steps: See :func:`new_scalars`; with ``held`` those of :class:`.counts.Counts`.
        streams: See :func:`new_scalars`, like the next one.
        offsets: One for each tensor.
        lr: The learning rate.
        numbers: From it to the scalars of each step.
        held: ``None`` if the host counts.
        betas: See :class:`.counts.Counts`, like the next two.
        weight_decay: Times the learning rate, the ``decay``.
        fresh: One for each tensor, or ``None``.
        runs: See :func:`new_scalars`.

    Returns:
        The scalars; where the device counts, those that count are not known before they are
        settled, and the counts are the second.
    """
    if held is None:
        return new_scalars(steps, streams, offsets, numbers(float(lr)), fresh, runs), None
    late = tuple(fresh) if fresh and any(fresh) else ()
    counts = Counts(list(steps), lr, numbers, held, betas, weight_decay, late)
    return _scalars([1] * len(steps), streams, offsets, runs=runs), counts


@lru_cache(maxsize=8)
def dither(t: int) -> tuple[int, int, int]:
    """Thresholds of rounding in a step: of the fast state, the slow one, and a second component.

    Each walks through the interval by the golden ratio, which fills every run of steps evenly: an
    element's errors cancel within a few steps. The three begin a third of the interval apart.

    Args:
        t: The step, counted from 1.

    Returns:
        Three fractions of an ulp in units of 2**-32, used as random bits are.
    """
    fast, slow, extra = ((t * GOLDEN + role * THIRD) & 0xFFFFFFFF for role in range(3))
    return fast, slow, extra


def check_roles(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    precision: str,
    roles: dict[str, Sequence[Tensor]],
) -> tuple[Strategy, Sizes | None]:
    """The strategy of a call, once its tensors fit it; and its :attr:`StepJob.sizes`.

    Raises:
        ValueError: A list has another length than ``params``, is missing or not used by the
            strategy; or a tensor has another shape, dtype or device than the strategy gives it, or
            is not contiguous.
    """
    if not params:
        raise ValueError("params is empty: pass at least one tensor")
    tensors = [*params, *grads, *chain.from_iterable(roles.values())]
    counts = [(name, len(role)) for name, role in roles.items()]
    key = (id(params[0]), precision, len(params), len(grads), *counts)
    if (found := _checked.get(key, tensors)) is not None:
        return found
    strategy = _check_roles(params, grads, precision, roles)
    # Others are refused where addresses are read, and must be looked at there each time.
    if pointers.are_plain(tensors):
        _checked.put(key, tensors, (strategy, {}))
    return strategy, None


def _check_roles(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    precision: str,
    roles: dict[str, Sequence[Tensor]],
) -> Strategy:
    strategy = parse_strategy(precision)
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

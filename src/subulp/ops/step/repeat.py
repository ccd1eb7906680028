"""A step whose like has been taken: what was found out about that one is not asked again.

In the middle of a backward pass nothing of Python is in the caches, and to find out what a step of
a dozen tensors is takes longer than to take it. Most of it is that of the step before. New are the
addresses, the learning rate and the counts, which are read; whatever else is new makes a step that
is prepared as the first one was.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import backend, native, pointers
from ..kinds import Remembered
from ..memory_runs import MemoryRuns
from . import cpu
from .counters import LAST, are_counters, is_count
from .counts import Numbers
from .job import OWN, StepJob, row

Columns = Mapping[str, Sequence[Tensor]]
"""The states of several parameters by name, the counters as ``"step"``: one for each parameter."""

_FIELDS = ("fast", "slow", "extra", "slow_low")
"""The roles of states, as ``subulp_step`` calls them."""

_CPU = torch.device("cpu")


@dataclass
class _Known:
    """What the steps of a key and of tensors of the same kinds have in common.

    Attributes:
        options: What else the arguments depend on, but for the learning rate.
        step: The kernel's arguments.
        numbers: From the learning rate to the scalars of each step.
        rows: Of a field of the arguments, the place of its states among the columns.
        sizes: Bytes of each tensor.
        numels: Elements of each parameter.
        own: What each parameter's record of scalars ends with.
        separate: Addresses of parameters and gradients that are known to share no memory, and the
            runs of the parameters.
    """

    options: object
    step: native.Step
    numbers: Callable[[float], Numbers]
    rows: dict[str, int]
    sizes: list[int]
    numels: list[int]
    own: list[bytes]
    separate: tuple[list[int], MemoryRuns]


_known: Remembered[_Known] = Remembered()


@dataclass(slots=True)
class Repeated:
    """A step on the CPU that has been checked, and not been taken yet.

    Attributes:
        entry: The kernel.
        arguments: Its arguments.
        held: What they point to, beside the tensors.
        params: The parameters, updated in place.
        counters: The step counters.
        counters_at: Address of their addresses.
    """

    entry: str
    arguments: native.Step
    held: tuple[array[int], ...]
    params: Sequence[Tensor]
    counters: Sequence[Tensor]
    counters_at: int

    def check_memory(self) -> None:
        """Nothing: this has read the addresses that it will be taken with."""

    def take(self) -> None:
        """Take the step.

        Raises:
            RuntimeError: The library has no such kernel; nothing was updated.
        """
        cpu.call(self.entry, self.arguments)
        native.library().subulp_count(len(self.counters), self.counters_at)
        torch.autograd.graph.increment_version([*self.counters, *self.params])


def remember(
    key: tuple[Any, ...],
    op: str,
    job: StepJob,
    columns: Columns,
    names: Sequence[str | None],
    options: object,
) -> None:
    """Remember a step that was prepared, if those like it can be repeated.

    Args:
        key: Tells apart whose step it is.
        op: Name of the fused op.
        job: Its job.
        columns: All states of the parameters.
        names: Those that are the job's ``fast``, ``slow``, ``extras`` and ``slow_lows``, where it
            has these.
        options: What else the job depends on, but for the learning rate.
    """
    states, counters = (job.fast, job.slow, job.extras, job.slow_lows), columns["step"]
    if (
        # Tensors that are plain, and were met before: others change too often.
        job.sizes is None
        or job.numbers is None
        or job.strict
        or job.scaling is not None
        or job.counts is not None
        or backend.choose(job.device).backend != "cpu"
        or not are_counters(counters)
    ):
        return
    tensors = [*job.params, *job.grads, *chain.from_iterable(columns.values())]
    places = list(columns)
    known = _Known(
        options,
        cpu.arguments(job),
        job.numbers,
        {
            field: places.index(name)
            for field, role, name in zip(_FIELDS, states, names, strict=True)
            if role and name is not None
        },
        [tensor.nbytes for tensor in tensors],
        [p.numel() for p in job.params],
        [record.tobytes()[OWN:] for record in job.scalars],
        ([], MemoryRuns((), ())),
    )
    _known.put((key, op, *columns), tensors, known)


def repeated(
    key: tuple[Any, ...],
    op: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    columns: Columns,
    options: object,
    lr: float,
) -> Repeated | None:
    """The step, if it differs from one that is remembered in nothing but addresses and numbers.

    Args:
        key: See :func:`remember`, like all others.
        op: Name of the fused op.
        params: The parameters.
        grads: Their gradients.
        columns: All states of the parameters.
        options: What else it depends on.
        lr: The learning rate.
    """
    tensors = [*params, *grads, *chain.from_iterable(columns.values())]
    known = _known.get((key, op, *columns), tensors)
    if known is None or known.options != options or backend.choose(_CPU).backend != "cpu":
        return None
    try:
        addresses = pointers.held_ptrs("tensors", tensors, known.sizes)
    except (TypeError, ValueError):
        # Prepared anew, it is refused by its name.
        return None
    library, count = native.library(), len(params)
    past, runs = known.separate
    if (now := addresses[: 2 * count]) != past:
        if now[:count] != past[:count]:
            runs = MemoryRuns(now[:count], known.sizes)
        if runs.clash or runs.meet(now[count:], known.sizes[count : 2 * count]):
            return None
        known.separate = now, runs
    table = array("Q", known.numels)
    table.extend(addresses)
    first, stride = table.buffer_info()[0], table.itemsize * count
    states = first + 3 * stride
    counters_at = states + stride * list(columns).index("step")
    step = native.Step.from_buffer_copy(known.step)
    step.numel, step.param, step.grad = first, first + stride, first + 2 * stride
    for field, place in known.rows.items():
        setattr(step, field, states + place * stride)

    before = array("f", bytes(4 * count))
    library.subulp_gather(count, counters_at, before.buffer_info()[0])
    numbers = known.numbers(lr)
    rows: dict[float, bytes] = {}
    for t in set(before):
        if not is_count(t) or t >= LAST:
            # Prepared anew, what is no count is refused by name.
            return None
        after = int(t) + 1
        rows[t] = row(after, numbers(after))[:OWN]
    records = zip(map(rows.__getitem__, before), known.own, strict=True)
    scalars = array("B", b"".join(chain.from_iterable(records)))
    step.scalars = scalars.buffer_info()[0]
    step.threads, step.isa = torch.get_num_threads(), native.isa()
    return Repeated(f"subulp_{op}", step, (table, scalars), params, columns["step"], counters_at)

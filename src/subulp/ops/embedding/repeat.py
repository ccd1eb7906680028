"""Tables that have been passed over before: what was found out about them is not asked again.

A batch of lookups takes a millisecond, and in the middle of a training step nothing of Python is in
the caches: to find out what a table is takes as long as to look its rows up. All of that is as in
the step before, but for the addresses, which are read; tables of which anything else is new are
prepared as the first ones were.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from .. import backend, pointers
from ..kinds import Remembered
from . import calls, cpu
from .job import Lookups, Table, TableUpdate, table_tensors

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Stored:
    """What a pass over tables reads and writes, without a look at it.

    Attributes:
        tensors: Those of :func:`.job.table_tensors`, but for those that stand for an absent role;
            and last what the pass counts in.
        options: What else the tables depend on, but for the optimizer's numbers.
    """

    tensors: list[Tensor]
    options: list[object]


@dataclass(frozen=True)
class _Known:
    """What tables of a key and of tensors of the same kinds have in common.

    Attributes:
        options: Their options.
        tables: Their structures, without addresses.
        sizes: Bytes of each tensor.
        by_role: Picks each table's addresses, role by role, from those of the tensors and a 0.
    """

    options: list[object]
    tables: cpu.Structures
    sizes: list[int]
    by_role: Callable[[list[int]], Sequence[int]]


@dataclass(slots=True)
class Found:
    """Tables whose like have been remembered, alive as long as their tensors are.

    Attributes:
        tables: As the library reads them.
        counted_at: Address of what the pass counts in.
    """

    tables: cpu.Structures
    counted_at: int


_known: Remembered[_Known] = Remembered()


def remember(
    key: Hashable,
    stored: Stored,
    tables: Sequence[Table],
    updates: Sequence[TableUpdate],
    features: Sequence[int],
) -> None:
    """Remember tables that were passed over, if they can be again.

    Args:
        key: Tells apart whose tables they are.
        stored: What they are made of.
        tables: The tables.
        updates: What an update of them needs; none for other passes.
        features: The table of each feature.
    """
    tensors = stored.tensors
    if (
        any(t.device != _CPU for t in tensors)
        or not backend.is_cpp()
        or not pointers.are_plain(tensors)
    ):
        return
    # Tensors of absent roles have no bytes; a lookup reads the first three roles alone.
    held = iter(i for i, tensor in enumerate(tensors) if tensor.nbytes)
    present = iter(bool(tensor.nbytes) for tensor in table_tensors(tables, updates))
    roles = cpu.ROLES if updates else cpu.ROLES[:3]
    places = [
        next(held) if role in roles and next(present) else -1 for _ in tables for role in cpu.ROLES
    ]
    known = _Known(
        list(stored.options),
        cpu.structures(tables, updates, features),
        [tensor.nbytes for tensor in tensors],
        itemgetter(*places),
    )
    _known.put(key, tensors, known)


def find(key: Hashable, stored: Stored) -> Found | None:
    """The tables as the library reads them, if their like have been remembered.

    Args:
        key: See :func:`remember`.
        stored: What they are made of.
    """
    known = _known.get(key, stored.tensors)
    if known is None or known.options != stored.options or not backend.is_cpp():
        return None
    try:
        addresses = pointers.held_ptrs("a table", stored.tensors, known.sizes)
    except (TypeError, ValueError):
        # Prepared anew, they are refused by name.
        return None
    tables = known.tables.copy()
    tables.set_addresses(known.by_role([*addresses, 0]))
    return Found(tables, addresses[-1])


def pool(found: Found, lookups: Lookups) -> Tensor:
    """See :func:`.calls.pool`.

    Args:
        found: From :func:`find`, made for the lookups' features.
        lookups: Which rows.
    """
    calls.check_lookups(lookups, len(found.tables.tables))
    return cpu.pool(found.tables, lookups, found.counted_at)


def update(
    found: Found,
    numbers: Sequence[tuple[float, float, float]],
    lookups: Lookups,
    grad: Tensor,
    seed: int,
    step: int,
) -> None:
    """See :func:`.calls.update`.

    Args:
        found: From :func:`find`, made for the lookups' features.
        numbers: Learning rate, weight decay and epsilon of each table.
        lookups: Which rows.
        grad: The output's gradient.
        seed: Philox key word.
        step: Number of the step.
    """
    tables = found.tables
    calls.check_lookups(lookups, len(tables.tables))
    calls.check_grad(grad, lookups, tables.layout.width)
    calls.check_words(seed, step)
    tables.set_numbers(numbers)
    cpu.update(tables, lookups, grad, found.counted_at, seed, step)

"""Embedding ops in C++ (csrc/embedding_pool.h, csrc/embedding_update.h)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .. import facts, native
from ..pointers import data_ptr, run_ptr, run_ptrs
from .faults import check_offsets, index_error, not_finite, unknown_resident
from .job import Job, Lookups, Table, TableUpdate, table_tensors

ROLES = ("codes", "cache", "tags", "counts", "stamps", "floors", "accumulator")
"""Tensors of a table, whose addresses are the first words of its structure."""

_ADDRESSES = struct.Struct(f"{len(ROLES)}Q")
_NUMBERS = struct.Struct("3f")
_SIZE, _LR = ctypes.sizeof(native.Table), native.Table.lr.offset


def run(job: Job) -> Tensor | None:
    """Run ``job``.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: Offsets decrease or reach too far, a tensor is not contiguous or not on the CPU,
            or a cache holds rows that its table does not have.
        IndexError: A row number is out of range.
        FloatingPointError: The gradient of an update or its weights are not finite.
        RuntimeError: The library is missing or has no kernel for a storage.
    """
    tables = structures(job.tables, job.updates, job.lookups.features)
    addresses = iter(run_ptrs("a table", table_tensors(job.tables, job.updates)))
    # A lookup reads the first three alone.
    roles = ROLES if job.updates else ROLES[:3]
    tables.set_addresses([next(addresses) if r in roles else 0 for _ in job.tables for r in ROLES])
    if job.kind == "pool":
        assert job.statistics is not None
        return pool(tables, job.lookups, data_ptr("statistics", job.statistics, torch.int64))
    assert job.grad is not None
    if job.kind == "weight-grad":
        return weight_grad(tables, job.lookups, job.grad)
    assert job.evictions is not None
    tables.set_numbers([(u.lr, u.weight_decay, u.eps) for u in job.updates])
    evictions_at = data_ptr("evictions", job.evictions, torch.int64)
    update(tables, job.lookups, job.grad, evictions_at, job.seed, job.step)
    return None


class Layout:
    """The table and the first column of each feature, where the library can read them."""

    def __init__(self, features: Sequence[int], dims: Sequence[int]) -> None:
        self.features = np.array(features, dtype=np.int32)
        self.columns = np.cumsum((0, *dims), dtype=np.int64)
        self.width = int(self.columns[-1])
        self.features_at = native.address(self.features)
        self.columns_at = native.address(self.columns)


# The same in every step of a module.
_layout = lru_cache(Layout)


@dataclass(frozen=True)
class Structures:
    """Tables as the library reads them.

    Attributes:
        tables: One structure after the other.
        layout: Their features.
    """

    tables: ctypes.Array[native.Table]
    layout: Layout

    # Of a step between two of a model's, whose code is in no cache, each call of Python counts.
    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Set the addresses of the tensors: those of :data:`ROLES`, table by table."""
        roles = len(ROLES)
        for i in range(len(self.tables)):
            _ADDRESSES.pack_into(self.tables, i * _SIZE, *addresses[i * roles : (i + 1) * roles])

    def set_numbers(self, numbers: Sequence[tuple[float, float, float]]) -> None:
        """Set learning rate, weight decay and epsilon of each table."""
        for i, own in enumerate(numbers):
            _NUMBERS.pack_into(self.tables, i * _SIZE + _LR, *own)

    def copy(self) -> Structures:
        """The same tables at another place."""
        return Structures(type(self.tables).from_buffer_copy(self.tables), self.layout)


def structures(
    tables: Sequence[Table], updates: Sequence[TableUpdate], features: Sequence[int]
) -> Structures:
    """All of the tables but the addresses, and what may change from step to step."""
    made = [_structure(table, updates[i] if updates else None) for i, table in enumerate(tables)]
    layout = _layout(tuple(features), tuple(tables[t].dim for t in features))
    return Structures((native.Table * len(made))(*made), layout)


def _structure(table: Table, update: TableUpdate | None) -> native.Table:
    codes, place, numbers = table.codes, table.place, (0, 0, 0)
    if update is not None:
        stochastic = update.stochastic and codes.dtype != torch.float32
        numbers = (stochastic, facts.RULES[update.rule], update.stream)
    return native.Table(
        *(0,) * len(ROLES),
        *(codes.shape[0], codes.shape[1] * codes.itemsize, table.dim, table.sets),
        *(place.period, place.first, place.taken, place.dim, place.column),
        facts.FORMATS[table.storage.name],
        *(table.ways, table.mixed, *numbers, 0.0, 0.0, 0.0, 0),
    )


# ----------------------------------------------------------------------------------------- calls


def pool(tables: Structures, lookups: Lookups, statistics_at: int) -> Tensor:
    """Sums of the bags; statistics are added at an address. See :func:`run` for what is raised."""
    call = _Call(tables, lookups)
    out = torch.empty(call.batch, tables.layout.width, dtype=torch.float32, device="cpu")
    result = native.library().subulp_embedding_pool(
        *(call.tables, ctypes.byref(call.lookups)),
        data_ptr("out", out, torch.float32),
        *(statistics_at, *call.where),
    )
    call.check(result)
    return out


def weight_grad(tables: Structures, lookups: Lookups, grad: Tensor) -> Tensor:
    """Gradient of the lookups' weights. See :func:`run` for what is raised."""
    call = _Call(tables, lookups, grad)
    out = torch.zeros(call.values.shape, dtype=torch.float32, device="cpu")
    result = native.library().subulp_embedding_weight_grad(
        *(call.tables, ctypes.byref(call.lookups), call.grad_at),
        data_ptr("result", out, torch.float32),
        *call.where,
    )
    call.check(result)
    return out


def update(
    tables: Structures, lookups: Lookups, grad: Tensor, evictions_at: int, seed: int, step: int
) -> None:
    """Update the rows; evictions are added at an address. See :func:`run` for what is raised."""
    call = _Call(tables, lookups, grad)
    result = native.library().subulp_embedding_update(
        *(call.tables, len(call.tables), ctypes.byref(call.lookups), call.grad_at),
        *(evictions_at, seed, step, *call.where),
    )
    call.check(result)


class _Call:
    """What a call of the library reads, alive while it runs."""

    def __init__(self, tables: Structures, lookups: Lookups, grad: Tensor | None = None) -> None:
        self.tables = tables.tables
        self.values, values_at = run_ptr("values", lookups.values, torch.int64)
        self.offsets, offsets_at = run_ptr("offsets", lookups.offsets, torch.int64)
        self.weights: Tensor | None = None
        self.grad: Tensor | None = None
        weights_at, self.grad_at = None, 0
        if lookups.weights is not None:
            self.weights, weights_at = run_ptr("weights", lookups.weights, torch.float32)
        if grad is not None:
            self.grad, self.grad_at = run_ptr("grad", grad, torch.float32)
        self.layout, features = tables.layout, len(lookups.features)
        self.batch = lookups.batch
        self.lookups = native.Lookups(
            features,
            self.batch,
            self.layout.width,
            self.values.shape[0],
            self.layout.features_at,
            self.layout.columns_at,
            values_at,
            offsets_at,
            weights_at,
        )
        self.where = (torch.get_num_threads(), native.isa())

    def check(self, result: int) -> None:
        """Raise the error that the library has returned."""
        if result == 0:
            return
        if result > 0:
            raise self._index_error(result - 1)
        if result == facts.BAD_OFFSETS:
            check_offsets(self.offsets, self.values.numel())
        if result == facts.BAD_GRADIENT:
            assert self.grad is not None
            raise not_finite("gradient", self.grad.shape)
        if result == facts.BAD_WEIGHTS:
            assert self.weights is not None
            raise not_finite("per_sample_weights", self.weights.shape)
        if result == facts.BAD_TAGS:
            raise unknown_resident()
        raise RuntimeError("the C++ kernels have no tables of such rows")

    def _index_error(self, position: int) -> IndexError:
        ends = self.offsets[self.batch :: self.batch]
        feature = int((ends <= position).sum())
        rows = self.tables[self.layout.features[feature]].rows
        return index_error(position, int(self.values[position]), feature, rows)

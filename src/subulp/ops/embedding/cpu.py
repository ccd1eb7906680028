"""Embedding ops in C++ (csrc/embedding_pool.h, csrc/embedding_update.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .. import facts, native
from ..pointers import data_ptr, held_ptrs, run_ptrs
from .faults import check_offsets, index_error, not_finite, unknown_resident
from .job import Job


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
    call = _Call(job)
    if job.kind == "pool":
        return call.pool()
    if job.kind == "weight-grad":
        return call.weight_grad()
    call.update()
    return None


class _Call:
    """The structures that a call of the library reads, alive while it runs."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.lib = native.library()
        self.tables = _tables(job)
        looked = job.lookups
        self.layout = _layout(
            tuple(looked.features), tuple(job.tables[t].dim for t in looked.features)
        )
        self.values, self.offsets = looked.values.contiguous(), looked.offsets.contiguous()
        weights = looked.weights
        self.weights = None if weights is None else weights.resolve_neg().contiguous()
        self.lookups = native.Lookups(
            len(looked.features),
            looked.batch,
            self.layout.width,
            self.values.numel(),
            self.layout.features_at,
            self.layout.columns_at,
            data_ptr("values", self.values, torch.int64),
            data_ptr("offsets", self.offsets, torch.int64),
            None if self.weights is None else data_ptr("weights", self.weights, torch.float32),
        )
        self.where = (torch.get_num_threads(), native.isa())

    def pool(self) -> Tensor:
        job = self.job
        shape = (job.lookups.batch, self.layout.width)
        out = torch.empty(shape, dtype=torch.float32, device=job.device)
        assert job.statistics is not None
        self._call(
            self.lib.subulp_embedding_pool,
            data_ptr("out", out, torch.float32),
            data_ptr("statistics", job.statistics, torch.int64),
        )
        return out

    def _call(self, function: Callable[..., int], *addresses: int) -> None:
        tables, lookups = native.address(self.tables), ctypes.byref(self.lookups)
        self._check(function(tables, lookups, *addresses, *self.where))

    def _check(self, result: int) -> None:
        if result > 0:
            raise self._index_error(result - 1)
        if result == facts.BAD_OFFSETS:
            check_offsets(self.offsets, self.values.numel())
        if result == facts.BAD_GRADIENT:
            assert self.job.grad is not None
            raise not_finite("gradient", self.job.grad.shape)
        if result == facts.BAD_WEIGHTS:
            assert self.weights is not None
            raise not_finite("per_sample_weights", self.weights.shape)
        if result == facts.BAD_TAGS:
            raise unknown_resident()
        if result < 0:
            raise RuntimeError("the C++ kernels have no tables of such rows")

    def _index_error(self, position: int) -> IndexError:
        looked = self.job.lookups
        ends = looked.offsets[looked.batch :: looked.batch]
        feature = int((ends <= position).sum())
        rows = self.job.tables[looked.features[feature]].rows
        return index_error(position, int(looked.values[position]), feature, rows)

    def weight_grad(self) -> Tensor:
        grad = self._grad()
        result = torch.zeros(self.values.shape, dtype=torch.float32, device=self.job.device)
        self._call(
            self.lib.subulp_embedding_weight_grad,
            data_ptr("grad", grad, torch.float32),
            data_ptr("result", result, torch.float32),
        )
        return result

    def update(self) -> None:
        grad, job = self._grad(), self.job
        assert job.evictions is not None
        result = self.lib.subulp_embedding_update(
            native.address(self.tables),
            len(self.tables),
            ctypes.byref(self.lookups),
            data_ptr("grad", grad, torch.float32),
            data_ptr("evictions", job.evictions, torch.int64),
            job.seed,
            job.step,
            *self.where,
        )
        self._check(result)

    def _grad(self) -> Tensor:
        assert self.job.grad is not None
        return self.job.grad.resolve_neg().contiguous()


class _Layout:
    """The table and the first column of each feature, where the library can read them."""

    def __init__(self, features: Sequence[int], dims: Sequence[int]) -> None:
        self.features = np.array(features, dtype=np.int32)
        self.columns = np.cumsum((0, *dims), dtype=np.int64)
        self.width = int(self.columns[-1])
        self.features_at = native.address(self.features)
        self.columns_at = native.address(self.columns)


# The same in every step of a module.
_layout = lru_cache(_Layout)


def _tables(job: Job) -> np.ndarray:
    """The tables as the library reads them: uint64 ``(tables, words of a structure)``."""
    tensors, known = job.table_tensors(), job.known
    if known:
        made: np.ndarray = known["tables"].copy()
        sizes = known["sizes"]
        held = held_ptrs("a table", tensors, sizes)
        addresses = [at if size else 0 for at, size in zip(held, sizes, strict=True)]
    else:
        addresses = run_ptrs("a table", tensors)
        structures = [_table(job, i) for i in range(len(job.tables))]
        made = np.array(structures, dtype=native.TABLE).view(np.uint64).reshape(len(structures), -1)
        if known is not None:
            known |= {"tables": made.copy(), "sizes": [tensor.nbytes for tensor in tensors]}
    roles = len(tensors) // max(len(made), 1)
    made[:, :roles] = np.array(addresses, dtype=np.uint64).reshape(len(made), roles)
    if job.updates:
        numbers = [(u.lr, u.weight_decay, u.eps) for u in job.updates]
        made.view(np.float32)[:, _NUMBERS : _NUMBERS + 3] = numbers
    return made


def _table(job: Job, i: int) -> tuple[float, ...]:
    """All of a table but the addresses and what may change from step to step."""
    table = job.tables[i]
    codes, place, numbers = table.codes, table.place, (0, 0, 0)
    if job.updates:
        update = job.updates[i]
        stochastic = update.stochastic and codes.dtype != torch.float32
        numbers = (stochastic, facts.RULES[update.rule], update.stream)
    return (
        *(0,) * _ADDRESSES,
        *(codes.shape[0], codes.shape[1] * codes.itemsize, table.dim, table.sets),
        *(place.period, place.first, place.taken, place.dim, place.column),
        facts.FORMATS[table.storage.name],
        *(table.ways, table.mixed, *numbers, 0.0, 0.0, 0.0, 0),
    )


_ADDRESSES = 7
"""Roles of a table's tensors, the first fields of its structure."""

_NUMBERS: int = dict(native.TABLE.fields or {})["lr"][1] // 4
"""Where learning rate, weight decay and epsilon are in a structure, in FP32 numbers."""

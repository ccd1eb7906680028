"""Embedding ops in C++ (csrc/embedding_pool.h, csrc/embedding_update.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...numerics.ieee import as_fp32
from .. import facts, native
from .job import Job, check_offsets, index_error, not_finite


def run(job: Job) -> Tensor | None:
    """Run ``job``.

    Raises:
        ValueError: Offsets decrease or reach too far.
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
        self.weights = None if looked.weights is None else looked.weights.contiguous()
        self.lookups = native.Lookups(
            len(looked.features),
            looked.batch,
            self.layout.width,
            self.values.numel(),
            self.layout.features_at,
            self.layout.columns_at,
            self.values.data_ptr(),
            self.offsets.data_ptr(),
            None if self.weights is None else self.weights.data_ptr(),
        )
        self.where = (torch.get_num_threads(), native.isa())

    def pool(self) -> Tensor:
        out = torch.empty(self.job.lookups.batch, self.layout.width)
        assert self.job.statistics is not None
        result = self.lib.subulp_embedding_pool(
            native.address(self.tables),
            ctypes.byref(self.lookups),
            out.data_ptr(),
            self.job.statistics.data_ptr(),
            *self.where,
        )
        if result > 0:
            raise self._index_error(result - 1)
        if result == facts.BAD_OFFSETS:
            check_offsets(self.offsets, self.values.numel())
        _check(result)
        return out

    def _index_error(self, position: int) -> IndexError:
        looked = self.job.lookups
        ends = looked.offsets[looked.batch :: looked.batch]
        feature = int((ends <= position).sum())
        rows = self.job.tables[looked.features[feature]].rows
        return index_error(position, int(looked.values[position]), feature, rows)

    def weight_grad(self) -> Tensor:
        grad = self._grad()
        result = torch.zeros(self.values.shape)
        _check(
            self.lib.subulp_embedding_weight_grad(
                native.address(self.tables),
                ctypes.byref(self.lookups),
                grad.data_ptr(),
                result.data_ptr(),
                *self.where,
            )
        )
        return result

    def update(self) -> None:
        grad, job = self._grad(), self.job
        assert job.evictions is not None
        result = self.lib.subulp_embedding_update(
            native.address(self.tables),
            len(self.tables),
            ctypes.byref(self.lookups),
            grad.data_ptr(),
            job.evictions.data_ptr(),
            job.seed,
            job.step,
            *self.where,
        )
        if result == facts.BAD_GRADIENT:
            raise not_finite("gradient", grad)
        if result == facts.BAD_WEIGHTS:
            assert self.weights is not None
            raise not_finite("per_sample_weights", self.weights)
        _check(result)

    def _grad(self) -> Tensor:
        assert self.job.grad is not None
        return self.job.grad.contiguous()


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
    rows = []
    for i, table in enumerate(job.tables):
        codes, update = table.codes, job.updates[i] if job.updates else None
        roles = (update.counts, update.stamps, update.floors, update.accumulator) if update else ()
        for tensor in (codes, table.cache, table.tags, *roles):
            if not tensor.is_contiguous():
                raise ValueError(f"table {i} has a tensor that is not contiguous")
        addresses = [t.data_ptr() if t.numel() else 0 for t in roles] or [0] * 4
        numbers = (
            (
                update.stochastic and codes.dtype != torch.float32,
                facts.RULES[update.rule],
                update.stream,
                as_fp32(update.lr),
                as_fp32(update.weight_decay),
                as_fp32(update.eps),
            )
            if update
            else (0, 0, 0, 0.0, 0.0, 0.0)
        )
        rows.append(
            (
                *(codes.data_ptr(), table.cache.data_ptr(), table.tags.data_ptr(), *addresses),
                *(codes.shape[0], codes.stride(0) * codes.itemsize, table.dim, table.sets),
                facts.FORMATS[table.storage.name],
                *(table.ways, table.mixed, *numbers, 0),
            )
        )
    return np.array(rows, dtype=native.TABLE)


def _check(result: int) -> None:
    if result < 0:
        raise RuntimeError("the C++ kernels have no tables of such rows")

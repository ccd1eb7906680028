"""Parts of embedding tables: the bits that the whole table has there, whoever computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from subulp.nn.cached_table import CachedTable, EmbeddingTable
from subulp.nn.placement import PlacedPart
from subulp.nn.table_part import TablePart, shard_of
from subulp.ops.embedding import Lookups, TableUpdate, calls

from .support import environment, interpreted, isas, patterns

RANKS = 3
CASES = [("int8", "lfu"), ("bf16", "lru"), ("e4m3", "lfu"), ("int2", "lru"), ("fp16", "none")]


def config(storage: str, policy: str) -> EmbeddingTable:
    if policy == "none":
        return EmbeddingTable(100, 17, storage, 0.0)
    return EmbeddingTable(100, 17, storage, 0.3, policy, 4)


def train(table: CachedTable, rows: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    """The state after some steps of rows that are a bag each."""

    def counters(role: Tensor | None) -> Tensor:
        return torch.empty(0, dtype=torch.int32) if role is None else role

    evictions = torch.zeros(1, dtype=torch.int64)
    for step, (values, grad) in enumerate(zip(rows, grads, strict=True), 1):
        update = TableUpdate(
            *map(counters, (table.counts, table.stamps, table.floors)),
            accumulator=torch.empty(0, dtype=torch.float32),
            stochastic=True,
            stream=2,
            lr=0.1,
            weight_decay=0.0,
            eps=0.0,
        )
        lookups = Lookups([0], values, torch.arange(len(values) + 1), None)
        calls.update([table.as_op()], [update], lookups, grad, evictions, 7, step)
    assert table.config.cache_shape()[0] == 0 or int(evictions) > 0
    return {name: tensor.clone() for name, tensor in table.state_dict().items()}


def steps() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(100, (60,), generator=generator) for _ in range(3)]
    return rows, [torch.randn(60, 17, generator=generator) for _ in rows]


def on_rank(storage: str, policy: str, rank: int) -> dict[str, Tensor]:
    """What a rank of three has after its share of the steps."""
    placed = PlacedPart(0, config(storage, policy), 0, 17, None)
    table = CachedTable(placed.config, part=placed.on(rank, RANKS))
    table.fill_uniform(3)
    rows, grads = [], []
    for values, grad in zip(*steps(), strict=True):
        owner, local = shard_of(values, torch.full_like(values, placed.period), RANKS)
        rows.append(local[owner == rank])
        grads.append(grad[owner == rank])
    return train(table, rows, grads)


def some_columns(storage: str, policy: str, backend: str) -> dict[str, Tensor]:
    """What the columns 5 to 11 have after the steps."""
    table = CachedTable(config(storage, policy), part=TablePart(100, 7, 0, 7, 17, 5, 7))
    if policy == "none":
        table = CachedTable(config(storage, policy), part=TablePart(100, 100, 0, 100, 17, 5, 7))
    table.fill_uniform(3)
    rows, grads = steps()
    with environment(SUBULP_BACKEND=backend):
        return train(table, rows, [grad[:, 5:12].contiguous() for grad in grads])


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert np.array_equal(patterns(value), patterns(b[name])), name


def run(backend: str, storage: str, policy: str, rank: int) -> dict[str, Tensor]:
    with environment(SUBULP_BACKEND=backend), np.errstate(all="ignore"):
        return on_rank(storage, policy, rank)


@pytest.mark.parametrize(("storage", "policy"), CASES)
def test_a_rank_has_the_rows_of_the_whole(storage, policy):
    whole = CachedTable(config(storage, policy))
    whole.fill_uniform(3)
    with environment(SUBULP_BACKEND="reference"):
        expected = train(whole, *steps())["table.codes"]
    numbers = torch.arange(100)
    period = whole.sets or 100
    owner, local = shard_of(numbers, torch.full_like(numbers, period), RANKS)
    for rank in range(RANKS):
        codes = run("reference", storage, policy, rank)["table.codes"]
        mine = owner == rank
        assert np.array_equal(patterns(codes[local[mine]]), patterns(expected[mine]))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("storage", "policy"), CASES)
def test_the_kernels_are_the_reference(storage, policy, rank):
    expected = run("reference", storage, policy, rank)
    columns = some_columns(storage, policy, "reference")
    for isa in isas():
        with environment(SUBULP_ISA=isa):
            same(run("cpu", storage, policy, rank), expected)
            same(some_columns(storage, policy, "cpu"), columns)


@interpreted
@pytest.mark.parametrize(("storage", "policy"), [CASES[0], CASES[1], CASES[4]])
def test_triton_is_the_reference(storage, policy):
    same(run("triton", storage, policy, 1), run("reference", storage, policy, 1))
    expected = some_columns(storage, policy, "reference")
    same(some_columns(storage, policy, "triton"), expected)

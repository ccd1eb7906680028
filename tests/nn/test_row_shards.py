"""Who has which rows: as ``torch.chunk`` cuts them, precise rows and others alike."""

from __future__ import annotations

import pytest
import torch

from subulp.nn.row_shards import RowShards, Run

SIZES = [(1, 0), (3, 0), (3, 3), (5, 2), (10, 3), (211, 64), (211, 1), (64, 64), (1000, 200)]


@pytest.mark.parametrize(("rows", "precise"), SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_row_has_one_place(rows, precise, ranks):
    shards = RowShards(rows, precise, ranks)
    numbers = [shards.numbers(rank, torch.device("cpu")) for rank in range(ranks)]
    assert torch.cat(numbers).sort().values.tolist() == list(range(rows))
    for rank, own in enumerate(numbers):
        assert shards.count(rank) == len(own)
        assert shards.precise_count(rank) == int((own < precise).sum())
        assert shards.owners(own).tolist() == [rank] * len(own)
        assert shards.places(rank, own).tolist() == list(range(len(own)))
        if shards.chunked:
            chunk = dict(enumerate(torch.arange(rows).chunk(ranks))).get(rank, torch.arange(0))
            assert torch.equal(own, chunk)


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_kinds_are_balanced(ranks):
    shards = RowShards(1003, 201, ranks)
    for count in (shards.count, shards.precise_count):
        sizes = [count(rank) for rank in range(ranks)]
        assert max(sizes) - min(sizes) <= 2 * ranks


def test_runs_are_cut():
    run = Run(10, 3, 5)
    assert run.cut(0, 12) == Run(10, 3, 2)
    assert run.cut(11, 13) == Run(11, 4, 2)
    assert run.cut(14, 99) == Run(14, 7, 1)
    assert run.cut(0, 10).count == run.cut(15, 20).count == 0

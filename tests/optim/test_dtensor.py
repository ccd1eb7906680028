"""DTensors: the bits of a step do not depend on the mesh, and what is not known is refused."""

from __future__ import annotations

import pytest
import torch

from tests.optim import moved, sharded


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_strategy_on_every_mesh(ranks, count):
    """Replicas, shards of one and two dimensions, uneven and empty ones: bits of one process."""
    check_bits(ranks, count)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_strategy_on_every_mesh_of_gpus(gpu_ranks, count):
    """The same bits, those of one process on the CPU."""
    check_bits(gpu_ranks, count)


def check_bits(ranks, count):
    expected = {case: sharded.train(case, None) for case in sharded.cases()}
    for found in ranks.run(count, sharded.train_all, count):
        for case in sharded.cases():
            for layout in sharded.LAYOUTS[count]:
                pairs = zip(found[f"{case} {layout}"], expected[case], strict=True)
                for i, (a, b) in enumerate(pairs):
                    assert torch.equal(a, b), (case, layout, i)


def test_states_move_on_every_mesh(ranks):
    """From torch, between precisions, into averages, and back: the bits of one process."""
    expected = {case: moved.move(case, None) for case in moved.CASES}
    for found in ranks.run(2, moved.move_all, 2):
        for case in moved.CASES:
            for layout in sharded.LAYOUTS[2][:2]:
                for a, b in zip(found[f"{case} {layout}"], expected[case], strict=True):
                    assert torch.equal(a.view(b.dtype), b), (case, layout)

"""DTensors: the bits of a step do not depend on the mesh, and what is not known is refused."""

from __future__ import annotations

import pytest
import torch

from tests.optim import sharded


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

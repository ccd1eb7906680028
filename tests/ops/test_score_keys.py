"""Keys of scores: their order, and of equal ones the first."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from subulp.nn.top_k import TopK
from subulp.ops.head import triton_topk

from .support import environment, interpreted


def scores() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(5, 40, generator=generator).bfloat16().float().mul_(4).round_()
    made[1, :7] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 0.0])
    made[2] = made[2, 0]
    made[3] *= -1
    return made


@interpreted
def test_the_order_is_that_of_a_stable_sort():
    made = scores()
    expected = made.sort(dim=1, descending=True, stable=True).indices
    for laid_out in (made, made.t().contiguous().t()):
        keys = triton_topk.keys(laid_out)
        assert torch.equal(keys.sort(dim=1, descending=True).indices, expected)
        assert all(len(row.unique()) == 40 for row in keys)


@interpreted
def test_nan_comes_first():
    keys = triton_topk.keys(torch.tensor([[math.inf, math.nan, -math.nan, 1.0]]))
    assert keys.argsort(dim=1, descending=True).tolist() == [[1, 2, 0, 3]]


@interpreted
@pytest.mark.parametrize("k", [1, 3, 40])
def test_the_best_are_those_of_the_cpu(k):
    made, labels = scores(), torch.arange(40)
    found = []
    for backend in ("cpu", "triton"):
        best = TopK(5, k, torch.device("cpu"))
        with environment(SUBULP_BACKEND=backend):
            for part in (slice(0, 13), slice(13, 40)):
                best.add(made[:, part], labels[part])
        found.append(best)
    assert torch.equal(found[0].labels, found[1].labels)
    assert torch.equal(found[0].scores, found[1].scores)

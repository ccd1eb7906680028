"""Layers under torch's tensor parallelism: real ranks of gloo against one process, bit for bit."""

from __future__ import annotations

import pytest
import torch

from .mesh import tensor_parallel

COUNTS = [1, 2, 4]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["linears", "tables"])
def test_results_and_gradients_are_those_of_one_process(any_ranks, kind, count):
    """Rows and columns, replicas, uneven and empty parts, inputs divided or not, biases."""
    for found in any_ranks.run(count, getattr(tensor_parallel, kind), count):
        assert found
        assert {case: own for case, own in found.items() if own} == {}


@pytest.mark.parametrize(
    ("precision", "compiled"), [("collage-plus", False), ("master", False), ("master", True)]
)
def test_a_narrow_block_trains(ranks, precision, compiled):
    """Near what one process has, for sums depend on their order, and equal on all ranks."""
    first, second = ranks.run(2, tensor_parallel.train, 2, precision, compiled=compiled)
    whole = tensor_parallel.train(1, precision)
    for ours, theirs, expected in zip(first, second, whole, strict=True):
        assert torch.equal(ours, theirs)
        # Four steps of 0.01, of which rounding may turn a few the other way.
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)
        assert (ours - expected).abs().mean() < 0.002


def test_what_cannot_be_computed_is_refused(ranks):
    for found in ranks.run(2, tensor_parallel.refusals):
        assert found.keys() == {
            "plain weight",
            "plain table",
            "plain x",
            "plain ids",
            "ids too large",
            "negative ids",
            "other mesh",
            "grad_dtype",
            "fp8",
            "partial",
        }
        assert found["plain weight"].startswith("TypeError: weight is a plain tensor, and x is")
        assert found["plain table"].startswith("TypeError: weight is a plain tensor, and ids is")
        assert found["plain x"].startswith(
            "TypeError: x is a plain tensor, and weight is a DTensor"
        )
        assert found["plain ids"].startswith("TypeError: ids is a plain tensor, and weight is")
        assert found["ids too large"].startswith("IndexError: index out of range")
        assert found["negative ids"].startswith("IndexError: index out of range")
        assert "expected one mesh" in found["other mesh"]
        assert "leave grad_dtype as it is" in found["grad_dtype"]
        assert "products='fp8'" in found["fp8"]
        assert "weight is placed as P(sum): expected Replicate()" in found["partial"]

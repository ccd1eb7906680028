"""FSDP2, HSDP, tensor parallelism, DDP, ZeRO-1 and stages: torch's own, by gloo and NCCL."""

from __future__ import annotations

import pytest

from tests.optim import parallel


@pytest.mark.parametrize(
    ("count", "kinds"), [(2, ["fsdp", "tp", "ddp"]), (4, ["fsdp", "hsdp", "fsdp-tp"])]
)
def test_steps_are_those_of_whole_gradients(any_ranks, count, kinds):
    any_ranks.run(count, parallel.every_kind, kinds)


def test_fp32_is_torch_adamw(any_ranks):
    any_ranks.run(2, parallel.against_torch, ["fsdp", "tp", "ddp"])


def test_zero_redundancy_optimizer(any_ranks):
    any_ranks.run(2, parallel.zero_redundancy)


def test_stages_draw_by_name(any_ranks):
    any_ranks.run(2, parallel.stages)


def test_ranks_agree_on_a_seed(ranks):
    first, second = ranks.run(2, parallel.seeds)
    assert first == second
    assert first[1] == 9
    assert first[0] != 9


@pytest.mark.parametrize(("count", "kind"), [(2, "fsdp"), (2, "tp"), (4, "hsdp"), (4, "fsdp-tp")])
def test_fused_is_unfused(any_ranks, count, kind):
    any_ranks.run(count, parallel.fused_is_unfused, kind)


def test_accumulation_by_fsdp(any_ranks):
    any_ranks.run(2, parallel.accumulated_by_fsdp)


def test_accumulation_over_replicas(any_ranks):
    any_ranks.run(4, parallel.accumulated_over_replicas)


def test_averages_of_shards(any_ranks):
    any_ranks.run(2, parallel.averages)


def test_a_gradient_that_is_not_finite_on_one_rank(any_ranks):
    assert any_ranks.run(2, parallel.not_finite_anywhere, "skip") == [[1, 1], [1, 1]]
    other, own = any_ranks.run(2, parallel.not_finite_anywhere, "raise")
    assert all("a gradient on another rank" in each for each in other)
    assert all("the gradient of parameter '0.norm.weight'" in each for each in own)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_fused_data_parallel(any_ranks, max_norm):
    any_ranks.run(2, parallel.fused_data_parallel, max_norm)


def test_what_cannot_be_stepped_is_refused(ranks):
    for partial, uneven in ranks.run(2, parallel.refusals):
        assert "placement" in partial
        assert "reduce it first" in partial
        assert "divided as distribute_tensor divides it" in uneven


@pytest.mark.parametrize(
    "function",
    [
        parallel.strict_and_wide,
        parallel.mixed_kinds,
        parallel.loss_scaling,
        parallel.other_precision,
        parallel.clipped_over_meshes,
        parallel.memory,
        parallel.first_steps_of_a_rising_rate,
    ],
    ids=lambda function: function.__name__,
)
def test_on_shards_as_on_whole_tensors(ranks, function):
    ranks.run(2, function)


def test_a_first_step_at_a_rate_of_zero_concerns_the_ranks_of_its_mesh(ranks):
    """A collective of the whole world would have met one of the loop's own on the others."""
    found = ranks.run(4, parallel.part_of_the_world)
    assert [total for total, _ in found] == [1111] * 4
    assert [set(steps) for _, steps in found] == [{2.0}, {2.0}, set(), set()]

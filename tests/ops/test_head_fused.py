"""The head's step in one call: the bits of the one in tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subulp.numerics import BF16, E4M3, FP16, round_to
from subulp.ops import bf16_product
from subulp.ops.head import cpu, exact_sum, fused, tiles
from subulp.ops.sgd import cpu as sgd_cpu

from .head_jobs import job
from .support import environment, isas, threads
from .test_head import copy, same

CHANGES = [
    {},
    {"weight_decay": 0.3, "scale": 0.25},
    {"rounding": "nearest", "gain": 1.0},
    {"train": False, "gradient": True},
    {"train": False},
]


def both(made, tile_rows):
    """A job run in tiles, and its copy in one call."""
    other = copy(made)
    tiles.run(made, tile_rows, sgd_cpu.run)
    assert fused.run(other, tile_rows)
    return made, other


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("fmt", [E4M3, BF16], ids=str)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_every_bit_is_that_of_tiles(fmt, changes, isa):
    made = job(fmt, labels=700, dim=130, batch=37, products="bf16", **changes)
    before = made.rows.clone()
    with environment(SUBULP_ISA=isa), threads(2):
        first, second = both(made, 300)
    same(first, second)
    assert torch.equal(first.rows, before) != first.train


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 600),
    st.integers(1, 70),
    st.integers(1, 140),
    st.integers(1, 700),
    st.sampled_from([E4M3, BF16]),
    st.sampled_from(CHANGES),
    st.sampled_from(isas()),
)
def test_shapes_tiles_and_threads_do_not_matter(labels, dim, batch, tile, fmt, changes, isa):
    made = job(fmt, labels=labels, dim=dim, batch=batch, products="bf16", **changes)
    copies = [copy(made) for _ in range(3)]
    with environment(SUBULP_ISA=isa):
        tiles.run(made, tile, sgd_cpu.run)
        for count, other in enumerate(copies, 1):
            with threads(count):
                if not fused.run(other, tile):
                    assert labels <= (count - 1) * tile
                    continue
            same(made, other)


def test_inputs_in_e4m3_multiply_on_units():
    if not bf16_product.units_at(torch.device("cpu")):
        # Without units E4M3 inputs are multiplied in FP32, which is not this step's kind.
        assert not fused.run(job(E4M3, products="fp8"), 50)
        return
    with threads(2):
        same(*both(job(E4M3, labels=300, products="fp8", scale=0.125), 64))


@pytest.mark.parametrize("owner", [False, True], ids=["parts", "sum"])
def test_the_loss_goes_where_it_is_asked_for(owner):
    first, second = job(products="bf16"), job(products="bf16")
    if owner:
        first = replace(first, loss=exact_sum.ExactSum(exact_sum.new_parts(first.device)))
        parts = exact_sum.new_parts(first.device)
        second = replace(second, loss=exact_sum.ExactSum(parts))
        with threads(1):
            assert fused.run(second, 1000)
        # The owner's to flush.
        assert not parts.any()
        second.loss.flush()
        assert parts.any()
    else:
        first = replace(first, loss=None)
        with threads(1):
            assert fused.run(first, 1000)
            assert fused.run(second, 1000)
        assert torch.equal(first.rows.view(torch.uint8), second.rows.view(torch.uint8))


@pytest.mark.parametrize(
    "changes",
    [
        {"products": "fp32"},
        {"products": "bf16", "dropout": 0.25},
        {"products": "bf16", "precise": 40},
        {"products": "bf16", "before": 3},
        {"products": "bf16", "after": 3},
        {"products": "bf16", "fmt": FP16},
    ],
    ids=str,
)
def test_another_kind_of_step_is_left_alone(changes):
    made = job(**changes)
    other = copy(made)
    assert not fused.run(other, 16)
    same(made, other)


def test_more_threads_than_tiles_share_products_instead():
    made = job(products="bf16")
    with threads(3):
        assert not fused.run(copy(made), 60)
        assert fused.run(copy(made), 50)


def test_no_instances_leave_the_decay_of_weights():
    made = job(batch=1, products="bf16", weight_decay=0.5, rounding="nearest")
    none = made.positive_labels[:0]
    made = replace(
        made,
        x=made.x[:0],
        grad_x=made.grad_x[:0],
        positive_labels=none,
        positive_instances=none,
    )
    wide = made.rows.float() * (1 - 0.25 * 0.5)
    with threads(1):
        cpu.run(made)
    assert torch.equal(made.rows.float(), round_to(wide, E4M3))


@pytest.mark.parametrize(
    ("labels", "instances"),
    [([103], [0]), ([-1], [0]), ([5], [7]), ([5], [-1]), ([9, 8], [0, 0])],
    ids=str,
)
def test_positives_outside_are_refused_before_anything_changes(labels, instances):
    made = replace(
        job(products="bf16"),
        positive_labels=torch.tensor(labels),
        positive_instances=torch.tensor(instances),
    )
    other = copy(made)
    with threads(1), pytest.raises(ValueError, match="a positive is outside of the 103 labels x 7"):
        fused.run(other, 50)
    same(made, other)


def test_gradients_of_inputs_in_any_layout():
    plain = job(products="bf16")
    turned = copy(plain)
    turned = replace(turned, grad_x=turned.grad_x.t().contiguous().t())
    with threads(2):
        assert fused.run(plain, 50)
        assert fused.run(turned, 50)
    assert torch.equal(turned.grad_x, plain.grad_x)


def test_what_is_no_run_of_memory_is_refused():
    made = job(products="bf16")
    for changes, message in (
        ({"rows": made.rows[:, ::2], "x": made.x[:, ::2].contiguous()}, "rows has strides"),
        ({"grad_x": made.grad_x.double()}, "grad_x has dtype torch.float64"),
        ({"grad_x": made.grad_x[:3]}, "grad_x has shape"),
        ({"positive_instances": made.positive_instances[:-1]}, "positive_instances has shape"),
        ({"positive_labels": made.positive_labels.int()}, "positive_labels has dtype"),
    ):
        with threads(1), pytest.raises(ValueError, match=message):
            fused.run(replace(made, **changes), 50)

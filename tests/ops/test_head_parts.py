"""Runs of a chunk's rows step as in the whole chunk; the loss is the same however it is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from subulp.numerics import BF16, E4M3, FP32, simulated
from subulp.numerics.int_rows import INT8
from subulp.ops.head import cpu, exact_sum, head_step, reference, tiles
from subulp.ops.head import triton as triton_head
from subulp.ops.sgd import cpu as sgd_cpu

from .head_jobs import job
from .support import environment, interpreted

CPU = torch.device("cpu")


def cut(whole, first, last):
    """The rows of a job from ``first`` to ``last``."""
    inside = (whole.positive_labels >= first) & (whole.positive_labels < last)
    remainder = None if whole.remainder is None else whole.remainder[first:last]
    return replace(
        whole,
        rows=whole.rows[first:last],
        remainder=remainder,
        positive_instances=whole.positive_instances[inside],
        positive_labels=whole.positive_labels[inside] - first,
        random=whole.random.after(first * whole.dim),
        before=first,
        after=whole.rows.shape[0] - last,
    )


def clones(made):
    kept = {name: getattr(made, name) for name in ("rows", "remainder", "grad_x", "loss")}
    return replace(made, **{name: None if t is None else t.clone() for name, t in kept.items()})


@pytest.mark.parametrize("fmt", [FP32, BF16, E4M3, INT8], ids=str)
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.3}, {"precise": 40}], ids=str)
@pytest.mark.parametrize("size", [16, 50, 103, 1000])
def test_runs_of_rows_step_as_the_whole(fmt, batch, changes, size):
    whole = job(fmt, batch=batch, **changes)
    parts = clones(whole)
    tiles.run(whole, size, sgd_cpu.run)
    for first, last in ((90, 103), (0, 1), (1, 37), (37, 40), (40, 90)):
        tiles.run(cut(parts, first, last), size, sgd_cpu.run)
    assert torch.equal(parts.rows.float(), whole.rows.float())
    assert torch.equal(parts.loss, whole.loss)
    if whole.remainder is not None:
        assert torch.equal(parts.remainder, whole.remainder)
    torch.testing.assert_close(parts.grad_x, whole.grad_x)


@pytest.mark.parametrize("fmt", [FP32, BF16, INT8], ids=str)
@pytest.mark.parametrize("batch", [1, 12])
@pytest.mark.parametrize("labels", [3, 50, 100])
@pytest.mark.parametrize("dim", [8, 33])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_backend_takes_the_tiles_of_the_whole(backend, dim, labels, batch, fmt):
    whole = job(fmt, dim=dim, labels=labels, batch=batch, weight_decay=0.1)
    parts = clones(whole)
    with environment(SUBULP_BACKEND=backend):
        head_step(whole)
        for first, last in ((0, labels // 3), (labels // 3, labels)):
            head_step(cut(parts, first, last))
    assert torch.equal(parts.rows.float(), whole.rows.float())
    assert torch.equal(parts.loss, whole.loss)


@pytest.mark.parametrize("products", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", [reference, cpu])
def test_narrow_products_of_runs_are_those_of_the_whole(products, backend):
    whole = job(E4M3, products=products, scale=0.25)
    parts = clones(whole)
    backend.run(whole)
    for first, last in ((0, 33), (33, 103)):
        backend.run(cut(parts, first, last))
    assert torch.equal(parts.rows.float(), whole.rows.float())
    assert torch.equal(parts.loss, whole.loss)


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"dropout": 0.3}, {"precise": 33}),
        *({"products": "bf16"}, {"products": "fp8"}, {"products": "fp8", "dropout": 0.3}),
        *({"fmt": INT8}, {"fmt": INT8, "dropout": 0.3}, {"fmt": INT8, "precise": 33}),
        *({"fmt": INT8, "labels": 70, "batch": 40}, {"fmt": simulated(3, 4)}),
        *({"fmt": FP32, "products": "bf16"}, {"fmt": BF16, "dropout": 0.3}),
    ],
    ids=str,
)
def test_the_fused_triton_kernel_steps_runs_as_the_whole(changes):
    whole = job(**{"fmt": E4M3, "labels": 70, **changes})
    parts = clones(whole)
    triton_head.run(whole)
    for first, last in ((0, 33), (33, 33), (33, 50), (50, 70)):
        triton_head.run(cut(parts, first, last))
    assert torch.equal(parts.rows.float(), whole.rows.float())
    assert torch.equal(parts.loss, whole.loss)
    torch.testing.assert_close(parts.grad_x, whole.grad_x)


def numbers():
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(40_000, generator=generator, dtype=torch.float64)
    powers = torch.empty(40_000, dtype=torch.float64).uniform_(-12, 40, generator=generator)
    return spread * 10**powers


def summed(*groups):
    parts = exact_sum.new_parts(CPU)
    for group in groups:
        adder = exact_sum.ExactSum(parts)
        for terms in group:
            adder.add(terms)
        adder.flush()
    return parts


def test_the_sum_does_not_depend_on_its_order():
    terms = numbers()
    shuffled = terms[torch.randperm(len(terms), generator=torch.Generator().manual_seed(1))]
    first = summed([terms])
    for other in (
        summed(shuffled.split(777)),
        summed(shuffled.split(7)[:900], shuffled.split(7)[900:]),
        summed([terms[:9]], [terms[9:]]) + summed([]),
    ):
        assert torch.equal(first, other)


def test_the_sum_is_exact_but_for_what_is_cut_off():
    terms = numbers()
    exact = sum(map(Fraction, terms.tolist()))
    found = exact_sum.total(summed([terms]))
    assert abs(Fraction(found.item()) - exact) <= abs(exact) * Fraction(2) ** -52
    small = torch.full((1000,), 0.1, dtype=torch.float64)
    error = Fraction(exact_sum.total(summed([small])).item()) - 1000 * Fraction(0.1)
    assert abs(error) <= 1000 * Fraction(2) ** -60 + Fraction(2) ** -46


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays(special):
    terms = torch.tensor([1.0, special, 2.0], dtype=torch.float64)
    assert str(exact_sum.total(summed([terms])).item()) == str(special)
    assert exact_sum.total(summed([])).item() == 0.0

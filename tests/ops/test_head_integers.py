"""The classifier's step with rows of integers: a step of FP32 rows, then a new encoding of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subulp.numerics import FP32, int_rows, random_bits
from subulp.numerics.random_bits import RandomAddress
from subulp.ops.head import HeadJob, cpu, reference, tiles
from subulp.ops.head import triton as triton_head
from subulp.ops.rows import encode_rows
from subulp.ops.sgd import cpu as sgd_cpu
from subulp.ops.sgd import reference as sgd_reference

from .head_jobs import D, L, job
from .support import environment, interpreted, isas, threads

FORMATS = [int_rows.INT8, int_rows.INT4, int_rows.INT2]
CHANGES = [{}, {"weight_decay": 0.3}, {"dropout": 0.25}, {"rounding": "nearest", "gain": 1.0}]
NATIVE = [*isas()]
NONE = torch.zeros(0, dtype=torch.int64)


def copy(j: HeadJob) -> HeadJob:
    tensors = {n: getattr(j, n) for n in ("rows", "remainder", "grad_x", "loss")}
    return replace(j, **{n: t if t is None else t.clone() for n, t in tensors.items()})


def decoded(j: HeadJob) -> torch.Tensor:
    return int_rows.decode(int_rows.from_bytes(j.rows, j.format.bits, j.dim))


def same(a: HeadJob, b: HeadJob) -> None:
    for name in ("rows", "remainder", "grad_x", "loss"):
        x, y = getattr(a, name), getattr(b, name)
        assert x is None or torch.equal(
            x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)
        ), name


def dyadic(j: HeadJob) -> HeadJob:
    """One instance of two powers of two: no sum depends on its order."""
    j.x.zero_()[0, [1, j.dim - 2]] = torch.tensor([1.0, -0.5])
    j.grad_x.zero_()
    return j


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("dim", [D, 21])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_step_is_that_of_fp32_rows_and_one_encoding(fmt, dim, changes, backend):
    j = job(fmt, dim=dim, **changes)
    wide = replace(copy(j), rows=decoded(j), format=FP32)
    backend.run(wide)
    backend.run(j)
    drawn = None
    if j.rounding == "stochastic":
        drawn = random_bits.draw((L, dim), seed=5, stream=0, step=3, offset=11 * dim)
    expected = int_rows.encode(wide.rows, fmt.bits, j.rounding, random=drawn)
    assert torch.equal(j.rows, int_rows.to_bytes(expected))
    assert torch.equal(j.grad_x, wide.grad_x)
    assert torch.equal(j.loss, wide.loss)


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("precise", [0, 40])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_kernels_round_as_the_reference(fmt, precise, changes, isa):
    """The same products, because the tiles are the same: then every bit must be."""
    first = job(fmt, dim=21, precise=precise, **changes)
    second = copy(first)
    with environment(SUBULP_BACKEND="reference"):
        tiles.run(first, 16, sgd_reference.run)
    with environment(SUBULP_BACKEND="cpu", SUBULP_ISA=isa):
        tiles.run(second, 16, sgd_cpu.run)
    same(first, second)


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("bits", int_rows.WIDTHS)
@pytest.mark.parametrize("dim", [1, 3, 16, 33])
def test_rows_are_rounded_with_the_bits_of_their_places(dim, bits, isa, monkeypatch):
    """Rows over many binades, constant ones, and others that cannot be represented."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(60, dim, generator=generator)
    x *= (20 * torch.randn(60, 1, generator=generator)).exp2()
    x[1::7] = 0.3
    x[2::13] *= 2.0**-140
    x[3, 0], x[4, -1] = torch.inf, torch.nan
    address = RandomAddress(seed=2**32 - 1, stream=3, step=4, offset=2**33 + 5)
    drawn = random_bits.draw(x.shape, seed=2**32 - 1, stream=3, step=4, offset=2**33 + 5)
    rows = int_rows.encode(x, bits, "stochastic", random=drawn)
    expected = int_rows.to_bytes(rows)
    with environment(SUBULP_BACKEND="cpu", SUBULP_ISA=isa):
        got = encode_rows(x, torch.empty_like(expected), bits, address)
    assert torch.equal(got, expected)
    # However plain PyTorch cuts the rows.
    monkeypatch.setattr("subulp.ops.rows._SLICE", 7 * dim)
    with environment(SUBULP_BACKEND="reference"):
        got = encode_rows(x, torch.empty_like(expected), bits, address)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("precise", [0, 40])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_tiles_do_not_show(fmt, precise, dropout):
    base = dyadic(job(fmt, batch=1, precise=precise, dropout=dropout, gain=1.0))
    results = []
    for size in (1, 7, 16, L, 1000):
        j = copy(base)
        tiles.run(j, size, sgd_cpu.run)
        results.append(j)
    for j in results[1:]:
        assert torch.equal(decoded(j), decoded(results[0]))
        assert precise == 0 or torch.equal(j.remainder, results[0].remainder)


def test_threads_do_not_show():
    base = dyadic(job(int_rows.INT4, labels=3000, dim=64, batch=1, gain=1.0))
    results = []
    for count in (1, 2, 3):
        with threads(count):
            j = copy(base)
            cpu.run(j)
            results.append(decoded(j))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_small_updates_arrive_on_average(fmt, rounding):
    """A tenth of the distance of two integers: on average it counts, or it is all lost."""
    count, top = 20_000, 2**fmt.bits - 1
    values = torch.tensor([0.0, top, 1.0]).repeat(count, 1)
    j = job(fmt, labels=count, dim=3, batch=1, rounding=rounding, gain=1.0)
    x = torch.tensor([[0.0, 0.0, 1.0]])
    lr = 0.1 / torch.sigmoid(torch.tensor(1.0)).item()
    rows = int_rows.to_bytes(int_rows.encode(values, fmt.bits))
    j = replace(j, rows=rows, x=x, grad_x=torch.zeros(1, 3), lr=lr, loss=None)
    j = replace(j, positive_instances=NONE, positive_labels=NONE)
    cpu.run(j)
    new = decoded(j)
    assert torch.equal(new[:, :2], values[:, :2])
    moved = float(1.0 - new[:, 2].double().mean())
    # A draw's deviation is 0.3: that of the mean of 20,000 is 0.002.
    assert moved == pytest.approx(0.1, abs=0.01) if rounding == "stochastic" else moved == 0.0


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_constant_row_stays_exact_where_it_stays_constant(fmt):
    j = job(fmt, labels=9, batch=1, weight_decay=0.5, lr=0.5)
    values = torch.full((9, D), 0.3)
    rows = int_rows.to_bytes(int_rows.encode(values, fmt.bits))
    j = replace(j, rows=rows, x=torch.zeros(1, D), grad_x=torch.zeros(1, D))
    j = replace(j, positive_instances=NONE, positive_labels=NONE)
    cpu.run(j)
    assert torch.equal(decoded(j), values - values * 0.5 * 0.5)
    # From there it may learn.
    cpu.run(replace(j, x=torch.randn(1, D)))
    assert (decoded(j).amax(1) > decoded(j).amin(1)).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_remainder_is_what_the_integers_leave(fmt):
    j = job(fmt, precise=L, dropout=0.2)
    wide = replace(copy(j), rows=decoded(j) + j.remainder.float(), format=FP32, remainder=None)
    # Products see the rows without the remainder: take their gradient from those.
    step = replace(copy(j), rows=decoded(j), format=FP32, remainder=None)
    reference.run(step)
    moved = step.rows - decoded(j)
    reference.run(j)
    error = (decoded(j) + j.remainder.float() - (wide.rows + moved)).abs()
    # BF16: half an ulp of what is left, at most half the distance of two integers.
    scale = int_rows.from_bytes(j.rows, fmt.bits, D).scale
    assert (error <= 0.5 * scale[:, None] * 2.0**-8 + 1e-6).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_without_training_nothing_moves(fmt):
    j = job(fmt, train=False, dropout=0.5)
    before = copy(j)
    cpu.run(j)
    assert torch.equal(j.rows, before.rows)
    assert torch.equal(j.grad_x, before.grad_x)


@interpreted
@pytest.mark.parametrize("precise", [0, 30])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("changes", [*CHANGES[:3], {"train": False}], ids=str)
def test_on_a_gpu_it_is_the_reference(fmt, precise, changes):
    options = {"dim": 21, "labels": 30, "batch": 1, "precise": precise and 12, "gain": 1.0}
    first = dyadic(job(fmt, **options | changes))
    second = copy(first)
    reference.run(first)
    with environment(SUBULP_BACKEND="triton"):
        triton_head.run(second)
    same(first, second)

"""The classifier's step: its definition in double precision, and the same bits whoever computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subulp.numerics import BF16, E4M3, FP16, FP32, format_of, random_bits, round_to
from subulp.numerics.formats import simulated
from subulp.ops.head import HeadJob, RandomAddress, cpu, reference, tiles
from subulp.ops.head import triton as triton_head
from subulp.ops.sgd import cpu as sgd_cpu
from subulp.ops.sgd import reference as sgd_reference

from .head_jobs import D, L, job
from .support import interpreted

FORMATS = [FP32, BF16, FP16, E4M3, simulated(4, 3), simulated(3, 5)]


def copy(j: HeadJob) -> HeadJob:
    tensors = {n: getattr(j, n) for n in ("rows", "remainder", "grad_x", "loss")}
    return replace(j, **{n: t if t is None else t.clone() for n, t in tensors.items()})


def bits(t):
    """A tensor's stored bits."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]
    return t.view(word)


def same(a: HeadJob, b: HeadJob) -> None:
    for name in ("rows", "remainder", "grad_x", "loss"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        assert x is None or torch.equal(bits(x), bits(y)), name


def exact(j: HeadJob, dtype=torch.float64):
    """The definition in one piece: loss, gradient of x, and weights before rounding."""
    w = (j.rows.float() * j.scale).to(dtype)
    stored = w.clone()
    if j.remainder is not None:
        stored[: j.precise] += j.remainder.to(dtype)
    x = j.x.to(dtype)
    z = w @ x.t()
    y = torch.zeros_like(z)
    y[j.positive_labels, j.positive_instances] = 1
    loss = torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="sum")
    g = (z.sigmoid() - y) * j.gain
    new = stored - j.lr * (g @ x + j.weight_decay * stored)
    return loss, j.grad_x.to(dtype) + g.t() @ w, new


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("precise", [0, 40, L])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"weight_decay": 0.3, "scale": 0.125}, {"rounding": "nearest", "gain": 1.0}],
    ids=str,
)
def test_equals_the_definition(fmt, precise, changes, backend):
    j = job(fmt, precise=precise, **changes)
    loss, grad_x, new = exact(j)
    naive_loss, naive_grad, naive_new = exact(j, torch.float32)
    backend.run(j)
    assert abs(j.loss.sum() - loss) <= abs(naive_loss - loss) + 1e-5 * loss
    assert (j.grad_x - grad_x).abs().max() <= (naive_grad - grad_x).abs().max() + 1e-6
    wide = j.rows.float() * j.scale
    # What is stored is a neighbour of the exact value (nearest: the closer one).
    ulp = fmt.ulp((new / j.scale).float()) * j.scale
    room = (naive_new - new).abs().max() + 1e-6
    share = 0.5 if changes.get("rounding") == "nearest" else 1.0
    assert ((wide - new).abs() <= share * ulp + room)[precise:].all()
    if precise:
        assert ((wide - new).abs() <= 0.5 * ulp + room)[:precise].all()
        precisely = wide[:precise] + j.remainder.float()
        # The remainder is BF16: half an ulp of a half ulp.
        assert ((precisely - new[:precise]).abs() <= ulp[:precise] * 2**-9 + room).all()


@pytest.mark.parametrize("precise", [0, 40])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.3}, {"scale": 0.25}], ids=str)
def test_the_kernels_round_as_the_reference(fmt, precise, rounding, changes):
    """The same products, because the tiles are the same: then every bit must be."""
    first = job(fmt, precise=precise, rounding=rounding, **changes)
    second = copy(first)
    tiles.run(first, 16, sgd_reference.run)
    tiles.run(second, 16, sgd_cpu.run)
    same(first, second)


@pytest.mark.parametrize("fmt", [E4M3, BF16], ids=str)
def test_a_weight_is_rounded_with_the_bits_of_its_place(fmt):
    j = job(fmt, batch=1, gain=1.0)
    before, x = j.rows.float(), j.x
    z = before @ x.t()
    y = torch.zeros_like(z)
    y[j.positive_labels, j.positive_instances] = 1
    reference.run(j)
    wide = before - ((z.sigmoid() - y) @ x) * 0.25
    drawn = random_bits.draw(
        (L, D), seed=5, stream=0, step=3, offset=11 * D, width=fmt.random_width
    )
    assert torch.equal(j.rows.float(), round_to(wide, fmt, "stochastic", bits=drawn))


@pytest.mark.parametrize("fmt", [E4M3, FP16], ids=str)
@pytest.mark.parametrize("precise", [0, 40])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_tiles_do_not_show(fmt, precise, dropout):
    """With one instance of two dyadic numbers, a logit is a sum of two: it is rounded once."""
    base = job(fmt, batch=1, precise=precise, dropout=dropout, gain=1.0)
    base.x.zero_()[0, [1, D - 2]] = torch.tensor([1.0, -0.5])
    base.grad_x.zero_()
    results = []
    for size in (1, 7, 16, L, 1000):
        j = copy(base)
        tiles.run(j, size, sgd_cpu.run)
        results.append(j)
    for j in results[1:]:
        # A product of zeros may have either sign, as the matrix product likes.
        assert torch.equal(j.rows.float(), results[0].rows.float())
        assert precise == 0 or torch.equal(j.remainder, results[0].remainder)
        torch.testing.assert_close(j.grad_x, results[0].grad_x, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dim", [24, 21], ids=["aligned", "ragged"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.3, "scale": 0.25}], ids=str)
def test_the_fused_triton_kernel_is_the_reference(fmt, dim, rounding, changes):
    """Products that are rounded once, so that every stored bit must be the same."""
    first = job(fmt, dim=dim, labels=70, batch=1, gain=1.0, rounding=rounding, **changes)
    first.x.zero_()[0, [1, dim - 2]] = torch.tensor([1.0, -0.5])
    second = copy(first)
    reference.run(first)
    triton_head.run(second)
    assert torch.equal(first.rows.float(), second.rows.float())
    torch.testing.assert_close(first.grad_x, second.grad_x, rtol=1e-5, atol=1e-6)
    assert torch.equal(first.loss, second.loss)


@interpreted
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"precise": 30},
        {"dropout": 0.3},
        {"precise": 70, "dropout": 0.5, "weight_decay": 0.3, "scale": 0.25},
    ],
    ids=str,
)
def test_remainders_and_dropout_are_in_the_fused_triton_kernel(fmt, changes):
    first = job(fmt, labels=70, batch=1, gain=1.0, **changes)
    first.x.zero_()[0, [1, D - 2]] = torch.tensor([1.0, -0.5])
    second = copy(first)
    reference.run(first)
    triton_head.run(second)
    assert torch.equal(first.rows.float(), second.rows.float())
    assert first.remainder is None or torch.equal(first.remainder, second.remainder)
    torch.testing.assert_close(first.grad_x, second.grad_x, rtol=1e-5, atol=1e-6)
    assert torch.equal(first.loss, second.loss)


@interpreted
@pytest.mark.parametrize(("dim", "offset"), [(20, 40), (24, 4)])
def test_rows_whose_random_bits_begin_inside_a_counter(dim, offset):
    """A counter serves eight elements of 16 bits: four of them are not aligned."""
    first = job(BF16, dim=dim, labels=10, batch=1, random=RandomAddress(5, 0, 3, offset))
    first.x.zero_()[0, [1, dim - 2]] = torch.tensor([1.0, -0.5])
    second = copy(first)
    reference.run(first)
    triton_head.run(second)
    assert torch.equal(first.rows.float(), second.rows.float())


@interpreted
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.2}, {"precise": 30}], ids=str)
def test_triton_sums_over_a_batch(changes):
    """More instances than a block of the kernel, and what has no fused kernel."""
    first = job(FP32, dim=21, labels=70, batch=40, **changes)
    second = copy(first)
    reference.run(first)
    triton_head.run(second)
    torch.testing.assert_close(first.rows, second.rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.grad_x, second.grad_x, rtol=1e-5, atol=1e-6)


def test_threads_do_not_show():
    base = job(E4M3, labels=3000, dim=64, batch=1, gain=1.0)
    base.x.zero_()[0, [1, 40]] = torch.tensor([1.0, -0.5])
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        j = copy(base)
        cpu.run(j)
        results.append(j)
    torch.set_num_threads(before)
    for j in results[1:]:
        assert torch.equal(j.rows.float(), results[0].rows.float())


def test_dropout_leaves_the_same_weights_out_of_all_three_products():
    j = job(FP32, dropout=0.25, weight_decay=0.0)
    before = j.rows.clone()
    drawn = random_bits.draw(
        (L, D), seed=5, stream=0, step=3, slot=tiles.DROPOUT_SLOT, offset=11 * D
    )
    kept = (drawn >= 2**30).double() / 0.75
    w = before.double() * kept
    x = j.x.double()
    z = w @ x.t()
    y = torch.zeros_like(z)
    y[j.positive_labels, j.positive_instances] = 1
    g = (z.sigmoid() - y) * j.gain
    expected_grad = j.grad_x + g.t() @ w
    reference.run(j)
    torch.testing.assert_close(j.grad_x.double(), expected_grad, rtol=1e-5, atol=1e-5)
    new = before - j.lr * (g @ x) * kept
    torch.testing.assert_close(j.rows.double(), new, rtol=1e-5, atol=1e-5)
    dropped = kept == 0
    assert 0.15 < dropped.double().mean() < 0.35
    assert torch.equal(j.rows[dropped], before[dropped])


def test_without_training_nothing_moves():
    j = job(E4M3, train=False, dropout=0.5)
    before = copy(j)
    loss, _, _ = exact(j)
    cpu.run(j)
    assert torch.equal(bits(j.rows), bits(before.rows))
    assert torch.equal(j.grad_x, before.grad_x)
    assert float(j.loss.sum()) == pytest.approx(float(loss), rel=1e-6)


def test_no_instances_decay_only():
    j = job(FP32, batch=1, weight_decay=0.5)
    j = replace(
        j,
        x=torch.zeros(0, D),
        grad_x=torch.zeros(0, D),
        positive_instances=torch.zeros(0, dtype=torch.int64),
        positive_labels=torch.zeros(0, dtype=torch.int64),
    )
    before = j.rows.clone()
    cpu.run(j)
    torch.testing.assert_close(j.rows, before - 0.25 * 0.5 * before)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_rounding_is_unbiased_below_the_smallest_normal(rounding):
    """Updates of a hundredth of E4M3's smallest step: on average they count, or are all lost."""
    count = 20_000
    rows = torch.full((count, 1), 2.0**-7, dtype=torch.float8_e4m3fn)
    j = job(E4M3, labels=count, dim=1, batch=1, rounding=rounding, gain=1.0)
    step = 2.0**-9 / 100
    x = torch.ones(1, 1)
    g = torch.sigmoid(torch.tensor(2.0**-7))
    none = torch.zeros(0, dtype=torch.int64)
    j = replace(j, rows=rows, x=x, grad_x=torch.zeros(1, 1), lr=float(step / g))
    j = replace(j, positive_instances=none, positive_labels=none, loss=None)
    cpu.run(j)
    moved = float((2.0**-7 - rows.float()).double().mean())
    if rounding == "nearest":
        assert moved == 0.0
    else:
        # The mean of 20,000 draws with probability 1/100 has a deviation of 7 % of itself.
        assert moved == pytest.approx(step, rel=0.35)
        assert set(rows.float().unique().tolist()) == {2.0**-7, 3 * 2.0**-9}


def test_formats_are_those_of_the_storage():
    for fmt in FORMATS[:4]:
        assert format_of(job(fmt).rows.dtype) == fmt

"""Products in FP8 and BF16: their definition in double precision, and units against tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subulp.numerics import BF16, E4M3, round_to, simulated
from subulp.ops import bf16_product
from subulp.ops.head import HeadJob, cpu, fp8, reference, tiles
from subulp.ops.head import triton as triton_head
from subulp.ops.sgd import cpu as sgd_cpu

from .head_jobs import D, L, job
from .support import environment, interpreted

CPU = torch.device("cpu")


def fp8_job(fmt=E4M3, *, products="fp8", **options) -> HeadJob:
    return replace(job(fmt, **options), products=products)


def copy(j: HeadJob) -> HeadJob:
    tensors = {n: getattr(j, n) for n in ("rows", "remainder", "grad_x", "loss")}
    return replace(j, **{n: t if t is None else t.clone() for n, t in tensors.items()})


def narrowed(t, fmt):
    return round_to(t.float(), fmt).to(t.dtype)


def definition(j: HeadJob, dtype=torch.float64):
    """All operands narrow, all sums in ``dtype``: loss, gradient of x, weights before rounding."""
    w = (j.rows.float() * j.scale).to(dtype)
    stored = w.clone()
    if j.remainder is not None:
        stored[: j.precise] += j.remainder.to(dtype)
    inputs = narrowed(j.x, {"fp8": E4M3, "bf16": BF16}[j.products])
    z = narrowed(w @ inputs.to(dtype).t(), BF16)
    y = torch.zeros_like(z)
    y[j.positive_labels, j.positive_instances] = 1
    loss = torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="sum")
    g = narrowed((z.sigmoid() - y) * j.gain, BF16)
    new = stored - j.lr * (g @ narrowed(j.x, BF16).to(dtype) + j.weight_decay * stored)
    return loss, j.grad_x.to(dtype) + g.t() @ w, new


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("precise", [0, 40])
@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.3, "scale": 0.125}], ids=str)
@pytest.mark.parametrize(
    ("products", "fmt"),
    [("fp8", E4M3), ("bf16", E4M3), ("bf16", BF16), ("bf16", simulated(4, 2))],
    ids=str,
)
def test_equals_the_definition(products, fmt, backend, precise, changes):
    """At most as far from it as the same operands with all sums in FP32, and a tolerance."""
    j = fp8_job(fmt, products=products, precise=precise, rounding="nearest", **changes)
    loss, grad_x, new = definition(j)
    naive_loss, naive_grad, naive_new = definition(j, torch.float32)
    backend.run(j)
    assert abs(j.loss.sum() - loss) <= abs(naive_loss - loss) + 1e-6 * loss
    assert (j.grad_x - grad_x).abs().max() <= (naive_grad - grad_x).abs().max() + 1e-6
    wide = j.rows.float() * j.scale
    ulp = fmt.ulp((new / j.scale).float()) * j.scale
    room = (naive_new - new).abs().max() + 1e-6
    assert ((wide - new).abs() <= 0.5 * ulp + room).all()


def test_it_is_not_the_product_in_fp32():
    """Logits are BF16 numbers of E4M3 operands: what FP32 gives is visibly something else."""
    narrow, wide = fp8_job(), job(E4M3)
    reference.run(narrow)
    reference.run(wide)
    relative = (narrow.grad_x - wide.grad_x).norm() / wide.grad_x.norm()
    assert 1e-4 < relative < 0.1
    assert abs(float((narrow.loss - wide.loss).sum())) > 0


def test_large_inputs_saturate():
    x = torch.tensor([[1e30, -500.0, 464.0, 2.0**-10, 2.0**-9, 17.0, 19.0]])
    expected = [448.0, -448.0, 448.0, 0.0, 2.0**-9, 16.0, 20.0]
    assert fp8.inputs(x).float().tolist() == [expected]


@pytest.mark.parametrize("labels", [1, 16, 53])
@pytest.mark.parametrize("batch", [0, 1, 16, 19])
@pytest.mark.parametrize("dim", [5, 32, 45])
def test_fp8_units_give_the_rounded_fp32_product(labels, batch, dim):
    """torch's own FP8 product, which a CPU has too: operands whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(labels + batch + dim)
    rows = (torch.randn(labels, dim, generator=generator) / 8).to(torch.float8_e4m3fn)
    x = fp8.inputs(torch.randn(batch, dim, generator=generator))
    for scale in (1.0, 0.25):
        expected = (rows.double() * scale @ x.double().t()).bfloat16()
        found = fp8.unit_logits(rows, x, fp8.scales(scale, CPU))
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)


@interpreted
@pytest.mark.parametrize("batch", [0, 1, 16, 19])
@pytest.mark.parametrize("dim", [5, 32, 45])
def test_inputs_for_units_are_the_same_with_zeros_around_them(batch, dim):
    x = torch.randn(batch, dim, generator=torch.Generator().manual_seed(batch)) * 300
    expected = fp8.unit_inputs(x)
    assert expected.shape == (max(16, -(-batch // 16) * 16), -(-dim // 16) * 16)
    assert torch.equal(expected[:batch, :dim].float(), fp8.inputs(x).float())
    assert not expected[batch:].float().any()
    assert not expected[:, dim:].float().any()
    with environment(SUBULP_BACKEND="triton"):
        found = fp8.unit_inputs(x), fp8.inputs(x.t().contiguous().t())
    assert torch.equal(expected.view(torch.uint8), found[0].view(torch.uint8))
    assert torch.equal(fp8.inputs(x).view(torch.uint8), found[1].view(torch.uint8))


@interpreted
@pytest.mark.parametrize("batch", [1, 7, 16])
@pytest.mark.parametrize("dim", [24, 32])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precise": 40},
        {"scale": 0.25, "weight_decay": 0.1},
        {"train": False},
        {"before": 5, "after": 3},
        {"dropout": 0.25},
    ],
    ids=str,
)
def test_a_step_on_fp8_units_is_that_on_tiles(changes, dim, batch, monkeypatch):
    """The units' part of the step, through torch's FP8 product on this device.

    Units of BF16 take what they do not: ragged rows, and dropout.
    """
    first = fp8_job(dim=dim, batch=batch, rounding="nearest", **changes)
    # Sums that are exact in any order: of the same inputs, and gradients of powers of two.
    first.x.zero_()[:, [1, dim - 2]] = torch.tensor([1.0, -0.5])
    second = copy(first)
    tiles.run(first, 16, sgd_cpu.run)
    asked = []
    monkeypatch.setattr(fp8, "units_at", lambda device: not asked.append(device))
    triton_head.run(second)
    assert bool(asked) == (dim % 16 == 0)
    assert torch.equal(first.loss, second.loss)
    torch.testing.assert_close(first.grad_x, second.grad_x, rtol=1e-5, atol=1e-6)
    far = (first.rows.float() != second.rows.float()).float().mean()
    assert far <= (0.0 if batch == 1 else 0.01)


@pytest.mark.parametrize("products", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precise": 40},
        {"scale": 0.25, "weight_decay": 0.1},
        {"train": False},
        {"train": False, "gradient": True, "dropout": 0.25},
    ],
    ids=str,
)
def test_units_of_bf16_multiply_what_tiles_do(products, changes, monkeypatch):
    """Rows as they are stored and FP32 tiles of them: the same operands. Inputs of two powers of
    two, and a gradient of one instance: no sum depends on its order but that of ``grad_x``.
    """
    first = fp8_job(products=products, batch=1, gain=1.0, **changes)
    first.x.zero_()[0, [1, D - 2]] = torch.tensor([1.0, -0.5])
    second = copy(first)
    # The definition: FP32 products.
    with environment(SUBULP_BACKEND="reference"):
        tiles.run(first, 16, sgd_cpu.run)
    asked = []
    monkeypatch.setattr(bf16_product, "units_at", lambda device: not asked.append(device))
    tiles.run(second, 16, sgd_cpu.run)
    assert bool(asked) == (products == "fp8")
    assert torch.equal(first.rows.float(), second.rows.float())
    assert torch.equal(first.loss, second.loss)
    torch.testing.assert_close(first.grad_x, second.grad_x, rtol=1e-5, atol=1e-6)


def test_dropout_rounds_what_bf16_multiplies():
    """Weights scaled up by dropout are rounded: the same in both products with them."""
    j = fp8_job(BF16, products="bf16", dropout=0.25, train=True, rounding="nearest", lr=0.0)
    before = j.grad_x.clone()
    mask = j.random.draw(j.rows.shape, CPU, slot=tiles.DROPOUT_SLOT) >= round(0.25 * 2**32)
    w = narrowed(j.rows.float() * mask / 0.75, BF16).double()
    z = narrowed(w @ narrowed(j.x, BF16).double().t(), BF16)
    y = torch.zeros_like(z)
    y[j.positive_labels, j.positive_instances] = 1
    g = narrowed((z.sigmoid() - y) * j.gain, BF16)
    cpu.run(j)
    torch.testing.assert_close(j.grad_x.double(), before + g.t() @ w, rtol=1e-4, atol=1e-5)


def test_dropout_is_not_for_units_of_fp8(monkeypatch):
    """Weights that are scaled up are no E4M3 numbers: they are rounded to BF16, units or not."""
    first = fp8_job(dropout=0.25, train=True, rounding="nearest", lr=0.0)
    second, before = copy(first), first.grad_x.clone()
    mask = first.random.draw(first.rows.shape, CPU, slot=tiles.DROPOUT_SLOT) >= round(0.25 * 2**32)
    w = narrowed(first.rows.float() * mask / 0.75, BF16).double()
    z = narrowed(w @ narrowed(first.x, E4M3).double().t(), BF16)
    y = torch.zeros_like(z)
    y[first.positive_labels, first.positive_instances] = 1
    g = narrowed((z.sigmoid() - y) * first.gain, BF16)
    tiles.run(first, 16, sgd_cpu.run)
    torch.testing.assert_close(first.grad_x.double(), before + g.t() @ w, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(bf16_product, "units_at", lambda device: True)
    tiles.run(second, 16, sgd_cpu.run)
    assert torch.equal(first.rows.float(), second.rows.float())
    assert torch.equal(first.grad_x, second.grad_x)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_tiles_do_not_show(dropout):
    """One instance: every product but the logits', whose sums are exact, has one term."""
    base = fp8_job(batch=1, gain=1.0, dropout=dropout)
    base.x.zero_()[0, [1, D - 2]] = torch.tensor([1.0, -0.5])
    base.grad_x.zero_()
    results = []
    for size in (1, 7, 16, L, 1000):
        j = copy(base)
        tiles.run(j, size, sgd_cpu.run)
        results.append(j)
    for j in results[1:]:
        assert torch.equal(j.rows.float(), results[0].rows.float())
        torch.testing.assert_close(j.grad_x, results[0].grad_x, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("dim", [24, 21], ids=["aligned", "ragged"])
def test_the_fused_triton_kernel_takes_bf16_operands(dim):
    first = fp8_job(dim=dim, labels=70, batch=1, gain=1.0)
    first.x.zero_()[0, [1, dim - 2]] = torch.tensor([1.0 + 2.0**-10, -0.5])
    second = copy(first)
    reference.run(first)
    triton_head.run(second)
    assert torch.equal(first.rows.float(), second.rows.float())
    torch.testing.assert_close(first.grad_x, second.grad_x, rtol=1e-5, atol=1e-6)


def test_units_are_where_the_triton_kernels_and_sm_89_are(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert not fp8.units_at(CPU)
    for capability, expected in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((7, 9), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert fp8.units_at(cuda) == expected
    monkeypatch.setenv("SUBULP_BACKEND", "reference")
    assert not fp8.units_at(cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(70, 21, 5), (512, 768, 128), (1000, 784, 130)], ids=str)
def test_gpu(shape):
    """On a GPU with FP8 units: within the naive error of the definition, as on a CPU."""
    if not fp8.units_at(torch.device("cuda")):
        pytest.skip("FP8 units begin with sm_89")
    labels, dim, batch = shape
    j = fp8_job(labels=labels, dim=dim, batch=batch, rounding="nearest")
    loss, grad_x, new = definition(j)
    naive_loss, naive_grad, naive_new = definition(j, torch.float32)
    moved = {
        name: value.cuda() for name, value in vars(j).items() if isinstance(value, torch.Tensor)
    }
    on_gpu = replace(j, **moved)
    triton_head.run(on_gpu)
    # A logit at the middle of two BF16 numbers may go either way.
    flips = 2**-8 * grad_x.abs().max()
    assert abs(on_gpu.loss.cpu().sum() - loss) <= abs(naive_loss - loss) + 1e-4 * loss
    error = (on_gpu.grad_x.cpu() - grad_x).abs().max()
    assert error <= (naive_grad - grad_x).abs().max() + flips
    ulp = E4M3.ulp(new.float())
    room = (naive_new - new).abs().max() + 2**-8 * (new - j.rows.double()).abs().max()
    assert ((on_gpu.rows.float().cpu() - new).abs() <= 0.5 * ulp + room).all()

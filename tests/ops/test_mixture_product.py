"""FP8 products by units, whose scalings a CPU has too but for tiles, against decoded values."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from subulp import nn
from subulp.numerics import mixture
from subulp.numerics.mixture import RECIPES, THREE_WAY, TWO_WAY
from subulp.numerics.partition import PARTITIONS
from subulp.ops import bf16_product
from subulp.ops.bf16_product import bf16_mm
from subulp.ops.head import fp8
from subulp.ops.mixture import product as product_module
from subulp.ops.mixture.operand import Operand, ProductJob
from subulp.ops.mixture.product import product

from .support import interpreted

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CUDA = torch.device("cuda")


def operand(rows, k, seed, kind="e4m3", partition="tensor", transposed=False) -> Operand:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    if kind == "e5m2":
        # Values that E4M3 flushes to zero.
        x = x.sign() * (1 + x.abs())
        x[:, ::2] *= 2.0**-20
    if kind == "bf16":
        x[0, 0] = torch.inf
    found, summary = mixture.encode(x.t() if transposed else x, THREE_WAY, partition)
    assert summary.sole == kind
    return Operand(found, summary, transposed)


def to_gpu(found: Operand) -> Operand:
    names = "codes", "types", "mantissa", "exponents", "wide"
    there = {name: getattr(found.mixture, name).cuda() for name in names}
    return replace(found, mixture=replace(found.mixture, **there))


@interpreted
@pytest.mark.parametrize("units", [False, True], ids=["decoded", "units"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    ("partition", "transposed"),
    [
        ("tensor", (False, True)),
        ("channel", (False, False)),
        ("subchannel-32", (False, False)),
        ((64, 64), (True, False)),
        ((64, 64), (True, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(144, 144, 48), (17, 140, 33)], ids=str)
def test_a_kernel_multiplies_mixtures_as_they_are_stored(
    shape, partition, transposed, dtype, units
):
    """Some rows in E4M3 alone, for the units; others with blocks of all types."""
    triton_product = importlib.import_module("subulp.ops.mixture.triton_product")
    m, k, n = shape
    generator = torch.Generator().manual_seed(0)
    factors = []
    for rows, turned in ((m, transposed[0]), (n, transposed[1])):
        x = torch.randn(rows, k, generator=generator)
        if rows == m and partition != "tensor":
            # The last rows, which are not in the first program's part.
            x[-9:, :32] *= torch.logspace(-4, 3, 32)
            x[-1, :32] *= torch.logspace(-4, 0.5, 32)
        found, summary = mixture.encode((x.t() if turned else x).to(dtype), THREE_WAY, partition)
        factors.append(Operand(found, summary, turned))
    a, b = factors
    if m == 144:
        assert a.sole == ("e4m3" if partition == "tensor" else None)
    bias = torch.randn(n, generator=generator)
    job = ProductJob(a, b, dtype, bias, units=units)
    with np.errstate(all="ignore"):
        found = triton_product.multiply(job)
    assert found.dtype == dtype
    left, right = a.values(), b.values()
    size = left.double().abs() @ right.double().abs().t()
    exact = left.double() @ right.double().t() + bias.double()
    of_result = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}[dtype]
    error = (found.double() - exact).abs()
    # Operands are rounded too where they are decoded.
    assert bool((error <= of_result * (exact.abs() + 2 * size) + 1e-6 * size).all())
    on_units = torch.zeros(m, dtype=torch.bool)
    if units and job.is_aligned:
        # Rows of programs all of whose blocks are in E4M3.
        on_units[: 128 if a.sole is None else m] = True
    exactly = error[on_units] <= of_result * exact[on_units].abs() + 1e-6 * size[on_units]
    assert bool(exactly.all())
    left, right = left.to(dtype).double(), right.to(dtype).double()
    exact = left @ right.t() + bias.double()
    error = (found.double() - exact).abs()[~on_units]
    assert bool((error <= of_result * exact[~on_units].abs() + 1e-6 * size[~on_units]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("partition", ["tensor", "channel", "subchannel-128", "block-128x128"])
@pytest.mark.parametrize("shape", [(256, 512, 128), (40, 300, 33)], ids=str)
def test_gpu_products_are_near_exact_ones(shape, partition, dtype):
    m, k, n = shape
    a, b = operand(m, k, 0, partition=partition), operand(n, k, 1, partition=partition)
    native = fp8.units_at(CUDA)
    if any(size % 16 for size in shape):
        # Units read whole vectors.
        native = False
    found = product(to_gpu(a), to_gpu(b), dtype).cpu()
    exact = a.values().double() @ b.values().double().t()
    size = a.values().abs().double() @ b.values().abs().double().t()
    # Hopper adds products with 13 bits of fraction below the largest, 32 at a time. Decoded values
    # are rounded to BF16 before they are multiplied, products after.
    rounded = (2.0**-8 * exact.abs() if native else 2.0**-7 * size) if dtype == BF16 else 0
    assert ((found.double() - exact).abs() <= 2.0**-13 * size + rounded).all()


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", RECIPES)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("native", [False, True], ids=["decoded", "native"])
def test_gpu_agrees_with_cpu(monkeypatch, native, granularity, partition, dtype):
    """The same decisions; products as far apart as roundings of the dtype allow."""
    if not native:
        monkeypatch.setattr(fp8, "units_at", lambda device: False)
    torch.manual_seed(0)
    layer = nn.MoRLinear(256, 128, mor=nn.MoR(granularity, partition)).to(dtype)
    x = torch.randn(96, 256, dtype=dtype, requires_grad=True)
    grad = torch.randn(96, 128, dtype=dtype)
    layer(x).backward(grad)
    mix, grads = dict(layer.mix), [x.grad, layer.weight.grad, layer.bias.grad]
    layer.zero_grad()
    y = layer(x.detach())
    there = nn.MoRLinear(256, 128, mor=layer.mor).to("cuda", dtype)
    there.load_state_dict(layer.state_dict())
    on_gpu = x.detach().cuda().requires_grad_()
    z = there(on_gpu)
    z.backward(grad.cuda())
    assert {k: v.elements for k, v in there.mix.items()} == {k: v.elements for k, v in mix.items()}
    # FP8 units add up less exactly than those of FP32.
    of_fp32 = 2.0**-10 if native else 1e-5
    tolerance = 2.0**-6 if dtype == BF16 else of_fp32
    for a, b in zip((z, on_gpu.grad, there.weight.grad), (y, *grads), strict=False):
        assert (a.cpu() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16], ids=str)
@pytest.mark.parametrize("group", ["tensor", "channel"])
def test_units_of_bf16_multiply_decoded_values(group, dtype, transposed, monkeypatch):
    """For BF16 activations alone; then nothing is rounded that one mantissa scales, all else is."""
    monkeypatch.setattr(product_module, "TILE_BYTES", 4 * 70 * 16)
    monkeypatch.setattr(bf16_product, "units_at", lambda device: True)
    generator = torch.Generator().manual_seed(0)
    factors = []
    for rows, turned in ((24, transposed[0]), (45, transposed[1])):
        x = torch.randn((70, rows) if turned else (rows, 70), generator=generator)
        encoded, summary = mixture.encode(x, THREE_WAY, "subchannel-32", group=group)
        assert summary.blocks[2] == 0
        factors.append(Operand(encoded, summary, turned))
    a, b = factors
    found = product(a, b, dtype)
    left, right = a.values(), b.values()
    whole = left.double() @ right.double().t()
    if dtype == BF16 and group == "channel":
        left, right = left.bfloat16().float(), right.bfloat16().float()
    exact = left.double() @ right.double().t()
    bound = (left @ right.t() - exact).abs().max() + 2.0**-21 * exact.abs().max()
    if dtype == BF16:
        # The sums are rounded once.
        assert found.dtype == BF16
        assert ((found - exact).abs() <= 2 * bound + 2.0**-8 * exact.abs()).all()
        sums = _sums_before_rounding(monkeypatch, a, b)
        assert torch.equal(found, sums.to(BF16))
        found = sums
    assert (found - exact).abs().max() <= bound
    # The rounding of the operands is more than that.
    assert ((whole - exact).abs().max() > 2 * bound) == (dtype == BF16 and group == "channel")


def _sums_before_rounding(monkeypatch, a, b):
    """What a product that rounds to BF16 rounds: it is given FP32 to write to."""
    wide = []

    def mm(rows, columns, out=None, **options):
        wide.append(torch.empty(rows.shape[0], columns.shape[1]))
        multiplied = bf16_mm(rows, columns, wide[-1], **options)
        return multiplied if out is None else out.copy_(multiplied)

    with monkeypatch.context() as patch:
        patch.setattr(bf16_product, "bf16_mm", mm)
        product(a, b, BF16)
    # Tiles are columns of the result, or what adds up to it.
    return torch.cat(wide, 1) if not b.transposed else _scaled_sum(wide, a, b)


def _scaled_sum(terms, a, b):
    total = torch.zeros(terms[0].shape)
    for term in terms:
        total += term
    if len(terms) == 1:
        return total
    factors = [
        float(1 / o.mixture.mantissa) if o.mixture.mantissa.numel() == 1 else 1.0 for o in (a, b)
    ]
    return total * (factors[0] * factors[1])


def test_wide_blocks_are_rounded_on_units_of_bf16(monkeypatch):
    """A mantissa is no power of two, and wide blocks have none: such operands are rounded."""
    monkeypatch.setattr(bf16_product, "units_at", lambda device: True)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x[:4, :32] *= torch.logspace(-30, 30, 32)
    found, summary = mixture.encode(x, TWO_WAY, "subchannel-32")
    assert summary.sole is None
    a, b = Operand(found, None), operand(16, 64, 1)
    left, right = a.values().bfloat16().float(), b.values()
    exact = left.double() @ right.double().t()
    got = product(a, b, BF16).double()
    sizes = left.double().abs() @ right.double().abs().t()
    assert ((got - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5 * sizes).all()


@pytest.mark.skipif(
    not bf16_product.units_at(torch.device("cpu")), reason="there are no units of BF16"
)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, True)], ids=str)
def test_large_blocks_are_decoded_while_they_are_packed(transposed, recipe, monkeypatch):
    """The bits of decoded factors, without decoding one."""
    generator = torch.Generator().manual_seed(0)
    factors = []
    for rows, turned in ((300, transposed[0]), (161, transposed[1])):
        x = torch.randn((260, rows) if turned else (rows, 260), generator=generator)
        # Blocks of different scales, and one in E5M2 where there are three ways.
        x[128:] *= 2.0**7
        if recipe is THREE_WAY:
            x[:128, :128] = x[:128, :128].sign() * (1 + x[:128, :128].abs())
            x[:128, :128:2] *= 2.0**-20
        encoded, summary = mixture.encode(x.bfloat16(), recipe, "block-128x128")
        assert bool((encoded.types == 1).any()) == (recipe is THREE_WAY)
        assert len(encoded.exponents.unique()) > 1
        factors.append(Operand(encoded, summary, turned))
    (left, of_left), (right, of_right) = map(product_module._in_bf16, factors)
    decoded = [operand.values(BF16) for operand in (left, right)]
    out = torch.empty(300, 161, dtype=BF16)
    expected = bf16_mm(decoded[0], decoded[1].t(), out, out_scale=of_left * of_right)
    # What lies otherwise is decoded from a copy.
    scattered = factors[0].mixture
    strided = torch.stack((scattered.exponents, scattered.exponents), 2)[..., 0]
    elsewhere = replace(factors[0], mixture=replace(scattered, exponents=strided))
    assert torch.equal(product(elsewhere, factors[1], BF16), expected)
    monkeypatch.setattr(Operand, "values", None)
    assert torch.equal(product(*factors, BF16), expected)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("types", lambda t: t + 7, "types .*7"),
        ("types", lambda t: t[:1], r"types .*\(1, 3\)"),
        ("types", torch.Tensor.int, "types .*int32"),
        ("exponents", lambda t: t[:1], r"exponents"),
        ("exponents", torch.Tensor.int, "exponents"),
    ],
)
@pytest.mark.parametrize("second", [False, True])
def test_blocks_that_were_damaged_are_refused(name, change, message, second):
    x = torch.randn(260, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole, summary = mixture.encode(x, TWO_WAY, "block-128x128")
    damaged = replace(whole, **{name: change(getattr(whole, name))})
    factors = [Operand(whole, summary), Operand(damaged, summary)]
    with pytest.raises(ValueError, match=message):
        product(*(factors if second else factors[::-1]), BF16)

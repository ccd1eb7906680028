"""FP8 products by torch._scaled_mm, which a CPU has too, against products of decoded values."""

from __future__ import annotations

import pytest
import torch

from subulp import nn
from subulp.numerics import mixture
from subulp.numerics.mixture import RECIPES, THREE_WAY, TWO_WAY
from subulp.ops.mixture.product import Operand, is_native, product, unit_product

FP32, BF16 = torch.float32, torch.bfloat16


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
    return Operand(found, summary.sole, transposed)


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        *(
            (shape, kinds)
            for shape in ((16, 32, 16), (40, 70, 33))
            for kinds in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))
        ),
        # Five values are too few for E5M2 to be chosen.
        ((1, 5, 1), ("e4m3", "e4m3")),
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, True)], ids=str)
def test_units_and_decoded_values_agree(kinds, shape, transposed):
    """Each at most as far from the exact product as the sum in FP32 is, and a rounding of FP32."""
    m, k, n = shape
    a = operand(m, k, 0, kinds[0], transposed=transposed[0])
    b = operand(n, k, 1, kinds[1], transposed=transposed[1])
    assert is_native(a, b, FP32)
    exact = a.values().double() @ b.values().double().t()
    naive = a.values() @ b.values().t()
    bound = (naive - exact).abs().max() + 2.0**-22 * exact.abs().max()
    for found in (unit_product(a, b, FP32), product(a, b, FP32)):
        assert found.shape == (m, n)
        assert (found - exact).abs().max() <= bound
    # Rounded to BF16 once.
    narrow = unit_product(a, b, BF16)
    assert narrow.dtype == BF16
    assert (narrow.double() - exact).abs().max() <= bound + 2.0**-8 * exact.abs().max()


@pytest.mark.parametrize("shape", [(16, 32, 16), (40, 70, 33)], ids=str)
def test_units_with_a_scale_for_each_row_agree(shape):
    """``torch._scaled_mm`` has these to BF16 alone."""
    m, k, n = shape
    a, b = operand(m, k, 0, partition="channel"), operand(n, k, 1, partition="channel")
    assert is_native(a, b, BF16)
    exact = a.values().double() @ b.values().double().t()
    found = unit_product(a, b, BF16)
    assert found.shape == (m, n)
    bound = (a.values() @ b.values().t() - exact).abs().max() + 2.0**-22 * exact.abs().max()
    assert (found.double() - exact).abs().max() <= bound + 2.0**-8 * exact.abs().max()


def test_what_units_multiply():
    tensor = {kind: operand(32, 64, 0, kind) for kind in ("e4m3", "e5m2", "bf16")}
    assert is_native(tensor["e4m3"], tensor["e5m2"], BF16)
    assert not is_native(tensor["e5m2"], tensor["e5m2"], BF16)
    assert not is_native(tensor["e4m3"], tensor["bf16"], BF16)
    row = operand(32, 64, 0, partition="channel")
    assert is_native(row, row, BF16)
    assert not is_native(row, row, FP32)
    assert not is_native(row, tensor["e4m3"], BF16)
    square = operand(256, 256, 0, partition="block-128x128")
    assert not is_native(square, square, BF16)
    x = torch.cat((torch.randn(1, 64), torch.full((1, 64), torch.inf)))
    found, summary = mixture.encode(x, TWO_WAY, "channel")
    assert summary.sole is None
    assert not is_native(Operand(found, None), row, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", RECIPES)
@pytest.mark.parametrize("partition", ["tensor", "channel", "block-128x128", "subchannel-32"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gpu_agrees_with_cpu(granularity, partition, dtype):
    """The same decisions; products as far apart as roundings of the dtype allow."""
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
    tolerance = 2.0**-6 if dtype == BF16 else 1e-5
    for a, b in zip((z, on_gpu.grad, there.weight.grad), (y, *grads), strict=False):
        assert (a.cpu() - b).abs().max() <= tolerance * b.abs().max()

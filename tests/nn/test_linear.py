"""narrow_linear against F.linear on the decoded weight, with float64 as the judge."""

import pytest
import torch
import torch.nn.functional as F

from subulp import nn
from subulp.diagnostics.memory import track_memory
from subulp.nn import linear, narrow_linear
from subulp.ops import bf16_product, fp8_product

NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.float32, *NARROW]
IN_BF16 = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(params=[None, 7], ids=["one-tile", "ragged-tiles"])
def tile_rows(request, monkeypatch):
    """Tiles of 7 rows do not divide the shapes below: the last one is ragged."""
    if request.param is not None:
        monkeypatch.setattr(linear, "TILE_BYTES", request.param * 33 * 4)


def problem(dtype, *, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, 33, generator=generator).requires_grad_()
    weight = torch.randn(40, 33, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(40, generator=generator).to(dtype).requires_grad_() if bias else None
    grad_y = torch.randn(3, 5, 40, generator=generator)
    return x, weight, b, grad_y


def wide(t, dtype):
    return None if t is None else t.detach().to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_error_is_at_most_that_of_an_untiled_product(dtype, bias, tile_rows):
    x, weight, b, grad_y = problem(dtype, bias=bias)
    y = narrow_linear(x, weight, b)
    y.backward(grad_y)

    results = {}
    for judge in (torch.float32, torch.float64):
        inputs = [wide(t, judge) for t in (x, weight, b)]
        out = F.linear(*inputs)
        out.backward(grad_y.to(judge))
        results[judge] = [out.detach(), inputs[0].grad, inputs[1].grad]
    ours = [y.detach(), x.grad, weight.grad]
    for mine, naive, exact in zip(
        ours, results[torch.float32], results[torch.float64], strict=True
    ):
        # The naive gradient, rounded to the dtype that ours is stored in.
        naive_error = (naive.to(mine.dtype).double() - exact).abs().max()
        assert (mine.double() - exact).abs().max() <= naive_error + 1e-5
    assert weight.grad.dtype == dtype
    if bias:
        assert torch.equal(b.grad.float(), grad_y.sum((0, 1)).to(dtype).float())


@pytest.mark.parametrize("dtype", IN_BF16, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_units_of_bf16_multiply_as_tiles_do(dtype, bias, tile_rows, monkeypatch):
    """BF16 activations: the same up to the order of FP32 sums, before the result is rounded."""
    gradients = {}
    for units in (False, True):
        monkeypatch.setattr(bf16_product, "units_at", lambda device, here=units: here)
        x, weight, b, grad_y = problem(dtype, bias=bias)
        x = x.detach().bfloat16().requires_grad_()
        weight.grad_dtype = torch.float32
        y = narrow_linear(x, weight, b)
        function = "_UnitLinear" if units else "_NarrowLinear"
        assert function in type(y.grad_fn).__name__
        y.backward(grad_y.bfloat16())
        gradients[units] = y, x.grad, weight.grad, None if b is None else b.grad
    (y, grad_x, grad_w, grad_b), (y2, grad_x2, grad_w2, grad_b2) = gradients.values()
    for a, b in ((y, y2), (grad_x, grad_x2)):
        assert a.dtype == b.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)
        assert (a == b).float().mean() > 0.98
    assert grad_w2.dtype == torch.float32
    torch.testing.assert_close(grad_w, grad_w2, rtol=1e-5, atol=1e-5)
    assert grad_b is None or torch.equal(grad_b, grad_b2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_units_of_bf16_take_any_layout(dtype, monkeypatch):
    monkeypatch.setattr(bf16_product, "units_at", lambda device: True)
    layer = nn.Linear(24, 16).to(dtype)
    numbers = torch.randn(2, 6, 48).to(torch.bfloat16)
    turned = numbers[0, :, :24].t().contiguous().t()
    for x in (turned, numbers[..., ::2], numbers[:1, :, :24].expand(3, 6, 24), numbers[0, 0, :24]):
        found = []
        for each in (x, x.contiguous()):
            leaf = each.detach().requires_grad_()
            layer.zero_grad()
            y = layer(leaf)
            y.backward(torch.ones_like(y))
            found.append((y, leaf.grad, layer.weight.grad))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one.float(), other.float())
    # A weight in another layout, too.
    weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    layer.zero_grad()
    narrow_linear(turned, weight, layer.bias).float().sum().backward()
    layer.zero_grad()
    layer(turned).float().sum().backward()
    assert torch.equal(weight.grad.float(), layer.weight.grad.float())


def test_units_of_bf16_multiply_no_wider_numbers(monkeypatch):
    """FP32 and FP16 are never rounded to BF16, and what wraps tensors stays with torch."""
    monkeypatch.setattr(bf16_product, "units_at", lambda device: True)
    monkeypatch.setattr(linear, "bf16_mm", None)
    x, weight, b, _ = problem(torch.bfloat16)
    narrow_linear(x, weight, b)
    narrow_linear(x.half(), weight, b)
    narrow_linear(x.bfloat16(), weight.half(), b)
    with pytest.raises(TypeError):
        narrow_linear(x.bfloat16(), weight, b)


def test_frozen_parts_have_no_gradients_on_units(monkeypatch):
    monkeypatch.setattr(bf16_product, "units_at", lambda device: True)
    x, weight, b, _ = problem(torch.float8_e4m3fn)
    narrow = x.detach().bfloat16()
    narrow_linear(narrow, weight, b).sum().backward()
    assert narrow.grad is None
    assert weight.grad is not None
    frozen = weight.detach()
    narrow.requires_grad_()
    narrow_linear(narrow, frozen, b.detach()).sum().backward()
    assert narrow.grad.shape == narrow.shape


def test_gradcheck_in_the_direction_of_every_input(tile_rows):
    """Central differences of a smooth scalar, as far as FP32 can tell."""
    x, weight, b, grad_y = problem(torch.bfloat16)
    narrow_linear(x, weight, b).backward(grad_y)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        up = (narrow_linear(x + direction, weight, b) * grad_y).sum()
        down = (narrow_linear(x - direction, weight, b) * grad_y).sum()
    torch.testing.assert_close((up - down) / 2, (direction * x.grad).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_give_narrow_outputs(dtype):
    x, weight, b, _ = problem(dtype)
    y = narrow_linear(x.detach().to(dtype), weight, b)
    expected = F.linear(x.detach().to(dtype).float(), weight.float(), b.float()).to(dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected)


def test_a_declared_gradient_dtype_is_honoured():
    x, weight, b, grad_y = problem(torch.float8_e4m3fn)
    weight.grad_dtype = torch.float32
    narrow_linear(x, weight, b).backward(grad_y)
    assert weight.grad.dtype == torch.float32
    expected = grad_y.reshape(-1, 40).t() @ x.detach().reshape(-1, 33)
    torch.testing.assert_close(weight.grad, expected)


def test_only_the_needed_gradients_are_computed():
    x, weight, b, grad_y = problem(torch.bfloat16)
    weight.requires_grad_(False)
    narrow_linear(x.detach(), weight, b).backward(grad_y)
    assert weight.grad is None
    assert b.grad is not None


def test_a_tied_weight_collects_both_gradients():
    table = nn.Embedding(11, 33).to(torch.bfloat16)
    ids = torch.tensor([1, 4, 4, 9])
    hidden = table(ids)
    narrow_linear(hidden, table.weight).square().sum().backward()

    reference = table.weight.detach().float().requires_grad_()
    F.linear(F.embedding(ids, reference), reference).square().sum().backward()
    assert table.weight.grad.dtype == torch.bfloat16
    # Two BF16 roundings: of each gradient, and of their sum.
    torch.testing.assert_close(
        table.weight.grad.float(), reference.grad, rtol=0, atol=2**-7 * reference.grad.abs().max()
    )


def test_nothing_of_the_size_of_an_fp32_weight_lives_between_forward_and_backward(monkeypatch):
    monkeypatch.setattr(linear, "TILE_BYTES", 4 * 256 * 4)
    layer = nn.Linear(256, 512, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.randn(2, 256)
    with track_memory(layer, optimizer) as forward:
        y = layer(x).sum()
    # The output, one tile of the weight and the sum: no saved copy of the weight in FP32.
    small = (2 * 512 + 4 * 256 + 1) * 4
    assert 0 < forward.peak_bytes["activations"] <= small
    with track_memory(layer, optimizer) as backward:
        y.backward()
    assert backward.category_peak_bytes["gradients"] == 256 * 512 * 2
    # Backward holds gradients of activations, besides one tile and the BF16 gradient.
    assert backward.category_peak_bytes["activations"] <= small + 2 * 256 * 4


# The compiler itself looks at the gradients of the tensors that it passes on.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers_compute_the_same_bits():
    model = torch.nn.Sequential(nn.Linear(33, 40), nn.LayerNorm(40), nn.Linear(40, 7))
    model.to(torch.bfloat16)
    x = torch.randn(5, 33)
    results = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        y = forward(x)
        y.sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("products", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_meta_device_has_shapes(dtype, products):
    layer = nn.Linear(32, 16, device="meta", products=products).to(dtype)
    x = torch.empty(3, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.shape, y.dtype, y.device.type) == ((3, 16), torch.bfloat16, "meta")
    assert (x.grad.shape, layer.weight.grad.dtype) == ((3, 32), dtype)


def test_an_empty_batch():
    layer = nn.Linear(4, 3).to(torch.bfloat16)
    y = layer(torch.empty(0, 4))
    y.sum().backward()
    assert y.shape == (0, 3)
    assert not layer.weight.grad.any()


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(3, 4), None, "x has dtype"),
        (torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.int8), None, "weight has dtype"),
        (torch.zeros(2, 4), torch.zeros(0, 4), None, r"weight has shape \(0, 4\)"),
        (torch.zeros(2, 5), torch.zeros(3, 4), None, r"x of shape \(2, 5\)"),
        (torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4), r"bias has shape \(4,\)"),
    ],
)
def test_bad_arguments_are_named(x, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        narrow_linear(x, weight, bias)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_gpu_agrees_with_the_cpu(dtype):
    x, weight, b, grad_y = problem(dtype)
    narrow_linear(x, weight, b).backward(grad_y)
    on_gpu = [t.detach().cuda().requires_grad_() for t in (x, weight, b)]
    y = narrow_linear(*on_gpu)
    y.backward(grad_y.cuda())
    expected = F.linear(x.detach(), weight.detach().float(), b.detach().float())
    # BF16 and FP16 multiply natively there: the activations are rounded as well.
    torch.testing.assert_close(y.detach().cpu(), expected, rtol=2**-6, atol=2**-3)
    torch.testing.assert_close(on_gpu[0].grad.cpu(), x.grad, rtol=2**-6, atol=2**-3)


def test_autocast_casts_like_torch():
    """FP32 weights, BF16 operands multiplied in FP32, FP32 gradients."""
    torch.manual_seed(0)
    layer = nn.Linear(33, 20)
    x = torch.randn(4, 33)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.float().square().sum().backward()
    narrow = [t.detach().bfloat16().float() for t in (x, layer.weight)]
    torch.testing.assert_close(y, F.linear(*narrow, layer.bias).bfloat16())
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    assert torch.equal(layer.weight.grad, layer.weight.grad.bfloat16().float())


# --------------------------------------------------------------------------- products of FP8 units

E4M3 = torch.float8_e4m3fn


def rounded(t):
    """A tensor as FP8 products take it, in float64."""
    if t.dtype == E4M3:
        return t.double()
    scale = (t.float().abs().max() * (1 / 448)).clamp(min=torch.finfo(torch.float32).tiny)
    return (t.float() / scale).to(E4M3).double() * scale.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_fp8_products_are_those_of_rounded_operands(dtype, bias, monkeypatch):
    # Tiles of the weight's rows, the last one ragged.
    monkeypatch.setattr(fp8_product, "_TILE_BYTES", 7 * 33 * 4)
    x, weight, b, grad_y = problem(dtype, bias=bias)
    y = narrow_linear(x, weight, b, products="fp8")
    y.backward(grad_y)
    q, w, g = (rounded(t.detach()) for t in (x, weight, grad_y))
    rows = g.view(-1, 40)
    expected = [
        q @ w.t() + (b.detach().double() if bias else 0),
        (rows @ w).view(x.shape),
        rows.t() @ q.view(-1, 33),
    ]
    for mine, exact in zip((y.detach(), x.grad, weight.grad), expected, strict=True):
        # E4M3's smallest number is coarse.
        least = 2.0**-10 if mine.dtype == E4M3 else 0.0
        bound = torch.finfo(mine.dtype).eps * exact.abs() + 1e-5 * exact.abs().max() + least
        assert bool(((mine.double() - exact).abs() <= bound).all())
    assert weight.grad.dtype == dtype
    if bias:
        assert torch.equal(b.grad.float(), grad_y.sum((0, 1)).to(dtype).float())
    # What is saved for the weight's gradient is narrow.
    assert narrow_linear(x, weight, b, products="fp8").grad_fn.saved_tensors[0].dtype == E4M3


@pytest.mark.parametrize("products", ["auto", "fp8"])
def test_layers_say_how_they_multiply(products):
    layer = nn.Linear(33, 40, products=products).to(E4M3)
    x = torch.randn(5, 33, dtype=torch.bfloat16)
    expected = narrow_linear(x, layer.weight, layer.bias, products=products)
    assert torch.equal(layer(x), expected)
    assert ("products='fp8'" in repr(layer)) == (products == "fp8")
    assert layer(x[:0]).shape == (0, 40)
    torch._dynamo.reset()
    with torch.no_grad():
        whole = torch.compile(layer, backend="aot_eager")
        assert torch.equal(whole(x), expected)


def test_fp8_products_of_extreme_numbers():
    weight = torch.randn(4, 8).to(E4M3)
    for scale in (0.0, 1e-30, 1e37):
        x = scale * torch.tensor([[1.0, -0.5, 0.25, 0, 0, 0, 0, 1]])
        expected = x.double() @ weight.double().t()
        y = narrow_linear(x, weight, products="fp8")
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-44)
    for bad in (torch.inf, torch.nan):
        x = torch.ones(2, 8)
        x[0, 3] = bad
        assert narrow_linear(x, weight, products="fp8").isnan().all()


def test_what_fp8_products_refuse():
    x, weight, *_ = problem(torch.float8_e5m2)
    with pytest.raises(ValueError, match="'fp8' multiplies E4M3, and the weight is in float8_e5m2"):
        narrow_linear(x, weight, products="fp8")
    with pytest.raises(ValueError, match="products='bf8' is unknown: use 'auto' or 'fp8'"):
        nn.Linear(3, 4, products="bf8")
    layer = nn.Linear(33, 4)
    layer.products = "fp4"
    with pytest.raises(ValueError, match="products='fp4' is unknown"):
        layer(x)


def test_fp8_products_learn():
    torch.manual_seed(0)
    x, losses = torch.randn(64, 16), {}
    y = x @ torch.randn(16, 4)
    for products in ("auto", "fp8"):
        torch.manual_seed(1)
        layer = nn.Linear(16, 4, products=products)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
        for _ in range(100):
            optimizer.zero_grad()
            loss = (layer(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        losses[products] = loss.item()
    assert losses["auto"] < 0.01
    assert losses["fp8"] < 0.1

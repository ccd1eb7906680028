"""narrow_conv2d against F.conv2d on the decoded weight."""

import pytest
import torch
import torch.nn.functional as F

from subulp import nn
from subulp.diagnostics.memory import track_memory
from subulp.nn import narrow_conv2d

NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
OPTIONS = [
    {},
    {"stride": (2, 1), "padding": (1, 2)},
    {"dilation": (2, 2), "groups": 2},
]


def problem(dtype, *, bias=True, groups=1):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 9, 7, generator=generator)
    weight = torch.randn(6, 4 // groups, 3, 2, generator=generator).to(dtype)
    b = torch.randn(6, generator=generator).to(dtype) if bias else None
    return x, weight, b


def leaf(t, dtype=None):
    return None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_convolution_of_decoded_operands(dtype, bias, options):
    x, weight, b = problem(dtype, bias=bias, groups=options.get("groups", 1))
    x, weight, b = leaf(x), leaf(weight), leaf(b)
    y = narrow_conv2d(x, weight, b, **options)
    wide = [leaf(t, torch.float32) for t in (x, weight, b)]
    expected = F.conv2d(*wide, **options)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(grad_y)
    expected.backward(grad_y)
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, wide[0].grad)
    assert torch.equal(weight.grad.float(), wide[1].grad.to(dtype).float())
    if bias:
        assert torch.equal(b.grad.float(), wide[2].grad.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_stay_narrow(dtype):
    x, weight, b = problem(dtype)
    x = leaf(x, dtype)
    y = narrow_conv2d(x, weight, b)
    y.float().sum().backward()
    expected = F.conv2d(x.detach().float(), weight.float(), b.float()).to(dtype)
    assert torch.equal(y.detach(), expected)
    assert x.grad.dtype == dtype


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "same", "kernel_size": (4, 3)},
        {"padding": "valid", "kernel_size": 3},
        {"padding": 1, "padding_mode": "circular", "kernel_size": 3},
        {"padding": (1, 2), "padding_mode": "reflect", "kernel_size": 3, "bias": False},
        {"stride": 2, "dilation": 2, "groups": 2, "kernel_size": (1, 3)},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_the_layer_takes_what_its_parent_takes(options):
    torch.manual_seed(0)
    parent = torch.nn.Conv2d(4, 6, **options)
    layer = nn.Conv2d(4, 6, **options)
    layer.load_state_dict(parent.state_dict())
    x = torch.randn(2, 4, 9, 8)
    torch.testing.assert_close(layer(x), parent(x), rtol=1e-5, atol=1e-5)
    wide = torch.nn.Conv2d(4, 6, **options)
    wide.load_state_dict(layer.to(torch.bfloat16).state_dict())
    torch.testing.assert_close(layer(x), wide(x), rtol=1e-5, atol=1e-5)


def test_nothing_wide_is_kept_for_backward():
    x, weight, _ = problem(torch.bfloat16)
    x, weight = leaf(x, torch.bfloat16), leaf(weight)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        narrow_conv2d(x, weight)
    assert {t.dtype for t in kept} == {torch.bfloat16}
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr()}


def test_the_wide_copy_of_a_weight_does_not_outlive_its_layer():
    model = torch.nn.Sequential(*[nn.Conv2d(64, 64, 3, bias=False) for _ in range(4)])
    model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(1, 64, 9, 9, dtype=torch.bfloat16)
    with torch.no_grad(), track_memory(model, optimizer) as memory:
        model(x)
    one = model[0].weight.numel() * 4
    assert one <= memory.category_peak_bytes["activations"] < 1.5 * one


def test_autocast_casts_like_torch(monkeypatch):
    """FP32 weights, BF16 operands, FP32 gradients."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, 3)
    x = torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    narrow = [t.detach().bfloat16().float() for t in (x, layer.weight)]
    expected = F.conv2d(*narrow, layer.bias).bfloat16()
    torch.testing.assert_close(y, expected)
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    # The gradient of the cast operand is rounded to BF16 on its way, as with torch's layer.
    assert torch.equal(layer.weight.grad, layer.weight.grad.bfloat16().float())


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(1, 2, 3, 3, dtype=torch.int32), torch.zeros(2, 2, 1, 1), "x has dtype"),
        (torch.zeros(2, 3, 3), torch.zeros(2, 2, 1, 1), r"x has shape \(2, 3, 3\)"),
        (torch.zeros(1, 2, 3, 3), torch.zeros(2, 2, 1), r"weight has shape \(2, 2, 1\)"),
        (torch.zeros(1, 2, 3, 3), torch.zeros(2, 2, 1, 1, dtype=torch.int8), "dtype torch.int8"),
    ],
)
def test_bad_input(x, weight, message):
    with pytest.raises(ValueError, match=message):
        narrow_conv2d(x, weight)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_one_number_is_for_both_dimensions(dtype):
    x, weight, b = problem(dtype, groups=2)
    runs = []
    for options in ((2, 1, 2), ((2, 2), (1, 1), (2, 2))):
        leaves = leaf(x), leaf(weight), leaf(b)
        y = narrow_conv2d(*leaves, *options, groups=2)
        y.sum().backward()
        runs.append([y, *(each.grad for each in leaves)])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.float(), other.float())

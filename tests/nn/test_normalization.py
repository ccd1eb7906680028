"""Layer and batch normalisation against torch's, with decoded parameters."""

import pytest
import torch
import torch.nn.functional as F

from subulp import nn


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
def test_equals_layer_norm_with_decoded_parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    layer = nn.LayerNorm(8).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(8, generator=generator) + 0.5)
        layer.bias.copy_(torch.randn(8, generator=generator))
    x = torch.randn(3, 8, generator=generator)
    grad_y = torch.randn(3, 8, generator=generator)
    y = layer(x)
    y.backward(grad_y)

    weight, bias = (p.detach().float().requires_grad_() for p in (layer.weight, layer.bias))
    expected = F.layer_norm(x, (8,), weight, bias)
    expected.backward(grad_y)
    assert torch.equal(y, expected)
    assert torch.equal(layer.weight.grad.float(), weight.grad.to(dtype).float())
    assert torch.equal(layer.bias.grad.float(), bias.grad.to(dtype).float())


def pair(dtype, **options):
    """Ours with narrow parameters, and torch's in FP32 with the same values."""
    torch.manual_seed(0)
    ours, wide = nn.BatchNorm2d(5, **options), torch.nn.BatchNorm2d(5, **options)
    if options.get("affine", True):
        with torch.no_grad():
            ours.weight.uniform_(0.5, 1.5)
            ours.bias.normal_()
    ours.to(dtype)
    wide.load_state_dict(ours.state_dict())
    return ours, wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}],
    ids=str,
)
def test_equals_batch_norm_with_decoded_parameters(dtype, options):
    ours, wide = pair(dtype, **options)
    for training in (True, True, False):
        ours.train(training)
        wide.train(training)
        x = torch.randn(4, 5, 3, 3) + 2
        grad_y = torch.randn(4, 5, 3, 3)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for layer, t in zip((ours, wide), inputs, strict=True):
            layer.zero_grad()
            layer(t).backward(grad_y)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for p, q in zip(ours.parameters(), wide.parameters(), strict=True):
            assert torch.equal(p.grad.float(), q.grad.to(dtype).float())
        for a, b in zip(ours.buffers(), wide.buffers(), strict=True):
            assert torch.equal(a, b)


def test_running_statistics_stay_wide_and_move_by_small_steps():
    ours, _ = pair(torch.bfloat16)
    assert ours.weight.dtype == torch.bfloat16
    assert ours.running_mean.dtype == ours.running_var.dtype == torch.float32
    ours.running_mean.fill_(1 + 2**-20)
    ours.half()
    # Not even rounded on the way through half precision.
    assert torch.equal(ours.running_mean, torch.full((5,), 1 + 2**-20))
    assert ours.double().running_mean.dtype == torch.float32
    assert ours.to("meta").running_mean.is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_stay_narrow_and_are_summed_wide(dtype):
    ours, wide = pair(dtype)
    # Summed in the dtype itself, 2,304 numbers near 3 would stop growing long before the end.
    x = (torch.randn(16, 5, 12, 12) + 3).to(dtype)
    y = ours(x)
    assert y.dtype == dtype
    expected = wide(x.float())
    # One rounding of the result: half an ulp of values below 8.
    ulp = 8 * torch.finfo(dtype).eps / 2
    assert (y.float() - expected).abs().max() <= ulp / 2 * 1.01
    torch.testing.assert_close(ours.running_mean, wide.running_mean, rtol=1e-5, atol=1e-6)


def test_a_matrix_is_refused():
    with pytest.raises(ValueError, match="expected 4D input"):
        nn.BatchNorm2d(5)(torch.zeros(3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["dtype", "default", "assigned", "cast"])
def test_statistics_stay_in_fp32_however_a_module_is_made(dtype, how):
    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    if how == "dtype":
        layer = nn.BatchNorm2d(4, dtype=dtype)
    elif how == "default":
        torch.set_default_dtype(dtype)
        try:
            layer = nn.BatchNorm2d(4)
        finally:
            torch.set_default_dtype(torch.float32)
    elif how == "assigned":
        layer = nn.BatchNorm2d(4)
        layer.load_state_dict(torch.nn.BatchNorm2d(4).to(dtype).state_dict(), assign=True)
    else:
        layer = nn.BatchNorm2d(4).to(dtype)
    expected = torch.nn.BatchNorm2d(4)
    assert layer.weight.dtype == dtype
    assert torch.equal(layer(x), expected(x))
    assert layer.running_mean.dtype == layer.running_var.dtype == torch.float32
    assert torch.equal(layer.running_var, expected.running_var)


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.BatchNorm2d(3)], ids=str)
def test_wider_activations_are_refused(layer):
    with pytest.raises(ValueError, match=r"input has dtype torch.float64: \w+ takes FP32, BF16"):
        layer.double()(torch.zeros(2, 3, 4, 4, dtype=torch.float64))

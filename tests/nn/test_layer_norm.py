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

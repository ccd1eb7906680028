"""narrow_embedding against F.embedding on the decoded table."""

import pytest
import torch
import torch.nn.functional as F

from subulp import nn
from subulp.nn import narrow_embedding

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_embedding_of_the_decoded_table(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 6, generator=generator).to(dtype).requires_grad_()
    ids = torch.tensor([[3, 3, 0], [19, 3, 7]])
    grad_y = torch.randn(2, 3, 6, generator=generator)
    y = narrow_embedding(ids, weight)
    y.backward(grad_y)

    reference = weight.detach().float().requires_grad_()
    expected = F.embedding(ids, reference)
    expected.backward(grad_y)
    assert y.dtype == torch.float32
    assert torch.equal(y, expected)
    assert weight.grad.dtype == dtype
    # Row 3 is used three times: summed in FP32, rounded once.
    assert torch.equal(weight.grad.float(), reference.grad.to(dtype).float())


def test_gradients_of_untouched_rows_are_zero():
    table = nn.Embedding(10, 4).to(torch.bfloat16)
    table(torch.tensor([2, 5])).sum().backward()
    touched = table.weight.grad.float().abs().sum(1).nonzero().flatten()
    assert touched.tolist() == [2, 5]


def test_a_frozen_table_gets_no_gradient():
    table = nn.Embedding(10, 4).to(torch.bfloat16).requires_grad_(False)
    assert not table(torch.tensor([1])).requires_grad


@pytest.mark.parametrize(
    ("ids", "weight", "message"),
    [
        (torch.tensor([0.0]), torch.zeros(2, 2), "ids have dtype torch.float32"),
        (torch.tensor([0]), torch.zeros(2), r"weight has shape \(2,\)"),
        (torch.tensor([0]), torch.zeros(2, 2, dtype=torch.int8), "dtype torch.int8"),
    ],
)
def test_bad_arguments_are_named(ids, weight, message):
    with pytest.raises(ValueError, match=message):
        narrow_embedding(ids, weight)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)],
)
def test_options_of_torchs_that_are_set_later(name, value):
    layer = nn.Embedding(4, 3)
    setattr(layer, name, value)
    with pytest.raises(ValueError, match=f"{name}={value} is not available"):
        layer(torch.tensor([0, 1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding_idx", [0, 3])
def test_a_row_of_padding_gets_no_gradient(dtype, padding_idx):
    """Of a model whose torch layers become ours it may be set."""
    ids = torch.tensor([[3, 3, 0], [1, 3, 2]])
    layer = nn.Embedding(4, 3).to(dtype)
    layer.padding_idx = padding_idx
    y = layer(ids)
    y.backward(torch.ones_like(y))
    wide = layer.weight.detach().float().requires_grad_()
    F.embedding(ids, wide, padding_idx=padding_idx).sum().backward()
    assert torch.equal(layer.weight.grad.float(), wide.grad)
    layer.padding_idx = 4
    with pytest.raises(ValueError, match="padding_idx=4 is out of range: 4 rows"):
        layer(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_exported_row_of_padding_gets_no_gradient(dtype):
    ids = torch.tensor([[3, 3, 0], [1, 3, 2]])
    layer = nn.Embedding(4, 3).to(dtype)
    layer.padding_idx = 3
    program = torch.export.export(layer, (ids,)).module()
    y = program(ids)
    assert torch.equal(y, layer(ids))
    y.sum().backward()
    (weight,) = program.parameters()
    assert torch.equal(weight.grad.float()[3], torch.zeros(3))
    assert torch.equal(weight.grad.float()[:3], torch.ones(3, 3))


@pytest.mark.parametrize("padding_idx", [1.5, True, -1, "0"])
def test_what_is_no_row_of_padding(padding_idx):
    with pytest.raises(ValueError, match=r"padding_idx=.* is out of range: 4 rows"):
        narrow_embedding(torch.tensor([0]), torch.ones(4, 2).bfloat16(), padding_idx)

"""Layers made in FP8, in which torch draws no numbers: drawn in FP32, and rounded."""

import pytest
import torch

from subulp import nn

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
LAYERS = [
    lambda **options: nn.Linear(7, 5, **options),
    lambda **options: nn.Conv2d(3, 4, 3, **options),
    lambda **options: nn.Embedding(9, 4, **options),
]


def drawn(make, **options):
    torch.manual_seed(0)
    return make(**options)


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("dtype", [*FP8, torch.bfloat16], ids=str)
def test_made_in_a_dtype_or_cast_to_it(make, dtype):
    layer, cast = drawn(make, dtype=dtype), drawn(make).to(dtype)
    assert all(p.dtype == dtype for p in layer.parameters())
    if dtype in FP8:
        for own, other in zip(layer.parameters(), cast.parameters(), strict=True):
            assert torch.equal(own.float(), other.float())


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_reset_draws_anew_and_keeps_the_parameters(make, dtype):
    layer = drawn(make, dtype=dtype)
    known = [(id(p), p.float()) for p in layer.parameters()]
    layer.reset_parameters()
    for p, (identity, before) in zip(layer.parameters(), known, strict=True):
        assert id(p) == identity
        assert p.dtype == dtype
        assert not torch.equal(p.float(), before)


@pytest.mark.parametrize("make", LAYERS)
def test_on_the_meta_device(make):
    layer = make(dtype=FP8[0], device="meta")
    assert all(p.is_meta and p.dtype == FP8[0] for p in layer.parameters())
    layer.to_empty(device="cpu").reset_parameters()
    assert all(p.float().isfinite().all() for p in layer.parameters())

"""Kernels that are measured on a GPU have the bits of those that are not."""

from __future__ import annotations

import pytest
import torch

from subulp import optim
from subulp.numerics import mixture
from subulp.numerics.mixture import THREE_WAY
from subulp.ops.mixture import triton_product
from subulp.ops.mixture.operand import Operand, ProductJob
from subulp.ops.step import triton as step_triton
from subulp.ops.triton import tuning

from .places import same_bits, tensors_of

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def product() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    factors = []
    for rows in (272, 208):
        x = torch.randn(rows, 512, generator=generator)
        # Some parts of the result are multiplied on units of FP8, the others are decoded.
        x[70:80, :32] *= torch.logspace(-4, 3, 32)
        found, summary = mixture.encode(x.cuda().to(BF16), THREE_WAY, (16, 128))
        factors.append(Operand(found, summary))
    units = torch.cuda.get_device_capability() >= (8, 9)
    return [triton_product.multiply(ProductJob(*factors, BF16, None, units=units))]


def steps() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=generator).cuda().to(BF16) for n in (70_000, 33)]
    optimizer = optim.AdamW(params, lr=0.01, precision="stochastic", seed=0)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).cuda().to(BF16)
        optimizer.step()
    return [*params, *tensors_of(optimizer.state_dict()["state"])]


@pytest.mark.parametrize(
    ("compute", "kernel", "table"),
    [
        (
            product,
            "product_kernel",
            triton_product.configurations(272, torch.bfloat16, constant=False),
        ),
        (steps, "adam_step_kernel", step_triton.CONFIGURATIONS),
    ],
    ids=["product", "steps"],
)
def test_what_is_measured_has_the_same_bits(compute, kernel, table, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBULP_CACHE", str(tmp_path))
    monkeypatch.setenv("SUBULP_TUNE", "0")
    tuning.forget()
    expected = compute()
    for configuration in table:
        with tuning.fixed(kernel, configuration):
            assert all(map(same_bits, compute(), expected)), configuration
    monkeypatch.setenv("SUBULP_TUNE", "1")
    assert all(map(same_bits, compute(), expected))
    (measured,) = (c for c in tuning.chosen() if c.name.startswith(kernel))
    assert measured.source == "measured"
    assert measured.configuration in table
    # Another process reads it, and measures nothing.
    tuning.forget()
    monkeypatch.setattr(tuning, "timer", None)
    assert all(map(same_bits, compute(), expected))
    assert [c.source for c in tuning.chosen() if c.name.startswith(kernel)] == ["file"]

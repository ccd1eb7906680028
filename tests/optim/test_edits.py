"""Somebody writes into a parameter between steps: the parameter is the truth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from subulp import optim
from subulp.numerics import format_of
from subulp.ops.strategy import parse_strategy
from tests.ops.support import environment, interpreted

from .support import BF16, E4M3, FP16, PRECISIONS, same_bits

NARROW = [
    (name, dtype)
    for name in PRECISIONS
    for dtype in (BF16, FP16, E4M3)
    if dtype in parse_strategy(name).dtypes
]


def data_clamp(p: Tensor) -> None:
    p.data.copy_(p.data.float().clamp(-0.01, 0.01))


def mask(p: Tensor) -> None:
    with torch.no_grad():
        p.copy_(p.float() * (torch.arange(p.numel()) % 3 > 0))


def zeros(p: Tensor) -> None:
    module = nn.Module()
    module.p = p
    module.load_state_dict({"p": torch.zeros_like(p)})


def huge(p: Tensor) -> None:
    with torch.no_grad():
        p[:50] = 240.0


def flipped(p: Tensor) -> None:
    with torch.no_grad():
        p.copy_(-p.float())


def replaced(p: Tensor) -> None:
    p.data = torch.full_like(p.data.float(), 0.3).to(p.dtype)


EDITS = (data_clamp, mask, zeros, huge, flipped, replaced)


def trained(precision: str, dtype: torch.dtype) -> tuple[nn.Parameter, optim.AdamW]:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter((0.1 * torch.randn(200, generator=generator)).to(dtype))
    p.grad_dtype = torch.float32
    optimizer = optim.AdamW([p], lr=1e-3, weight_decay=0.0, precision=precision, seed=1)
    for _ in range(5):
        p.grad = torch.randn(200, generator=generator)
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize(("precision", "dtype"), NARROW)
def test_what_was_written_stays(precision: str, dtype: torch.dtype, edit) -> None:
    """The wide value is within an ulp of it, and the next step goes on from there."""
    p, optimizer = trained(precision, dtype)
    untouched = optimizer.wide_value(p).clone()
    before = p.detach().clone()
    edit(p)
    written = p.detach().float()
    ulp = format_of(dtype).ulp(written)
    wide = optimizer.wide_value(p)
    assert ((wide - written).abs() <= ulp).all()
    same = (before.float() == written) & (before.float().signbit() == written.signbit())
    assert torch.equal(wide[same], untouched[same])

    p.grad = torch.zeros(200)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert p.isfinite().all() if dtype != E4M3 else p.float().isfinite().all()
    # A rate of zero moves nothing: of two heads at the same distance the other one may be taken.
    assert ((p.detach().float() - written).abs() <= ulp).all()
    assert ((optimizer.wide_value(p) - wide).abs() <= ulp * (precision == "stochastic")).all()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize(("precision", "dtype"), NARROW)
def test_backends_agree_on_edited_parameters(
    precision: str, dtype: torch.dtype, backend: str
) -> None:
    results = []
    for name in ("reference", backend):
        p, optimizer = trained(precision, dtype)
        for edit in (mask, huge):
            edit(p)
            with environment(SUBULP_BACKEND=name):
                p.grad = torch.linspace(-1, 1, 200)
                optimizer.step()
        results.append([p.detach(), *optimizer.state[p].values()])
    for expected, found in zip(*results, strict=True):
        assert same_bits(found, expected)


def test_clamping_after_every_step_loses_no_update() -> None:
    """As weight clipping and pruning do, mostly where nothing is to clip: components must stay."""
    generator = torch.Generator().manual_seed(0)
    finals = {}
    for precision in ("master", "collage-plus", "kahan", "extra-bits-8"):
        p = nn.Parameter(torch.ones(1000, dtype=BF16))
        optimizer = optim.SGD([p], lr=1e-4, precision=precision, seed=0)
        generator.manual_seed(0)
        for _ in range(200):
            p.grad = (1 + torch.randn(1000, generator=generator)).to(BF16)
            optimizer.step()
            p.data.clamp_(-1.0, 1.0)
        finals[precision] = optimizer.wide_value(p).mean().item()
    for value in finals.values():
        assert value == pytest.approx(0.98, abs=1e-3)

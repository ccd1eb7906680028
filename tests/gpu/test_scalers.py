"""Scaled losses and clipped gradients on a GPU: the CPU's steps, to the bit."""

from __future__ import annotations

import pytest
import torch

from subulp import optim

from .places import on_both, on_every_device, same_bits, tensors_of
from .test_optimizers import BF16, FP16, SHAPES, Sum, made

SCALE = 2.0**6


def gradients(dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    """Multiples of a quarter, whose squares any order of sums adds up exactly."""
    generator = torch.Generator().manual_seed(step)
    return [(torch.randint(-8, 9, s, generator=generator) / 4).to(dtype) for s in SHAPES]


def states(module, optimizer) -> list[torch.Tensor]:
    return tensors_of([module.state_dict(), optimizer.state_dict()["state"]])


def new_scaler(place: torch.device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(place.type, init_scale=SCALE, growth_interval=2)


@on_every_device
@pytest.mark.parametrize("precision", ["collage-plus", "extra-bits-8", "stochastic"])
def test_scaled_losses(device, precision):
    """The second of four overflows; the scale is halved, and grows again."""

    def train(place):
        module = Sum(FP16, place)
        optimizer, scaler = made(optim.AdamW, module, precision), new_scaler(place)
        for step in range(1, 5):
            given = gradients(FP16, step)
            if step == 2:
                given[1][0, 0] = torch.inf
            optimizer.zero_grad()
            scaler.scale(module([g.to(place) for g in given])).backward()
            scaler.step(optimizer)
            scaler.update()
        return [*states(module, optimizer), torch.tensor(scaler.get_scale())]

    expected, found = on_both(device, train)
    for a, b in zip(expected, found, strict=True):
        assert same_bits(a, b)
    assert float(found[-1]) == SCALE


@on_every_device
def test_scaled_losses_whose_gradients_are_clipped(device):
    def train(place):
        # torch unscales no FP16 gradients of its own accord.
        module = Sum(BF16, place)
        optimizer, scaler = made(optim.AdamW, module, "collage-plus"), new_scaler(place)
        for step in range(1, 3):
            optimizer.zero_grad()
            scaler.scale(module([g.to(place) for g in gradients(BF16, step)])).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return states(module, optimizer)

    for a, b in zip(*on_both(device, train), strict=True):
        assert same_bits(a, b)


FUSED = {
    "max_norm": {"max_norm": 1.0},
    "max_norm of the largest": {"max_norm": 1.0, "norm_type": torch.inf},
    "max_norm, gradients kept": {"max_norm": 1.0, "keep_bytes": 4096},
    "max_norm that clips nothing": {"max_norm": 1e6},
    "clip_parameter_norm": {"clip_parameter_norm": 0.5},
    "clip_value": {"clip_value": 0.5},
}


@on_every_device
@pytest.mark.parametrize("options", FUSED.values(), ids=list(FUSED))
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_fused_backward_pass_that_clips(device, dtype, options):
    def train(place):
        module = Sum(dtype, place)
        optimizer = made(optim.AdamW, module, "collage-plus")
        with optim.fuse_backward(module, optimizer, **options) as handle:
            for step in range(1, 4):
                handle.backward(module([g.to(place) for g in gradients(dtype, step)]))
                optimizer.step()
        return states(module, optimizer)

    for a, b in zip(*on_both(device, train), strict=True):
        assert same_bits(a, b)


@on_every_device
def test_a_fused_backward_pass_with_a_scaler(device):
    def train(place):
        module = Sum(FP16, place)
        optimizer, scaler = made(optim.AdamW, module, "collage-plus"), new_scaler(place)
        with optim.fuse_backward(module, optimizer, scaler=scaler, max_norm=1.0) as handle:
            for step in range(1, 5):
                given = gradients(FP16, step)
                if step == 2:
                    given[0][3] = torch.inf
                handle.backward(scaler.scale(module([g.to(place) for g in given])))
                scaler.step(optimizer)
                scaler.update()
        return [*states(module, optimizer), torch.tensor(scaler.get_scale())]

    for a, b in zip(*on_both(device, train), strict=True):
        assert same_bits(a, b)

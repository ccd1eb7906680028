"""Clipping inside the backward pass has the bits of torch's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subulp import optim
from subulp.optim.backward.clipping import Clipping, each_scaled, scaled

from ..support import BF16, FP32, same_bits
from .twins import MAKERS, assert_same, batches, loss_of, twins


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_each_parameters_norm(dtype: torch.dtype, norm_type: float) -> None:
    """Some gradients are longer than the limit and some are not."""
    limit, cut = 0.03, []
    plain, fused = twins(MAKERS["sgd"]("auto"), dtype)
    with optim.fuse_backward(*fused, clip_parameter_norm=limit, norm_type=norm_type):
        for batch in batches(3, dtype):
            loss_of(plain[0], batch).backward()
            for p in plain[0].parameters():
                cut.append(bool(nn.utils.clip_grad_norm_([p], limit, norm_type) > limit))
            plain[1].step()
            plain[1].zero_grad()
            # A plain backward pass: one is enough.
            loss_of(fused[0], batch).backward()
    assert 0 < sum(cut) < len(cut)
    assert_same(plain, fused)


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_global_norm_of_other_types(norm_type: float) -> None:
    plain, fused = twins(MAKERS["sgd"]("auto"), BF16)
    with optim.fuse_backward(*fused, max_norm=0.1, norm_type=norm_type) as handle:
        for batch in batches(2, BF16):
            loss_of(plain[0], batch).backward()
            total = nn.utils.clip_grad_norm_(plain[0].parameters(), 0.1, norm_type)
            plain[1].step()
            plain[1].zero_grad()
            handle.backward(loss_of(fused[0], batch))
            assert handle.total_norm is not None
            assert torch.equal(handle.total_norm, total)
    assert_same(plain, fused)


@pytest.mark.parametrize("options", [{"clip_parameter_norm": 0.03}, {"clip_value": 1e-3}])
def test_the_accumulated_gradient_is_clipped(options: dict[str, float]) -> None:
    plain, fused = twins(MAKERS["sgd"]("auto"), BF16)
    with optim.fuse_backward(*fused, accumulate=2, **options):
        for i, batch in enumerate(batches(4, BF16)):
            loss_of(plain[0], batch).backward()
            loss_of(fused[0], batch).backward()
            if i % 2 == 0:
                continue
            if "clip_value" in options:
                nn.utils.clip_grad_value_(plain[0].parameters(), options["clip_value"])
            else:
                for p in plain[0].parameters():
                    nn.utils.clip_grad_norm_([p], options["clip_parameter_norm"])
            plain[1].step()
            plain[1].zero_grad()
    assert_same(plain, fused)


SIZES = (7, 1, 300, 64, 5)


def gradients(dtype: torch.dtype) -> list[Tensor]:
    """Long ones and short ones, one that is zero, and some with values that no norm survives."""
    torch.manual_seed(0)
    made = [torch.randn(size) * 10.0 ** (i - 2) for i, size in enumerate(SIZES)]
    made += [torch.zeros(3), torch.full((4,), float("nan")), torch.tensor([1.0, -float("inf")])]
    made.append(torch.randn(12, 5).t())
    return [grad.to(dtype) for grad in made]


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, 2.5, float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32, torch.float64])
def test_gradients_clipped_together_are_those_clipped_one_by_one(
    dtype: torch.dtype, norm_type: float
) -> None:
    for limit in (0.3, torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64)):
        for clipping in (
            Clipping(parameter_norm=limit, norm_type=norm_type),  # type: ignore[arg-type]
            Clipping(value=limit),  # type: ignore[arg-type]
        ):
            given = gradients(dtype)
            together = clipping.each_alone(given, list(given))
            alone = [clipping.alone(grad, grad) for grad in given]
            assert [grad.dtype for grad in together] == [grad.dtype for grad in alone]
            for one, other, before in zip(together, alone, gradients(dtype), strict=True):
                assert same_bits(one, other)
                # Others may hold the gradients that autograd made.
                assert one.data_ptr() not in [grad.data_ptr() for grad in given]
                assert one.shape == before.shape
            assert all(map(same_bits, given, gradients(dtype)))


@pytest.mark.parametrize("norm_type", [0.0, 2.0, float("inf")])
def test_they_are_clipped_as_torch_clips_each(norm_type: float) -> None:
    given = gradients(BF16)
    together = Clipping(parameter_norm=0.3, norm_type=norm_type).each_alone(given, list(given))
    for grad, clipped in zip(given, together, strict=True):
        p = nn.Parameter(torch.zeros_like(grad))
        p.grad = grad.clone()
        nn.utils.clip_grad_norm_([p], 0.3, norm_type)
        assert same_bits(p.grad, clipped)


@pytest.mark.parametrize("coefficient", [torch.tensor(0.37), torch.tensor(0.37, dtype=BF16)])
def test_gradients_scaled_together_are_those_scaled_one_by_one(coefficient: Tensor) -> None:
    for given in (gradients(BF16), gradients(FP32), [*gradients(BF16), *gradients(FP32)]):
        together = each_scaled(list(given), coefficient)
        alone = [scaled(grad, coefficient) for grad in given]
        assert all(map(same_bits, together, alone))


def test_gradients_of_several_dtypes_and_groups_are_clipped() -> None:
    """In one pass, with buckets of their own."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model[2].to(torch.float64).to(BF16)
    optimizers = [
        optim.SGD([{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 0.3}], lr=0.1)
        for m in models
    ]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model[2](model[1](model[0](x)).to(BF16)).float().square().sum()  # type: ignore[index]

    handle = optim.fuse_backward(models[1], optimizers[1], clip_parameter_norm=0.05)
    for _ in range(4):
        x = torch.randn(3, 6)
        loss(models[0], x).backward()
        for p in models[0].parameters():
            nn.utils.clip_grad_norm_([p], 0.05)
        optimizers[0].step()
        optimizers[0].zero_grad()
        handle.backward(loss(models[1], x))
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert same_bits(p, q)


def test_a_step_without_gradients_has_no_norm() -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with optim.fuse_backward(model, optimizer, max_norm=1.0) as handle:
        handle.backward(torch.ones((), requires_grad=True) * 2)
        assert handle.total_norm is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_parameter_norm": 0.0}, r"clip_parameter_norm=0\.0 is out of range"),
        ({"clip_parameter_norm": float("nan")}, "clip_parameter_norm=nan is out of range"),
        (
            {"clip_parameter_norm": 1.0, "max_norm": 2.0},
            r"max_norm=2\.0 and clip_parameter_norm=1\.0 are both set: clip one way",
        ),
        ({"clip_parameter_norm": 1.0, "clip_value": 2.0}, "clip one way"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        optim.fuse_backward(model, optimizer, **options)
    optim.fuse_backward(model, optimizer).remove()

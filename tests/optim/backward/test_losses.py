"""Several losses in one step, in one backward pass or in several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subulp import optim

from ..support import BF16
from .twins import MAKERS, Model, assert_same, batches, loss_of, twins


def losses_of(model: Model, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Losses that share the tied, the repeated and the checkpointed parameters, and a graph."""
    x, y = batch
    h = model.repeated(model.embed(x))
    return [
        (model.head(h) - y).square().mean(),
        (model.repeated(h) * model.scale).square().mean(),
        loss_of(model, batch),
    ]


def train_plain(side: tuple[Model, Any], batch: tuple[Tensor, Tensor], **clip: float) -> None:
    model, optimizer = side
    torch.autograd.backward(losses_of(model, batch))
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip["max_norm"])
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}])
@pytest.mark.parametrize("precision", ["collage-plus", "stochastic"])
def test_several_losses_in_one_pass(precision: str, options: dict[str, float]) -> None:
    plain, fused = twins(MAKERS["adamw"](precision), BF16)
    with optim.fuse_backward(*fused, **options) as handle:
        for batch in batches(3, BF16):
            train_plain(plain, batch, **options)
            handle.backward(losses_of(fused[0], batch))
    assert_same(plain, fused)
    assert fused[1].state[fused[0].embed.weight]["step"] == 3


def test_a_plain_pass_from_several_losses() -> None:
    plain, fused = twins(MAKERS["adamw"]("kahan"), BF16)
    with optim.fuse_backward(*fused):
        for batch in batches(2, BF16):
            train_plain(plain, batch)
            torch.autograd.backward(losses_of(fused[0], batch))
    assert_same(plain, fused)


@pytest.mark.parametrize("through_handle", [True, False])
def test_several_losses_in_several_passes(through_handle: bool) -> None:
    plain, fused = twins(MAKERS["adamw"]("collage-plus"), BF16)
    with optim.fuse_backward(*fused, accumulate=3) as handle:
        for batch in batches(2, BF16):
            for side in (plain, fused):
                losses = losses_of(side[0], batch)
                for i, loss in enumerate(losses):
                    if side is fused and through_handle:
                        handle.backward(loss, retain_graph=i < 2)
                    else:
                        loss.backward(retain_graph=i < 2)
            plain[1].step()
            plain[1].zero_grad()
    assert_same(plain, fused)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_losses_that_are_no_scalars(max_norm: float | None) -> None:
    plain, fused = twins(MAKERS["sgd"]("collage-plus"), BF16)
    (x, y), (z, _) = batches(2, BF16)
    weights = [y, None]
    with optim.fuse_backward(*fused, max_norm=max_norm) as handle:
        roots = [[m(x), m(z).square().mean()] for m in (plain[0], fused[0])]
        torch.autograd.backward(roots[0], weights)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(plain[0].parameters(), max_norm)
        plain[1].step()
        plain[1].zero_grad()
        handle.backward(roots[1], weights)
        for model, backward in ((plain[0], Tensor.backward), (fused[0], handle.backward)):
            backward(model(x), y)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(plain[0].parameters(), max_norm)
    plain[1].step()
    assert_same(plain, fused)


def test_a_graph_that_was_not_kept_is_refused_by_autograd() -> None:
    model = nn.Linear(3, 1)
    with optim.fuse_backward(model, optim.SGD(model.parameters(), lr=0.1), accumulate=2) as handle:
        loss = model(torch.ones(2, 3)).square().sum()
        handle.backward(loss)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            handle.backward(loss)


def test_a_kept_graph_that_needs_old_weights_is_refused_by_autograd() -> None:
    """The first pass has changed the weights that the second one would read."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with optim.fuse_backward(model, optim.SGD(model.parameters(), lr=0.1)) as handle:
        loss = model(torch.ones(2, 3)).sum()
        handle.backward(loss, retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            handle.backward(loss)


def test_no_loss() -> None:
    model = nn.Linear(3, 1)
    with (
        optim.fuse_backward(model, optim.SGD(model.parameters(), lr=0.1)) as handle,
        pytest.raises(ValueError, match="loss is an empty sequence"),
    ):
        handle.backward([])

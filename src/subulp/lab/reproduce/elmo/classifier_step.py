"""A training step of a classifier over many labels against the paper's formulas."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .... import optim
from ....nn import ExtremeClassifier
from ....numerics import E4M3
from ....numerics.logistic import sigmoid
from ..found import Found, Observation

_POSITIVES = 3


def fp8(labels: int, dim: int, batch: int) -> Found:
    """ELMO, algorithm 1: rows and inputs in E4M3, logits in BF16, an update that is rounded once.

    Inputs and rows are small multiples of powers of two, so that sums have one value in any order.

    Args:
        labels: Number of labels.
        dim: Size of a vector.
        batch: Instances.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (batch, dim), generator=generator) / 8
    rows = torch.randint(-8, 9, (labels, dim), generator=generator) / 64
    head, instances, positives = _head(labels, dim, batch, "e4m3", "fp8")
    head.table.store(0, rows)
    # A power of two: the update is exact.
    optim.RowSGD(head, lr=2.0**-4)
    x.requires_grad_()
    head(x, instances, positives).backward()

    wide, wide_rows = x.detach().double(), rows.double()
    logits = (wide @ wide_rows.t()).to(torch.bfloat16).float()
    gradient = sigmoid(logits)
    gradient[instances, positives] -= 1
    gradient = gradient.to(torch.bfloat16).double()
    exact = wide_rows - 2.0**-4 * (gradient.t() @ wide)
    stored = head.weight(torch.arange(labels)).double()
    below, above = _neighbours(exact)
    outside = ((stored < below) | (stored > above)).sum()
    moved = (above > below) & (exact > below) & (exact < above)
    error = ((stored - exact) / (above - below))[moved]
    likely = ((exact - below) / (above - below))[moved]
    deviation = (likely * (1 - likely)).sum().sqrt()
    assert x.grad is not None
    wrong = (x.grad.double() - gradient @ wide_rows).abs().max()
    return Found(
        (
            Observation("rows", "weights that are no neighbour of the exact one", int(outside)),
            Observation("rows", "weights that were rounded", int(moved.sum())),
            Observation("rows", "errors in standard deviations", float(error.sum() / deviation)),
            Observation("inputs", "largest error of the gradient", float(wrong)),
        )
    )


def fp32(labels: int, dim: int, batch: int) -> Found:
    """ELMO, appendix B: the gradients of the loss that is skipped against those of autograd.

    Args:
        labels: Number of labels.
        dim: Size of a vector.
        batch: Instances.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, dim, generator=generator).requires_grad_()
    head, instances, positives = _head(labels, dim, batch, "fp32", "fp32")
    optim.RowSGD(head, lr=1.0)
    every = torch.arange(labels)
    before = head.weight(every).double()
    head(x, instances, positives).backward()
    assert x.grad is not None
    other = x.detach().double().requires_grad_()
    weight = before.clone().requires_grad_()
    target = torch.zeros(batch, labels, dtype=torch.float64)
    target[instances, positives] = 1
    loss = F.binary_cross_entropy_with_logits(other @ weight.t(), target, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    assert other.grad is not None
    assert weight.grad is not None
    update = before - head.weight(every).double()
    return Found(
        (
            Observation("inputs", "relative error", _relative(x.grad.double(), other.grad)),
            Observation("rows", "relative error", _relative(update, weight.grad)),
        )
    )


def _head(
    labels: int, dim: int, batch: int, storage: str, products: str
) -> tuple[ExtremeClassifier, Tensor, Tensor]:
    """A classifier, and instances and labels of a batch."""
    head = ExtremeClassifier(
        dim,
        labels,
        storage=storage,
        chunks=4,
        reduction="sum",
        products=products,  # type: ignore[arg-type]
        seed=0,
    )
    instances = torch.arange(batch).repeat_interleave(_POSITIVES)
    places = torch.arange(batch * _POSITIVES)
    return head, instances, (places * 7) % labels


def _neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of E4M3 that is not above, and the smallest that is not below."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = torch.tensor(sorted(set(codes[codes.isfinite()].tolist())), dtype=torch.float64)
    assert float(grid[-1]) == E4M3.max
    high = torch.searchsorted(grid, x).clamp(max=len(grid) - 1)
    # Beyond the largest number there is no other.
    low = torch.where(grid[high] <= x, high, (high - 1).clamp(min=0))
    return grid[low], grid[high]


def _relative(found: Tensor, exact: Tensor) -> float:
    """Largest error over the largest magnitude."""
    return float((found - exact).abs().max() / exact.abs().max())

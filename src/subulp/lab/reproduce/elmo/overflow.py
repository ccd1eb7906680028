"""Gradients of a classifier by the number of labels, and what FP16 makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .... import optim
from ..found import Found, Observation
from .classifier_memory import POSITIVES, classifier

INPUTS, ROWS = "largest gradient of the inputs", "largest gradient of the rows"
SKIPPED = "steps of an overflow"
RENEE, WIDE, BF16 = "renee", "fp32", "bf16"


def growth(labels: list[int], dim: int, batch: int, steps: int, seeds: list[int]) -> Found:
    """Trainings of a classifier on inputs that have something in common, as an encoder's do.

    Gradients are those of the last step in FP32. In FP16, what overflows is skipped; in BF16 it
    would be counted by gradients that are not finite.

    Args:
        labels: Numbers of labels.
        dim: Size of a vector.
        batch: Instances.
        steps: Steps.
        seeds: Of inputs and labels.
    """
    found = []
    for count in labels:
        for seed in seeds:
            for storage in (WIDE, BF16, RENEE):
                case = f"{storage}, {count:,} labels"
                inputs, rows, skipped = _train(storage, count, dim, batch, steps, seed)
                found.append(Observation(case, SKIPPED, skipped, seed))
                if storage == WIDE:
                    found.append(Observation(case, INPUTS, inputs, seed))
                    found.append(Observation(case, ROWS, rows, seed))
    return Found(tuple(found))


_RATE = 0.05


def _train(
    storage: str, labels: int, dim: int, batch: int, steps: int, seed: int
) -> tuple[float, float, int]:
    head, optimizer = classifier(storage, labels, dim, 4)
    assert isinstance(optimizer, optim.RowSGD)
    rate = _RATE / batch
    optimizer.param_groups[0]["lr"] = rate
    skipped, inputs, rows = 0, 0.0, 0.0
    for x, instances, positives in _batches(labels, dim, batch, steps, seed):
        every = torch.arange(labels)
        before = head.weight(every) if storage == WIDE else None
        head(x, instances, positives).backward()
        assert x.grad is not None
        inputs = float(x.grad.abs().max())
        skipped += not bool(torch.isfinite(x.grad).all())
        if before is not None:
            rows = float((head.weight(every) - before).abs().max()) / rate
    if storage == RENEE:
        skipped += int(head.skipped_steps)
    return inputs, rows, skipped


def _batches(
    labels: int, dim: int, batch: int, steps: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(dim, generator=generator)
    instances = torch.arange(batch).repeat_interleave(POSITIVES)
    for _ in range(steps):
        x = (torch.randn(batch, dim, generator=generator) + common).mul_(0.3).requires_grad_()
        yield x, instances, torch.randint(labels, (batch * POSITIVES,), generator=generator)

"""Refinement of a trained classifier in higher precision, a few labels at a time.

ELMO, appendix D, "Post-hoc Classifier Refinement".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..numerics.int_rows import IntFormat
from .extreme_classifier import ExtremeClassifier
from .row_table import Storage, parse_storage

Batch = tuple[Tensor, Tensor, Tensor]


def refine(
    head: ExtremeClassifier,
    batches: Iterable[Batch],
    *,
    storage: Storage = "bf16",
    labels_at_a_time: int = 1 << 16,
    epochs: int = 1,
    lr: float = 0.05,
    weight_decay: float = 0.0,
) -> ExtremeClassifier:
    """Continue to train the rows of ``head`` in FP32, on frozen features, and store them wider.

    With frozen features, no label's training depends on another's. So one part of the labels after
    the other is trained to the end, and only its rows exist in FP32. The size of the parts changes
    the result by no more than the summation order of matrix products does. Every part sees all
    batches in every epoch: keep the features, or pay the encoder's forward pass that often.

    Args:
        head: A trained classifier; it is not changed.
        batches: Embeddings ``(batch, dim)``, and the instances and labels of their pairs, int64
            ``(count,)``, as :meth:`ExtremeClassifier.forward` takes them: a list, or anything else
            that can be iterated over repeatedly.
        storage: Format of the result's rows (default: ``"bf16"``).
        labels_at_a_time: Labels per part, of ``4 * dim`` bytes each (default: 65,536).
        epochs: How often each part sees the batches (default: 1).
        lr: Learning rate of SGD in the first epoch, for the head's ``reduction``; it falls linearly
            to ``lr / epochs`` in the last (default: 0.05).
        weight_decay: Weight decay of the rows, times the learning rate (default: 0).

    Returns:
        A classifier with the labels, dropout, rounding, reduction and mode of ``head``, its scale
        unless the rows are integers, its products if those rows can have them, and no remainders.
        It needs an optimizer to be trained further.

    Raises:
        ValueError: An argument is out of range, ``batches`` is empty or can be read only once, a
            batch does not fit the head, or the head is on a mesh.
    """
    if head.ranks is not None:
        raise ValueError(
            f"head shares its labels with {head.ranks.size} ranks, and refine() is for one "
            "process: load its state into a head without mesh there"
        )
    if labels_at_a_time < 1 or epochs < 1:
        raise ValueError(
            f"labels_at_a_time={labels_at_a_time} and epochs={epochs} must be at least 1"
        )
    if not (0 <= lr < math.inf and 0 <= weight_decay < math.inf):
        raise ValueError(f"lr={lr} and weight_decay={weight_decay} must be at least 0, and finite")
    if isinstance(batches, Iterator):
        raise ValueError(
            "batches is an iterator, which can be read once, and every part of the labels needs "
            "all of them: pass a list, or an object whose __iter__ starts over"
        )
    device = head.table.codes.device
    scale = None if isinstance(parse_storage(storage), IntFormat) else head.table.scale
    refined = _without_rows(head, head.num_labels, storage, head.chunks, scale)
    refined.to_empty(device=device)
    for start in range(0, head.num_labels, labels_at_a_time):
        stop = min(start + labels_at_a_time, head.num_labels)
        part = _without_rows(head, stop - start, "fp32", min(head.chunks, stop - start))
        part.to_empty(device=device)
        # It drops the weights that the whole head would.
        part.labels_before = start
        labels = torch.arange(start, stop, dtype=torch.int64, device=device)
        part.table.store(0, head.weight(labels))
        _train(part, batches, start, head.num_labels, epochs, _Options(lr, weight_decay))
        refined.table.store(start, part.table.stored)
    return refined.train(head.training)


@dataclass
class _Options:
    """The options of all rows, as a classifier asks for them."""

    lr: float
    weight_decay: float

    def groups_of(self, tables: Sequence[Tensor]) -> list[dict[str, Any]]:
        return [{"lr": self.lr, "weight_decay": self.weight_decay}] * len(tables)

    def unscaled(self, grad: Tensor) -> Tensor:
        return grad

    def factor(self) -> float:
        return 1.0

    def accumulator(self, rows: Tensor, group: dict[str, Any] | None = None) -> None:
        return None


def _train(
    part: ExtremeClassifier,
    batches: Iterable[Batch],
    start: int,
    num_labels: int,
    epochs: int,
    options: _Options,
) -> None:
    """Train the labels from ``start`` on."""
    part.row_optimizer = options
    highest = options.lr
    for epoch in range(epochs):
        options.lr, before = highest * (1 - epoch / epochs), part.steps
        for embeddings, rows, labels in batches:
            if labels.is_floating_point() or labels.dtype == torch.bool:
                raise ValueError(f"labels of a batch have dtype {labels.dtype}: expected integers")
            # Narrow ones would wrap around.
            cols = labels.to(torch.int64)
            if cols.numel() and not 0 <= int(cols.min()) <= int(cols.max()) < num_labels:
                raise ValueError(
                    f"labels of a batch are from {int(cols.min())} to {int(cols.max())}: expected "
                    f"0 to {num_labels - 1}"
                )
            inside = (cols >= start) & (cols < start + part.num_labels)
            with torch.enable_grad():
                part(embeddings.detach(), rows[inside], cols[inside] - start)
        if part.steps == before:
            raise ValueError(
                "batches is empty: pass the features and labels to train on"
                if not epoch
                else f"batches is empty in epoch {epoch + 1} of {epochs}: it can be read once, and "
                "has to start over; pass a list, or an object whose __iter__ does"
            )


def _without_rows(
    head: ExtremeClassifier,
    num_labels: int,
    storage: Storage,
    chunks: int,
    scale: float | None = None,
) -> ExtremeClassifier:
    """A classifier like ``head``, on ``"meta"``: its rows are yet to be made."""
    return ExtremeClassifier(
        head.table.dim,
        num_labels,
        storage=storage,
        chunks=chunks,
        dropout=head.dropout,
        rounding=head.rounding,
        reduction=head.reduction,
        scale=scale,
        products=head.products if head.has_products(storage, head.products) else "auto",
        seed=head.seed,
        device="meta",
    )

"""``head_step``: one training step of a chunk of a classifier's rows, in one pass over them.

A function and no operator of ``torch.library``: it runs inside the backward pass of
:class:`subulp.nn.ExtremeClassifier`, once for each chunk, and no graph ever holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...numerics import Format
from ...numerics.int_rows import IntFormat
from ...numerics.random_bits import RandomAddress as RandomAddress
from .. import backend
from . import exact_sum
from .exact_sum import ExactSum

Rounding = Literal["nearest", "stochastic"]
Products = Literal["fp32", "bf16", "fp8"]


@dataclass
class HeadJob:
    """Arguments of :func:`head_step`.

    Attributes:
        rows: ``(labels, dim)`` stored values of the chunk, or of a run of its rows; or rows of
            integers, uint8 ``(labels, row_bytes(dim, bits))``; updated.
        format: The format of the stored values; their dtype's, a simulated one in FP32 storage, or
            integers.
        remainder: BF16 ``(precise, dim)``, what rounding took from the first rows; updated.
        x: FP32 ``(batch, dim)``, the head's inputs.
        grad_x: FP32 ``(batch, dim)``; the chunk's part is added.
        positive_instances: int64 ``(count,)``.
        positive_labels: int64 ``(count,)``, ascending, counted from the row before which
            ``first_label`` are; no pair is given twice. Where :func:`finds_positives` says so,
            others than the chunk's may be among them, and pairs to be left out have the instance
            -1.
        gain: Factor on the gradient of the logits.
        lr: Learning rate.
        weight_decay: Weight decay of the rows.
        rounding: How rows without a remainder are rounded.
        random: Address of the random bits of the chunk's first element.
        scale: A stored value times ``scale``, a power of two, is the weight; 1 for integers.
        dropout: Share of the weights that are left out of the products.
        train: Whether to update the rows and compute ``grad_x``.
        gradient: Whether to compute ``grad_x`` also where the rows are not updated.
        loss: FP64 ``(exact_sum.PARTS,)``, whose sum is the loss: the chunk's binary cross-entropies
            are added, in any order with the same bits (:mod:`.exact_sum`). Or an ``ExactSum`` of
            several chunks, which its owner flushes. ``None`` skips it.
        products: ``"fp32"``; ``"bf16"`` for rows of BF16 numbers; or ``"fp8"`` for E4M3 rows.
        before: Rows of the chunk that lie before these, with another rank. Tiles are those of the
            whole chunk, and rows that are not here count as zeros in products: how a product
            rounds depends on its shape.
        after: Rows of the chunk that lie after these.
        operands: What products take of ``x``, for a backend to fill: the jobs of a step, which have
            the same ``x`` and ``scale``, share it. ``None`` makes it anew.
        first_label: What ``positive_labels`` has for the first of these rows.
    """

    rows: Tensor
    format: Format | IntFormat
    remainder: Tensor | None
    x: Tensor
    grad_x: Tensor
    positive_instances: Tensor
    positive_labels: Tensor
    gain: float
    lr: float
    weight_decay: float
    rounding: Rounding
    random: RandomAddress
    scale: float = 1.0
    dropout: float = 0.0
    train: bool = True
    gradient: bool = False
    loss: Tensor | ExactSum | None = None
    products: Products = "fp32"
    before: int = 0
    after: int = 0
    operands: dict[str, Tensor] | None = None
    first_label: int = 0

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.rows.device

    @property
    def dim(self) -> int:
        """Weights of a row."""
        return self.x.shape[1]

    @property
    def chunk_rows(self) -> int:
        """Rows of the whole chunk."""
        return self.before + self.rows.shape[0] + self.after

    @property
    def precise(self) -> int:
        """Rows that have a remainder."""
        return 0 if self.remainder is None else self.remainder.shape[0]


def finds_positives(device: torch.device) -> bool:
    """Whether a step leaves out positives of other chunks: the host would wait to do it itself."""
    return backend.choose(device).backend == "triton"


def head_step(job: HeadJob) -> None:
    """Compute a chunk's logits, their gradient and the inputs' gradient, and update its rows.

    ELMO, algorithm 1 and appendix B, with ``W`` the wide values of the rows::

        G = (sigmoid(W @ x.T) - Y) * gain
        grad_x += G.T @ W
        W -= lr * (G @ x + weight_decay * W)

    and each new weight rounded once to its storage. Neither ``G`` for more labels than a tile of
    rows, nor a gradient of more than a tile of weights ever exists. Rounding equals that of
    :mod:`subulp.ops.sgd` bit for bit; with a remainder, the wide value is the stored one plus the
    remainder, and what nearest rounding takes away becomes the new remainder. A row of integers
    steps in FP32 and is then encoded anew, with a new scale and bias
    (:mod:`subulp.numerics.int_rows`).

    With ``products="bf16"``, operands are rounded to nearest even and summed up in FP32
    (:mod:`subulp.ops.bf16_product`)::

        Z = bf16(W @ bf16(x).T)
        G = bf16((sigmoid(Z) - Y) * gain)
        grad_x += G.T @ W
        W -= lr * (G @ bf16(x) + weight_decay * W)

    Weights that dropout has scaled up, in both products with ``W``, are rounded to BF16 too.

    With ``products="fp8"`` the logits are ``bf16(W @ e4m3(x).T)``, the rest is the same: ELMO,
    section 4.3 and algorithm 1. ``e4m3`` saturates. The gradient stays in BF16 because a fifth of
    it lies below even E5M2's range (figure 2b). The loss is that of ``Z``.
    """
    backend.run("head", job)


def sorted_pairs(
    x: Tensor, instances: Tensor, labels: Tensor, row_of: Tensor | None, num_labels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A batch checked and sorted by kernels, where the host would wait for what it finds out.

    Where :func:`finds_positives` says so; see :mod:`.triton_batch`, whose arguments, results and
    errors these are.

    Returns:
        ``x``, contiguous, then instances and rows.
    """
    # Triton may not be installed.
    from . import triton_batch  # noqa: PLC0415

    x = x.contiguous()
    return x, *triton_batch.sorted_pairs(x, instances, labels, row_of, num_labels)


def new_sums(x: Tensor, *, loss: bool, late: bool) -> tuple[Tensor | None, Tensor]:
    """What the chunks of a step add to: the parts of the loss, and the gradient of ``x``.

    Args:
        x: FP32 ``(batch, dim)``, the inputs.
        loss: Whether there is a loss; else its parts are ``None``.
        late: Whether kernels have checked the batch: both are NaN where they found something.
    """
    if not late:
        return exact_sum.new_parts(x.device) if loss else None, torch.zeros_like(x)
    # Triton may not be installed.
    from . import triton_batch  # noqa: PLC0415

    count = exact_sum.PARTS if loss else 0
    parts = torch.empty(count, dtype=torch.float64, device=x.device)
    grad_x = triton_batch.new_sums(x, parts)
    return parts if loss else None, grad_x


def score_keys(scores: Tensor) -> Tensor:
    """Integers of which ``torch.topk`` has but one choice; see :mod:`.triton_topk`.

    Where :func:`finds_positives` says so: the host would wait to find equal scores.
    """
    # Triton may not be installed.
    from . import triton_topk  # noqa: PLC0415

    return triton_topk.keys(scores)

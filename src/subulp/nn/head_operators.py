"""What an evaluated :class:`.extreme_classifier.ExtremeClassifier` is in an exported program.

Its passes depend on the data that they see, so each is one operator. They take the head apart into
tensors and numbers, and put it together again around the same memory when they run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..numerics.int_rows import ROW_FORMATS, IntFormat
from .extreme_classifier import ExtremeClassifier
from .row_parameter import RowParameter
from .row_table import parse_storage


@torch.library.custom_op("subulp::classifier_loss", mutates_args=())
def classifier_loss(
    codes: Tensor,
    row_of: Tensor | None,
    label_of: Tensor | None,
    storage: str,
    dim: int,
    scale: float,
    head_fraction: float,
    products: str,
    chunks: int,
    reduction: str,
    embeddings: Tensor,
    label_rows: Tensor,
    label_cols: Tensor,
) -> Tensor:
    """``head.eval()(embeddings, label_rows, label_cols)``.

    Args:
        codes: The stored rows.
        row_of: Row of each label, ``None`` where it is the label's number.
        label_of: Label of each row.
        storage: Name of the format; a simulated one as ``"exponent bits,mantissa bits"``.
        dim: Size of an embedding.
        scale: A stored number times ``scale`` is the weight.
        head_fraction: Share of the labels that keep a remainder, which has no part in products.
        products: Operands of the products, as :class:`.ExtremeClassifier` takes them.
        chunks: Parts of the labels.
        reduction: ``"mean"`` or ``"sum"``.
        embeddings: ``(batch, dim)``.
        label_rows: Instances of positive pairs.
        label_cols: Their labels.

    Returns:
        FP32 tensor ().

    Raises:
        ValueError: A shape, dtype, device or index does not fit.
        FloatingPointError: The embeddings are not finite.
    """
    head = _head(codes, row_of, label_of, storage, dim, scale, head_fraction, products)
    head.chunks = chunks
    head.reduction = reduction  # type: ignore[assignment]
    loss: Tensor = head(embeddings, label_rows, label_cols)
    return loss


@classifier_loss.register_fake
def _(codes: Tensor, *others: object) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=codes.device)


@torch.library.custom_op("subulp::classifier_topk", mutates_args=())
def classifier_topk(
    codes: Tensor,
    row_of: Tensor | None,
    label_of: Tensor | None,
    storage: str,
    dim: int,
    scale: float,
    head_fraction: float,
    products: str,
    embeddings: Tensor,
    k: int,
) -> tuple[Tensor, Tensor]:
    """``head.topk(embeddings, k)``; the arguments before are those of :func:`classifier_loss`."""
    head = _head(codes, row_of, label_of, storage, dim, scale, head_fraction, products)
    return head.topk(embeddings, k)


@classifier_topk.register_fake
def _(codes: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    embeddings, k = others[-2:]
    shape = embeddings.shape[0], k
    return (
        torch.empty(shape, dtype=torch.float32, device=codes.device),
        torch.empty(shape, dtype=torch.int64, device=codes.device),
    )


def _head(
    codes: Tensor,
    row_of: Tensor | None,
    label_of: Tensor | None,
    storage: str,
    dim: int,
    scale: float,
    head_fraction: float,
    products: str,
) -> ExtremeClassifier:
    """The head whose parts these are."""
    made_of = parse_storage(
        storage if storage in ROW_FORMATS else tuple(map(int, storage.split(",")))  # type: ignore[arg-type]
    )
    head = ExtremeClassifier(
        dim,
        codes.shape[0],
        storage=made_of,
        chunks=1,
        head_fraction=head_fraction,
        scale=None if isinstance(made_of, IntFormat) else scale,
        products=products,  # type: ignore[arg-type]
        seed=0,
        device="meta",
    )
    head.table.codes = RowParameter(codes)
    head.row_of, head.label_of = row_of, label_of
    return head.eval()

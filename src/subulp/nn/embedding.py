"""An embedding whose table stays narrow: rows are gathered first and widened after."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..numerics.whole import is_whole
from .derivatives import once_differentiable
from .dtensors import embedding_of_shards, is_dtensor
from .narrow import draw_wide, gradient_dtype


def narrow_embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """``F.embedding(ids, weight.float())`` without the FP32 copy of the table.

    The gradient is dense and of ``weight.grad_dtype`` (the weight's own dtype where it is not set).
    Repeated ids are summed in FP32, in a buffer of the touched rows only, and rounded once.

    Args:
        ids: Integer tensor of row numbers, any shape.
        weight: ``(num_embeddings, embedding_dim)``, any floating-point dtype that casts to FP32.
        padding_idx: A row that gets no gradient, as in ``F.embedding``; from 0, it must not be
            counted from the end (default: ``None``).

    Returns:
        FP32 tensor of shape ``(*ids.shape, embedding_dim)``.

    Raises:
        ValueError: ``weight`` is not a floating-point matrix, ``ids`` are not integers, or there is
            no such row as ``padding_idx``; that is not available for DTensors.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and dtype {weight.dtype}: expected a "
            "floating-point matrix (num_embeddings, embedding_dim)"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids have dtype {ids.dtype}: expected int32 or int64 row numbers")
    if padding_idx is not None and not (
        is_whole(padding_idx) and 0 <= padding_idx < weight.shape[0]
    ):
        raise ValueError(f"padding_idx={padding_idx!r} is out of range: {weight.shape[0]} rows")
    if is_dtensor(weight) or is_dtensor(ids):
        if padding_idx is not None:
            raise ValueError(f"padding_idx={padding_idx} is not available for DTensors")
        return embedding_of_shards(ids, weight, narrow_embedding)
    if torch.compiler.is_exporting():
        # The gradient of a program is the rows' own, so that of padding is left out here.
        rows = weight[ids].float()
        if padding_idx is None:
            return rows
        return torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
    y: Tensor = _NarrowEmbedding.apply(ids, weight, padding_idx)  # type: ignore[no-untyped-call]
    return y


_UNAVAILABLE = ("max_norm", "scale_grad_by_freq", "sparse")


class Embedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` for a table in any storage dtype, with FP32 output.

    Created in torch's default dtype like its parent; ``.to(torch.bfloat16)`` (or FP16, FP8) makes
    it narrow. See :func:`narrow_embedding`.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Numbers per row.
        device: Device of the table (default: torch's).
        dtype: Dtype of the table (default: torch's).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """As in torch; parameters in FP8 are drawn in FP32 and rounded."""
        draw_wide(self, super().reset_parameters)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> Self:  # type: ignore[override]
        """A module with this table, of its dtype.

        Args:
            embeddings: ``(num_embeddings, embedding_dim)``.
            freeze: Leave it as it is (default: ``True``).
            **options: Those of ``torch.nn.Embedding.from_pretrained``; none is available here.

        Raises:
            ValueError: ``embeddings`` is no matrix.
            TypeError: An option is given.
        """
        if options:
            raise TypeError(
                f"{cls.__name__} has no option {next(iter(options))!r}: a narrow table is looked "
                "up as it is; use torch.nn.Embedding for it"
            )
        if embeddings.dim() != 2:
            raise ValueError(f"embeddings have shape {tuple(embeddings.shape)}: expected a matrix")
        made = cls(0, embeddings.shape[1])
        made.num_embeddings = embeddings.shape[0]
        made.weight = torch.nn.Parameter(embeddings, requires_grad=not freeze)
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Row numbers of any shape to FP32 rows, in one more dimension.

        Raises:
            ValueError: The row numbers are not integers, or an option of torch's is set here.
        """
        for name in _UNAVAILABLE:
            if getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)} is not available: nn.Embedding of subulp looks "
                    "rows up, and nothing else; leave it as it was"
                )
        return narrow_embedding(input, self.weight, self.padding_idx)


class _NarrowEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        return weight.index_select(0, ids.reshape(-1)).float().view(*ids.shape, weight.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ids, weight, ctx.padding_idx = inputs
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        ctx.shape = weight.shape
        ctx.grad_dtype = gradient_dtype(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[None, Tensor | None, None]:
        # None passes where fuse_backward(keep_bytes=) has the gradient already.
        if grad_y is None or not ctx.needs_input_grad[1]:
            return None, None, None
        (ids,) = ctx.saved_tensors
        touched, position = ids.reshape(-1).unique(return_inverse=True)
        sums = grad_y.new_zeros(touched.numel(), ctx.shape[1])
        sums.index_add_(0, position, grad_y.reshape(-1, ctx.shape[1]))
        grad = torch.zeros(ctx.shape, dtype=ctx.grad_dtype, device=grad_y.device)
        grad[touched] = sums.to(ctx.grad_dtype)
        if ctx.padding_idx is not None:
            grad[ctx.padding_idx] = 0
        return None, grad, None
